"""Which kernels a call launches, and with what: what a registry says is compared with it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from samebits.checks.determinism.variant import Variant

# Kernel -> flags and options of each launch.
Launches = dict[str, list[dict[str, Any]]]


@contextmanager
def observed(root: Path) -> Iterator[Launches]:
    """Record launches of kernels below ``root``; for processes that belong to a check."""
    seen: Launches = {}
    if find_spec("triton") is None:
        yield seen
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def recording(run: Any) -> Any:
        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = _subject(self.fn, root)
            if kernel is not None:
                seen.setdefault(kernel, []).append(_constants(self, args, kwargs))
            return run(self, *args, **kwargs)

        return recorded

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "run", recording(kind.run)))
        yield seen


def mismatch(variant: Variant, seen: Launches) -> str:
    """Return how the launches differ from what the variant says; "" where they do not."""
    absent = [kernel for kernel in variant.kernels if kernel not in seen]
    if absent:
        return f"it did not launch {', '.join(absent)}"
    unlisted = sorted(seen.keys() - set(variant.kernels))
    if unlisted:
        return f"it launched {', '.join(unlisted)}, which its variant does not list"
    for kernel in variant.kernels:
        name = kernel.rpartition(":")[2]
        said = variant.config.get(name, {})
        if not isinstance(said, Mapping) and len(said) != len(seen[kernel]):
            return f"{name} was launched {len(seen[kernel])} times, not {len(said)}"
        each = [said] * len(seen[kernel]) if isinstance(said, Mapping) else said
        for wanted, launch in zip(each, seen[kernel], strict=True):
            if kernel == variant.kernels[0]:
                wanted = {**_scalars(variant.config), **wanted}  # noqa: PLW2901
            actual = {key.lower(): value for key, value in launch.items()}
            for key, value in wanted.items():
                if actual.get(key.lower(), value) != value:
                    return f"{name} was launched with {key}={actual[key.lower()]}, not {value}"
    return ""


def _scalars(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if isinstance(v, bool | int | float | str)}


def _subject(function: Any, root: Path) -> str | None:
    file = Path(function.__code__.co_filename).resolve()
    if not file.is_relative_to(root):
        return None
    name = function.__qualname__.replace("<locals>.", "")
    return f"{file.relative_to(root).as_posix()}:{name}"


def _constants(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compile-time arguments and options of a launch, as JSON."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | dict(kwargs)
    annotations = kernel.fn.__annotations__
    found = {}
    for name, value in bound.items():
        option = name not in kernel.arg_names and name not in ("grid", "warmup")
        if option or "constexpr" in str(annotations.get(name, "")):
            plain = isinstance(value, bool | int | float | str) or value is None
            found[name] = value if plain else getattr(value, "__name__", repr(value))
    return found
