"""One Python file by its syntax alone: what its names stand for, what Triton compiles of it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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
    def stars(self) -> list[str]:
        """Modules of which every name is imported."""
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom))
        return [
            "." * node.level + (node.module or "")
            for node in imports
            if any(alias.name == "*" for alias in node.names)
        ]

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Every function by its qualified name, nested ones too."""
        return dict(_functions(self.tree, ""))

    @cached_property
    def jitted(self) -> dict[str, str]:
        """Name -> function, of every ``name = triton.jit(function)``, whatever is around it."""
        found: dict[str, str] = {}
        for node in _module_level(self.tree.body):
            if isinstance(node, ast.Assign):
                for call in (c for c in ast.walk(node.value) if isinstance(c, ast.Call)):
                    inside = call.args[0] if call.args else None
                    if self.names_jit(call.func) and isinstance(inside, ast.Name):
                        found |= {t.id: inside.id for t in node.targets if isinstance(t, ast.Name)}
        return found

    def names_jit(self, node: ast.AST) -> bool:
        """Return whether an expression is Triton's (or Gluon's) ``jit``."""
        head, _, rest = dotted(node).partition(".")
        module, inside = self.imports.get(head, ("", None))
        return (rest or inside or "").rpartition(".")[2] == "jit" and module.startswith("triton")


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


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of names and attributes; "" or a beginning with a dot of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> list[str]:
    """Return the names and dotted names in ``node``, in order, each once."""
    found: dict[str, None] = {}
    for child in ast.walk(node):
        name = dotted(child) if isinstance(child, ast.Attribute | ast.Name) else ""
        if name and not name.startswith("."):
            found[name] = None
    return list(found)


def canonical(node: Any) -> Any:
    """Return a syntax tree as lists that every Python version makes alike."""
    if isinstance(node, list):
        return [canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    fields: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name in _UNREAD or value is None or value == []:
            continue
        if name == "body" and isinstance(node, Function | ast.ClassDef):
            value = _without_docstring(value)  # noqa: PLW2901
        fields.append([name, canonical(value)])
    return fields


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_text and isinstance(first.value.value, str) else body  # type: ignore[attr-defined]
