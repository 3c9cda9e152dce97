"""Two root causes, seen where torch handles its own cache, as long as torch has the hook.

* **dropped guard**: a graph that takes a float as input was specialised to one value of it, and the
  guard that says so is left out of what the AOTAutograd cache saves (pytorch#194976, #197889).
  That is harmless where the key of the entry tells values apart, as it does for the constants of a
  Triton kernel. So the guards are kept by key, and a key that two values share is the fault.
* **reused code**: a recompilation for a new value was answered from that cache. Code that branches
  on the number may come to the same graph again, and rightly: ``branched`` tells it apart.

A hook that this torch lacks means "not checked", never "clean".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DROPPED_GUARD = "dropped guard"
REUSED_CODE = "reused code"
# Enough to tell keys apart.
_KEY_LETTERS = 16


@dataclass
class Detectors:
    """Counts since the last ``begin``, and why a detector could not be set up."""

    missing: dict[str, str] = field(default_factory=dict)
    # Key of each graph that takes a float -> the guards that its entry forgets.
    keys: dict[str, list[str]] = field(default_factory=dict)
    # Whether Python chose its way by a float while one of these graphs was traced.
    branched: bool = False
    _key: str | None = None
    # Symbols of a trace -> the key of its graph. An entry with a gradient is saved when the
    # backward is compiled: the next graph may have begun.
    _key_of: dict[Any, str | None] = field(default_factory=dict)
    _hits: int = 0
    _reused: int = 0
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
        self.keys, self.branched = {}, False
        self._key, self._key_of, self._reused = None, {}, 0
        self._hits, self._graphs = _hits(), graphs()

    def graphs(self) -> int:
        """Return how many graphs were captured in this step."""
        return graphs() - self._graphs

    def reused(self) -> int:
        """Return how many graphs that take a float were answered from the cache in this step."""
        self._settle()
        return self._reused

    def _settle(self) -> None:
        """Count the hits since the last graph for it."""
        if self._key is not None:
            self._reused += _hits() - self._hits
        self._hits = _hits()

    def _next(self, key: str | None) -> None:
        """Begin with another graph; it has no key where it takes no float, or is not saved."""
        self._settle()
        environment = _environment()
        self._key = self._key_of[environment] = key
        if key is not None:
            self.keys.setdefault(key, [])
            self.branched |= _branches(environment)

    def _forgets(self, environment: Any, guard: str) -> None:
        """Note a guard that the entry of the graph with these symbols forgets."""
        key = self._key_of.get(environment, self._key)
        if key is not None and guard not in self.keys[key]:
            self.keys[key].append(guard)


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
        detectors._next(None)
        key = plain(module, *args, **kwargs)
        if _takes_float(module):
            detectors._next(str(key[0])[:_KEY_LETTERS])
        return key

    autograd_cache.autograd_cache_key = autograd_cache_key  # type: ignore[assignment]
    return True


def _hook_guards(detectors: Detectors) -> bool:
    try:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
    except ImportError:
        return False
    plain = getattr(ShapeEnv, "get_pruned_guards", None)
    if plain is None:
        return False

    def get_pruned_guards(self: Any, symints: Any) -> Any:
        kept = plain(self, symints)
        ids = {id(guard) for guard in kept}
        for guard in self.guards:
            if id(guard) not in ids and _of_float(guard.expr) and _is_value(guard.expr):
                detectors._forgets(self, _readable(self, guard.expr))
        return kept

    ShapeEnv.get_pruned_guards = get_pruned_guards  # type: ignore[method-assign]
    return True


def _environment() -> Any:
    """Return the symbols and guards of the trace that is compiled now."""
    context = torch._guards.TracingContext.try_get()
    return getattr(getattr(context, "fake_mode", None), "shape_env", None)


def _branches(environment: Any) -> bool:
    """Return whether Python has chosen its way by a float in a trace."""
    guards = [guard.expr for guard in getattr(environment, "guards", ())]
    return any(_of_float(guard) and not _is_value(guard) for guard in guards)


def _of_float(expression: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in expression.free_symbols)


def _is_value(expression: Any) -> bool:
    """Return whether a guard says which value a float has, rather than where it lies."""
    # By name: sympy takes a second to import, and torch does so only where it is needed.
    return type(expression).__name__ == "Equality"


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
