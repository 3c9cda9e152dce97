"""Put this library's activations under Megatron-LM's fused ones, while a block lasts or for good.

Its compiled SwiGLU and quick-geglu functions take Python floats (a clamp, an offset), whose old
values a compiled graph may keep: docs/stale-scalars.md. The replacements have the same names and
signatures, forward and explicit backward, and one rounding.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from samebits import functional
from samebits.errors import UnsupportedError
from samebits.integrations.megatron import quick_geglu

# Module of Megatron-LM -> where the functions of the same names are.
_REPLACEMENTS: Mapping[str, ModuleType] = {
    "megatron.core.fusions.fused_bias_swiglu": functional,
    "megatron.core.fusions.fused_bias_geglu": quick_geglu,
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "megatron.core.fusions.fused_bias_swiglu": (
        "swiglu",
        "bias_swiglu",
        "weighted_swiglu",
        "clamped_swiglu",
        "bias_clamped_swiglu",
        "clamped_weighted_swiglu",
        "swiglu_back",
        "bias_swiglu_back",
        "weighted_swiglu_back",
        "clamped_swiglu_back",
        "bias_clamped_swiglu_back",
        "clamped_weighted_swiglu_back",
    ),
    "megatron.core.fusions.fused_bias_geglu": (
        "quick_geglu",
        "weighted_quick_geglu",
        "weighted_bias_quick_geglu",
        "quick_geglu_back",
        "weighted_quick_geglu_back",
        "weighted_bias_quick_geglu_back",
    ),
}
# Without a scalar these need no replacement.
_LEFT = ("bias_swiglu_impl", "weighted_bias_swiglu_impl", "weighted_bias_quick_geglu_impl")


class Patch:
    """What ``patch_fused_swiglu`` replaced; ``remove()`` puts it back."""

    def __init__(self, replaced: list[tuple[ModuleType, str, Any, Any]]) -> None:
        self._replaced = replaced
        # "module.name" of every name that was replaced, importers' included.
        self.names = tuple(f"{module.__name__}.{name}" for module, name, _, _ in replaced)

    def remove(self) -> None:
        """Put the functions back; a name that someone else replaced since is left alone."""
        for module, name, original, ours in self._replaced:
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        self._replaced = []


def patch_fused_swiglu() -> Patch:
    """Replace Megatron-LM's fused SwiGLU and quick-geglu functions, wherever they were imported.

    The autograd functions of Megatron-LM stay and call the replacements, forward and backward.
    Functions that a version does not have are left out (the clamped ones came after 0.19).

    Returns:
        The patch, to remove it; ``fused_swiglu_patched`` does so at the end of a block.

    Raises:
        ImportError: megatron-core is absent.
        UnsupportedError: Its functions have other arguments, or there is one that is not known.

    Determinism: see ``samebits.functional``.
    """
    found: list[tuple[ModuleType, str, Any, Any]] = []
    for path, ours in _REPLACEMENTS.items():
        module = importlib.import_module(path)
        _refuse_unknown(module, path)
        for name in _NAMES[path]:
            original = getattr(module, name, None)
            if original is not None:
                _check_arguments(f"{path}.{name}", original, getattr(ours, name))
                found.append((module, name, original, getattr(ours, name)))
    replaced = [
        (importer, name, original, ours)
        for _, name, original, ours in found
        for importer in _importers(name, original)
    ]
    for importer, name, _, ours in replaced:
        setattr(importer, name, ours)
    return Patch(replaced)


@contextmanager
def fused_swiglu_patched() -> Iterator[Patch]:
    """Replace the functions until the block ends; see ``patch_fused_swiglu``."""
    patch = patch_fused_swiglu()
    try:
        yield patch
    finally:
        patch.remove()


def _importers(name: str, function: Any) -> list[ModuleType]:
    """Return the loaded modules of Megatron-LM in which ``name`` is ``function``."""
    return [
        module
        for path, module in list(sys.modules.items())
        if path.partition(".")[0] == "megatron" and vars(module).get(name) is function
    ]


def _refuse_unknown(module: ModuleType, path: str) -> None:
    strange = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and ("swiglu" in name or "quick_geglu" in name)
        and name not in (*_NAMES[path], *_LEFT)
    ]
    if strange:
        raise UnsupportedError(f"{path} has functions that are not known: {', '.join(strange)}")


def _check_arguments(name: str, theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    expected, actual = (list(inspect.signature(f).parameters) for f in (ours, theirs))
    if expected != actual:
        raise UnsupportedError(
            f"{name} takes ({', '.join(actual)}), not ({', '.join(expected)}): this version of "
            "megatron-core is not known"
        )
