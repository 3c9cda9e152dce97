"""The Triton functions of a folder by their syntax alone, and what the bits of each depend on.

Nothing is imported: a function's *closure* is its syntax tree without docstrings and positions, and
those of every function, constant and class of the folder that it names, in turn. *Launches* are
the calls ``kernel[grid](…)`` in functions that name the kernel: they choose flags and options.
"""

import ast
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samebits.checks.determinism.variant import RegistryError

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Fields that carry no meaning, or that not every Python version has.
_UNREAD = frozenset({"ctx", "kind", "type_comment", "type_params", "lineno", "end_lineno"})


@dataclass(eq=False)
class File:
    """One Python file: what its names stand for."""

    path: Path
    # From the root, with forward slashes.
    subject: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise RegistryError(f"{self.path} does not parse: {error}") from error

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """Functions, classes and constants of the module, by name."""
        found: dict[str, ast.stmt] = {}
        for node in _module_level(self.tree.body):
            if isinstance(node, Function | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str | None]]:
        """Local name -> (module, name in it or None for the module itself)."""
        found: dict[str, tuple[str, str | None]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    head = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or head] = (head, None)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    found[alias.asname or alias.name] = (module, alias.name)
        return found

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Every function by its qualified name, nested ones too."""
        return dict(_functions(self.tree, ""))

    def is_jit(self, function: Function) -> bool:
        """Return whether a decorator is Triton's (or Gluon's) ``jit``."""
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = _dotted(called)
            head, _, rest = name.partition(".")
            module, inside = self.imports.get(head, ("", None))
            if (rest or inside or "").rpartition(".")[2] == "jit" and module.startswith("triton"):
                return True
        return False


@dataclass(eq=False)
class Sources:
    """The Python files below a root."""

    root: Path
    _closures: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def files(self) -> dict[str, File]:
        """Every file by its path from the root."""
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            subject = path.relative_to(self.root).as_posix()
            if any(part.startswith(".") for part in subject.split("/")):
                continue
            try:
                found[subject] = File(path, subject, path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise RegistryError(f"{path} cannot be read: {error}") from error
        return found

    @cached_property
    def kernels(self) -> dict[str, Function]:
        """Every ``@triton.jit`` function, device functions too, as "file.py:name"."""
        return {
            f"{subject}:{name}": function
            for subject, file in self.files.items()
            if "jit" in file.text
            for name, function in file.functions.items()
            if file.is_jit(function)
        }

    def closure(self, kernel: str) -> dict[str, Any]:
        """Return what decides the kernel's bits, by name: itself, what it names, its launches.

        Raises:
            RegistryError: There is no such kernel.
        """
        if kernel not in self.kernels:
            raise RegistryError(f"there is no @triton.jit function {kernel} below {self.root}")
        if kernel not in self._closures:
            subject, _, name = kernel.partition(":")
            found: dict[str, Any] = {}
            self._add(self.files[subject], name, self.kernels[kernel], found)
            for file, place, calls in self._launches.get(kernel, []):
                found[f"launch {file.subject}:{place}"] = [_canonical(call) for call in calls]
                for call in calls:
                    self._follow(file, call, found, device_only=True)
            self._closures[kernel] = found
        return self._closures[kernel]

    def fingerprint(self, kernels: tuple[str, ...], config: Any) -> str:
        """Return the hash of the kernels' closures and of a configuration."""
        closures = {kernel: self.closure(kernel) for kernel in sorted(set(kernels))}
        text = json.dumps([closures, config], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _add(self, file: File, name: str, node: ast.AST, found: dict[str, Any]) -> None:
        key = f"{file.subject}:{name}"
        if key not in found:
            found[key] = _canonical(node)
            # Decorators say how a function is launched; what they are belongs to the host.
            decorators = getattr(node, "decorator_list", [])
            names = {name for decorator in decorators for name in _names(decorator)}
            self._follow(file, node, found, unless=names)

    def _follow(
        self,
        file: File,
        node: ast.AST,
        found: dict[str, Any],
        *,
        device_only: bool = False,
        unless: Collection[str] = (),
    ) -> None:
        """Add what ``node`` names; with ``device_only`` no more than functions for the device."""
        for name in _names(node):
            place = self._resolve(file, name)
            if place is None:
                continue
            where, local = place
            target = where.definitions[local]
            jit = isinstance(target, Function) and where.is_jit(target)
            host = name in unless and isinstance(target, Function | ast.ClassDef)
            if (jit or not device_only) and not host:
                self._add(where, local, target, found)

    def _resolve(self, file: File, name: str, *, hops: int = 8) -> tuple[File, str] | None:
        """Return the file below the root that defines what ``name`` means in ``file``.

        Follows at most ``hops`` files that only hand the name on.
        """
        head, *rest = name.split(".")
        if head in file.definitions:
            return file, head
        if head not in file.imports or hops == 0:
            return None
        module, inside = file.imports[head]
        path = [*([inside] if inside else []), *rest]
        # The first parts of a dotted name may be modules: take as many as are files.
        for count in range(len(path) - 1, -1, -1):
            parts = [module.rstrip(".") or module, *path[:count]]
            where = self._file_of(file, ".".join(parts))
            if where is None:
                continue
            if path[count] in where.definitions:
                return where, path[count]
            if path[count] in where.imports:
                return self._resolve(where, path[count], hops=hops - 1)
        return None

    def _file_of(self, file: File, module: str) -> File | None:
        """Return the file below the root that is ``module`` (with dots before it: relative)."""
        names = module.lstrip(".")
        dots = len(module) - len(names)
        if dots:
            starts = [[file.path, *file.path.parents][dots]]
        else:
            starts = [self.root, *self.root.parents[:3], file.path.parent]
        for start in starts:
            stem = start.joinpath(*names.split("."))
            for path in (Path(f"{stem}.py"), stem / "__init__.py"):
                if path.is_relative_to(self.root):
                    found = self.files.get(path.relative_to(self.root).as_posix())
                    if found is not None:
                        return found
        return None

    @cached_property
    def _launches(self) -> dict[str, list[tuple[File, str, list[ast.Call]]]]:
        """Kernel -> host functions that name it, with their calls ``…[grid](…)``."""
        found: dict[str, list[tuple[File, str, list[ast.Call]]]] = {}
        words = re.compile(
            "|".join(rf"\b{re.escape(k.rpartition(':')[2])}\b" for k in self.kernels)
        )
        for file in self.files.values():
            # Most files launch nothing; parsing them takes time.
            if not self.kernels or "](" not in file.text or not words.search(file.text):
                continue
            for name, function in file.functions.items():
                calls = [] if file.is_jit(function) else _subscript_calls(function)
                places = {self._resolve(file, n) for n in _names(function)} if calls else set()
                for kernel in sorted(f"{p[0].subject}:{p[1]}" for p in places if p is not None):
                    if kernel in self.kernels:
                        found.setdefault(kernel, []).append((file, name, calls))
        return found


def _subscript_calls(function: Function) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _module_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _module_level([*node.body, *handlers, *node.orelse])


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        inside = prefix
        if isinstance(child, Function):
            yield prefix + child.name, child
        if isinstance(child, Function | ast.ClassDef):
            inside = f"{prefix}{child.name}."
        yield from _functions(child, inside)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> list[str]:
    """Return the names and dotted names in ``node``, in order, each once."""
    found: dict[str, None] = {}
    for child in ast.walk(node):
        name = _dotted(child) if isinstance(child, ast.Attribute | ast.Name) else ""
        if name and not name.startswith("."):
            found[name] = None
    return list(found)


def _canonical(node: Any) -> Any:
    """Return a syntax tree as lists that every Python version makes alike."""
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    fields: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name in _UNREAD or value is None or value == []:
            continue
        if name == "body" and isinstance(node, Function | ast.ClassDef):
            value = _without_docstring(value)  # noqa: PLW2901
        fields.append([name, _canonical(value)])
    return fields


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_text and isinstance(first.value.value, str) else body  # type: ignore[attr-defined]
