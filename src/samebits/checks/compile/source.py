"""The source of a function with all that it needs, or lines that import it; and of its inputs."""

import ast
import inspect
import math
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samebits.checks.compile.discover import original
from samebits.checks.compile.target import Target
from samebits.checks.compile.transport import names_used

# Tensors of more elements are written as random ones of their kind.
_LARGEST = 64


class Code(NamedTuple):
    """Import lines, and the rest of what defines ``target``."""

    imports: str
    text: str


def imported(target: Target, function: Any) -> Code:
    """Return lines that import the target, and the audit's own way to its numbers.

    Raises:
        ValueError: The callable is not found by name.
    """
    if target.packed is not None:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(f"{name} is found by no name, and its source is not whole by itself")
    text = f"""\
sys.path[:0] = {[str(Path.cwd())]!r}
target, factory = load(Target({target.name!r}, {target.inputs!r}))
first = survey.prepare(target, factory)
CALLS_BY_SHAPE = [first, None]


def made_inputs(shape):
    if CALLS_BY_SHAPE[shape] is None:
        CALLS_BY_SHAPE[shape] = survey.second(first, factory)
    made = CALLS_BY_SHAPE[shape]
    return _fresh(made.args), _fresh(made.kwargs)


def _fresh(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {{k: _fresh(v) for k, v in value.items()}}
    return [_fresh(v) for v in value] if isinstance(value, list) else value


def set_number(path, args, kwargs, value):
    for made in CALLS_BY_SHAPE:
        if made is not None:
            for place in leaves(made):
                if place.path == path:
                    place.set(value)"""
    imports = """\
import torch

from samebits.checks.compile import survey
from samebits.checks.compile.discover import leaves
from samebits.checks.compile.target import Target, load"""
    return Code(imports, text)


def copied(function: Any) -> Code:
    """Return the source of a function, and of what it mentions in its package.

    Raises:
        TypeError: It is not a function.
        ValueError: Part of it has no source.
    """
    plain = original(function)
    if not isinstance(plain, types.FunctionType):
        raise TypeError(f"a {type(plain).__name__} is not a function")
    collector = _Collector((plain.__module__ or "").partition(".")[0])
    name = collector.add(function)
    lines = [*collector.definitions, f"target = {name}"]
    imports = ["import torch", *sorted(collector.imports - {"import torch"})]
    return Code("\n".join(imports), "\n\n\n".join(lines))


class _Collector:
    def __init__(self, package: str) -> None:
        self.package = package
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self._done: set[int] = set()

    def add(self, function: Any) -> str:
        """Add a function after everything that it mentions, and return its name."""
        plain = inspect.unwrap(original(function))
        if id(plain) in self._done:
            return str(plain.__name__)
        self._done.add(id(plain))
        self._mentioned(plain)
        self.definitions.append(_source(plain))
        if original(function) is not function:
            self.definitions.append(f"{plain.__name__} = torch.compile({plain.__name__})")
        return str(plain.__name__)

    def _mentioned(self, function: types.FunctionType) -> None:
        space = dict(function.__globals__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            space[name] = cell.cell_contents
        used = names_used(function.__code__) | set(function.__code__.co_freevars)
        used |= _names_in_defaults(function)
        for name in sorted(used & space.keys()):
            self._name(name, space[name])

    def _name(self, name: str, value: Any) -> None:
        module = getattr(value, "__module__", "") or ""
        if isinstance(value, types.ModuleType):
            self.imports.add(_import_line(value.__name__, name))
        elif isinstance(value, (bool, int, float, str)):
            self.definitions.append(f"{name} = {literal(value)}")
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            self._autograd(value)
        elif isinstance(original(value), types.FunctionType) and self._ours(value):
            self.add(value)
        elif _is_kernel(value) and self._ours(value.fn):
            self._kernel(value)
        elif module and not self._ours(value) and hasattr(sys.modules.get(module), name):
            self.imports.add(f"from {module} import {name}")
        else:
            raise ValueError(f"{name} ({type(value).__name__}) has no source that can be copied")

    def _ours(self, value: Any) -> bool:
        module = getattr(original(value), "__module__", "") or ""
        return module.partition(".")[0] == self.package

    def _autograd(self, value: type[torch.autograd.Function]) -> None:
        if id(value) in self._done:
            return
        self._done.add(id(value))
        for method in (value.forward, value.backward):
            self._mentioned(inspect.unwrap(method))
        self.definitions.append(_source(value))

    def _kernel(self, kernel: Any) -> None:
        """Add a Triton kernel after everything that it mentions."""
        if id(kernel) not in self._done:
            self._done.add(id(kernel))
            self._mentioned(kernel.fn)
            self.imports.add("import triton")
            self.definitions.append(f"@triton.jit\n{_source(kernel.fn)}")


def _is_kernel(value: Any) -> bool:
    """Return whether this is ``triton.jit`` of a function, without autotuning around it."""
    from_triton = (type(value).__module__ or "").partition(".")[0] == "triton"
    return from_triton and isinstance(getattr(value, "fn", None), types.FunctionType)


def _import_line(module: str, name: str) -> str:
    return f"import {module}" if module == name else f"import {module} as {name}"


def _source(definition: Any) -> str:
    """Return the source of a function or class without its own decorators.

    Raises:
        ValueError: There is no source, or it is not a definition by itself (a lambda).
    """
    text, node = _parsed(definition)
    whole = isinstance(node, (ast.FunctionDef, ast.ClassDef))
    if not whole:
        raise ValueError(f"{definition!r} is part of another statement")
    return "\n".join(text.splitlines()[node.lineno - 1 :])


def _names_in_defaults(function: types.FunctionType) -> set[str]:
    """Return the names that the defaults of a function's arguments mention."""
    _, node = _parsed(function)
    if not isinstance(node, ast.FunctionDef):
        return set()
    defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
    return {n.id for d in defaults for n in ast.walk(d) if isinstance(n, ast.Name)}


def _parsed(definition: Any) -> tuple[str, ast.stmt]:
    """Return the source of a definition, and its first statement.

    Raises:
        ValueError: There is no source.
    """
    try:
        text = textwrap.dedent(inspect.getsource(definition))
        return text, ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(f"{definition!r} has no source: {error}") from error


def literal(value: Any) -> str:
    """Return an expression for ``value``.

    Raises:
        ValueError: There is none, as for an object of a class.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{k!r}: {literal(v)}" for k, v in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if type(value) is tuple:
        return "(" + "".join(f"{literal(item)}, " for item in value) + ")"
    raise ValueError(f"an input of type {type(value).__name__} has no source")


def _tensor(value: torch.Tensor) -> str:
    device = "" if value.device.type == "cpu" else f', device="{value.device.type}"'
    if value.numel() <= _LARGEST and value.isfinite().all():
        return (
            f"torch.tensor({_digits(value.detach().cpu().tolist())}, dtype={value.dtype}{device})"
        )
    shape = tuple(value.shape)
    if value.is_floating_point():
        scale = float(value.detach().float().std())
        return f"(torch.randn({shape}{device}) * {scale:.3g}).to({value.dtype})"
    if value.dtype == torch.bool:
        return f"torch.rand({shape}{device}) > 0.5"
    return f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape}{device})"


def _digits(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_digits(item) for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
