"""The Triton functions of a folder by their syntax alone, and what the bits of each depend on.

Nothing is imported: a function's *closure* is its syntax tree without docstrings and positions, and
those of every function, constant and class of the folder that it names, in turn. *Launches* are
the calls ``kernel[grid](…)`` in functions that name the kernel: they choose flags and options.
"""

import ast
import hashlib
import json
import re
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samebits.checks.determinism.syntax import File, Function, canonical, dotted, names_in
from samebits.checks.determinism.variant import RegistryError


@dataclass(eq=False)
class Sources:
    """The Python files below a root."""

    root: Path
    _closures: dict[str, dict[str, Any]] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)
    _modules: dict[tuple[str, str], File | None] = field(default_factory=dict)

    @cached_property
    def files(self) -> dict[str, File]:
        """Every file by its path from the root."""
        found = {}
        for path in _python_files(self.root):
            subject = path.relative_to(self.root).as_posix()
            try:
                # As Python reads it: in the encoding that it names.
                with tokenize.open(path) as file:
                    found[subject] = File(path, subject, file.read())
            except (OSError, UnicodeDecodeError, SyntaxError) as error:
                # What Python cannot read holds no kernel; what may hold one must be read.
                if path.is_file() and b"jit" not in path.read_bytes():
                    continue
                raise RegistryError(f"{path} cannot be read: {error}") from error
        return found

    @cached_property
    def kernels(self) -> dict[str, Function]:
        """Every ``@triton.jit`` function, device functions too, as "file.py:name"."""
        return {
            f"{subject}:{name}": function
            for subject, file in self.files.items()
            if self._may_have_kernels(file)
            for name, function in file.functions.items()
            if self.is_jit(file, function)
        }

    @cached_property
    def _wrappers(self) -> set[tuple[str, str]]:
        """(file, name) of functions that call ``triton.jit``: decorators of the folder's own."""
        return {
            (subject, name)
            for subject, file in self.files.items()
            if "jit" in file.text
            for name, function in file.functions.items()
            if any(
                isinstance(node, ast.Call) and file.names_jit(node.func)
                for statement in function.body
                for node in ast.walk(statement)
                if not isinstance(node, Function)
            )
        }

    def _may_have_kernels(self, file: File) -> bool:
        names = ("jit", *(name for _, name in self._wrappers))
        return any(name in file.text for name in names)

    def is_jit(self, file: File, function: Function) -> bool:
        """Return whether Triton compiles a function: by a decorator, or by a call with it."""
        if function.name in file.jitted.values():
            return True
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if file.names_jit(called):
                return True
            if self._wrappers:
                place = self._resolve(file, dotted(called))
                if place is not None and (place[0].subject, place[1]) in self._wrappers:
                    return True
        return False

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
                found[f"launch {file.subject}:{place}"] = [canonical(call) for call in calls]
                for call in calls:
                    self._follow(file, call, found, device_only=True)
            self._closures[kernel] = found
        return self._closures[kernel]

    def fingerprint(self, kernels: tuple[str, ...], config: Any) -> str:
        """Return the hash of the kernels' closures and of a configuration."""
        # The JSON of [{kernel: closure, …}, config]; that of a closure is made once.
        closures = (f"{_json(kernel)}: {self._spelled(kernel)}" for kernel in sorted(set(kernels)))
        text = f"[{{{', '.join(closures)}}}, {_json(config)}]"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _spelled(self, kernel: str) -> str:
        closure = self.closure(kernel)
        if kernel not in self._texts:
            self._texts[kernel] = _json(closure)
        return self._texts[kernel]

    def _add(self, file: File, name: str, node: ast.AST, found: dict[str, Any]) -> None:
        key = f"{file.subject}:{name}"
        if key not in found:
            found[key] = canonical(node)
            # Decorators say how a function is launched; what they are belongs to the host.
            decorators = getattr(node, "decorator_list", [])
            names = {name for decorator in decorators for name in names_in(decorator)}
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
        for name in names_in(node):
            place = self._resolve(file, name)
            if place is None:
                continue
            where, local = place
            target = where.definitions[local]
            jit = isinstance(target, Function) and self.is_jit(where, target)
            host = name in unless and isinstance(target, Function | ast.ClassDef)
            if (jit or not device_only) and not host:
                self._add(where, local, target, found)

    def _resolve(self, file: File, name: str, *, hops: int = 8) -> tuple[File, str] | None:
        """Return the file below the root that defines what ``name`` means in ``file``.

        Follows at most ``hops`` files that only hand the name on.
        """
        head, *rest = name.split(".")
        if head in file.definitions:
            return file, file.jitted.get(head, head)
        if hops == 0:
            return None
        if head not in file.imports:
            starred = (self._file_of(file, module) for module in file.stars)
            known = (self._resolve(f, head, hops=hops - 1) for f in starred if f is not None)
            return next((place for place in known if place is not None), None)
        module, inside = file.imports[head]
        path = [*([inside] if inside else []), *rest]
        # The first parts of a dotted name may be modules: take as many as are files.
        for count in range(len(path) - 1, -1, -1):
            inner = ".".join(path[:count])
            between = "." if inner and not module.endswith(".") else ""
            where = self._file_of(file, f"{module}{between}{inner}")
            if where is None or where is file:
                continue
            found = self._resolve(where, path[count], hops=hops - 1)
            if found is not None:
                return found
        return None

    def _file_of(self, file: File, module: str) -> File | None:
        """Return the file below the root that is ``module`` (with dots before it: relative)."""
        key = file.subject, module
        if key not in self._modules:
            self._modules[key] = self._looked_up(file, module)
        return self._modules[key]

    def _looked_up(self, file: File, module: str) -> File | None:
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
            if not self.kernels or "]" not in file.text or not words.search(file.text):
                continue
            for name, function in file.functions.items():
                calls = [] if self.is_jit(file, function) else _launching_calls(function)
                places = {self._resolve(file, n) for n in names_in(function)} if calls else set()
                for kernel in sorted(f"{p[0].subject}:{p[1]}" for p in places if p is not None):
                    if kernel in self.kernels:
                        found.setdefault(kernel, []).append((file, name, calls))
        return found


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _launching_calls(function: Function) -> list[ast.Call]:
    """Return the calls ``…[grid](…)``, and those of names that were given a ``…[grid]``."""
    calls, held = [], set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            held |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return [c for c in calls if isinstance(c.func, ast.Subscript) or dotted(c.func) in held]


def _python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files below ``root``, but hidden ones, and those of installed packages."""
    for path in sorted(root.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            installed = path.name == "site-packages" or (path / "pyvenv.cfg").exists()
            if not installed and path.name != "__pycache__":
                yield from _python_files(path)
        elif path.suffix == ".py":
            yield path
