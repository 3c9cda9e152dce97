"""Two root causes, seen where torch handles its own cache, as long as torch has the hook.

* **dropped guard**: a graph that takes a float as input was specialised to one value of it, and the
  guard that says so is left out of what the AOTAutograd cache saves (pytorch#194976, #197889).
* **reused code**: a recompilation for a new value was answered from that cache.

A hook that this torch lacks means "not checked", never "clean".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DROPPED_GUARD = "dropped guard"
REUSED_CODE = "reused code"


@dataclass
class Detectors:
    """Counts since the last ``begin``, and why a detector could not be set up."""

    missing: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    _takes_float: bool = False
    _hits: int = 0
    _graphs: int = 0

    def install(self) -> None:
        """Hook this process; it is not undone, the process belongs to the audit."""
        if not _hook_keys(self):
            reason = "torch has no autograd_cache_key"
            self.missing = {DROPPED_GUARD: reason, REUSED_CODE: reason}
            return
        if not _hook_guards(self):
            self.missing[DROPPED_GUARD] = "torch has no ShapeEnv.get_pruned_guards"
        if not getattr(torch._functorch.config, "enable_autograd_cache", False):
            self.missing[REUSED_CODE] = "the AOTAutograd cache is off"

    def begin(self) -> None:
        """Start a step."""
        self.dropped, self._takes_float = [], False
        self._hits, self._graphs = _hits(), graphs()

    def graphs(self) -> int:
        """Return how many graphs were captured in this step."""
        return graphs() - self._graphs

    def reused(self) -> int:
        """Return how many graphs that take a float were answered from the cache in this step."""
        return _hits() - self._hits if self._takes_float else 0


def graphs() -> int:
    """Return how many graphs Dynamo captured in this process since it was reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _hits() -> int:
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def _hook_keys(detectors: Detectors) -> bool:
    try:
        from torch._functorch._aot_autograd import autograd_cache
    except ImportError:
        return False
    plain: Callable[..., Any] | None = getattr(autograd_cache, "autograd_cache_key", None)
    if plain is None:
        return False

    def autograd_cache_key(module: Any, *args: Any, **kwargs: Any) -> Any:
        # Raises for a graph that this cache refuses: what is not saved forgets no guard.
        detectors._takes_float = False
        key = plain(module, *args, **kwargs)
        detectors._takes_float = _takes_float(module)
        return key

    autograd_cache.autograd_cache_key = autograd_cache_key  # type: ignore[assignment]
    return True


def _hook_guards(detectors: Detectors) -> bool:
    try:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
        from torch.utils._sympy.symbol import SymT, symbol_is_type
    except ImportError:
        return False
    plain = getattr(ShapeEnv, "get_pruned_guards", None)
    if plain is None:
        return False

    def get_pruned_guards(self: Any, symints: Any) -> Any:
        kept = plain(self, symints)
        if detectors._takes_float:
            ids = {id(guard) for guard in kept}
            for guard in self.guards:
                floats = [s for s in guard.expr.free_symbols if symbol_is_type(s, SymT.FLOAT)]
                is_value = str(guard.expr).startswith("Eq(")
                if id(guard) not in ids and floats and is_value:
                    detectors.dropped.append(_readable(self, guard.expr))
        return kept

    ShapeEnv.get_pruned_guards = get_pruned_guards  # type: ignore[method-assign]
    return True


def _takes_float(module: Any) -> bool:
    """Return whether Dynamo's graph has a Python float among its inputs, as a 0-d fp64 tensor."""
    for node in getattr(module, "gm", module).graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64 and value.dim() == 0:
            return True
    return False


def _readable(environment: Any, expression: Any) -> str:
    """Return the guard with the places of its symbols instead of their names."""
    text = str(expression)
    sources = getattr(environment, "var_to_sources", {})
    for symbol in expression.free_symbols:
        for source in list(sources.get(symbol, ()))[:1]:
            name = source.name() if callable(source.name) else source.name
            text = text.replace(str(symbol), str(name))
    return text
