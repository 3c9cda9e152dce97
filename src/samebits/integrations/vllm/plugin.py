"""Put this library under vLLM's layers, and take it away again.

vLLM calls ``load`` in each of its processes, for the entry point ``samebits`` of the group
``vllm.general_plugins``. It does nothing unless ``VLLM_PLUGINS`` names ``samebits``.
"""

import importlib
import logging
import sys
from typing import Any

from samebits.errors import UnsupportedError
from samebits.integrations.vllm.fused import fused_experts

NAME = "samebits"
MINIMUM = "0.33"
_LAYER = "RoutedExperts"
_FUNCTION = "fused_experts"
_logger = logging.getLogger(__name__)


class Swap:
    """What ``swap_in`` changed in vLLM; ``remove()`` undoes it, for models that are built later."""

    def __init__(self) -> None:
        self._registry: dict[str, Any] = {}
        # Name of a module -> the function that it held.
        self._places: dict[str, Any] = {}

    @property
    def is_active(self) -> bool:
        """Whether vLLM is changed."""
        return bool(self._registry)

    def remove(self) -> None:
        """Give vLLM its own layer and function back."""
        self._registry.pop(_LAYER, None)
        for name, function in self._places.items():
            setattr(sys.modules[name], _FUNCTION, function)
        self._registry, self._places = {}, {}

    def _change(self, registry: dict[str, Any], layer: type, own: Any, ours: Any) -> None:
        self._registry, registry[_LAYER] = registry, layer
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and vars(module).get(_FUNCTION) is own:
                self._places[name] = own
                setattr(module, _FUNCTION, ours)


# vLLM's registry of layers is one for each process, and so is what changes it.
_SWAP = Swap()


def load() -> None:
    """Run ``swap_in`` where ``VLLM_PLUGINS`` names ``samebits``; otherwise do nothing.

    Where ``VLLM_PLUGINS`` is not set vLLM runs every plug-in that is installed; this one waits to
    be asked for.

    Raises:
        ImportError, UnsupportedError: See ``swap_in``.
    """
    named = importlib.import_module("vllm.envs").VLLM_PLUGINS
    if named is None or NAME not in named:
        _logger.info("samebits is installed and not used: VLLM_PLUGINS does not name it")
        return
    swap_in()


def swap_in() -> Swap:
    """Make vLLM's unquantised experts run on this library; a second call changes nothing.

    Experts layers that are built from now on compute with ``samebits.experts``; one that cannot
    raises when it is built, and names the reason: quantised experts, LoRA, a ``--moe-backend`` that
    asks for another one, expert load balancing, data-parallel dispatch. vLLM's function
    ``fused_experts`` becomes ``samebits.integrations.vllm.fused_experts``.

    Returns:
        A handle, to undo it; the same one each time.

    Raises:
        ImportError: vLLM is absent, or has no layer that can be replaced.
        UnsupportedError: Another plug-in has replaced the layer.
    """
    try:
        engine: Any = importlib.import_module("samebits.integrations.vllm.engine")
        registry: dict[str, Any] = importlib.import_module(
            "vllm.model_executor.custom_op"
        ).op_registry_oot
        home: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    except (ImportError, AttributeError) as error:
        raise ImportError(f"samebits.integrations.vllm needs vLLM >= {MINIMUM}: {error}") from error
    if _SWAP.is_active:
        return _SWAP
    if _LAYER in registry:
        other = registry[_LAYER].__qualname__
        raise UnsupportedError(f"another plug-in has replaced {_LAYER} by {other}")
    _SWAP._change(registry, engine.SamebitsRoutedExperts, home.fused_experts, fused_experts)
    return _SWAP
