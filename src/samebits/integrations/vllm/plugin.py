"""Put this library under vLLM's layers, and take it away again.

vLLM calls ``load`` in each of its processes, for the entry point ``samebits`` of the group
``vllm.general_plugins``. It does nothing unless ``VLLM_PLUGINS`` names ``samebits``.
"""

import importlib
import logging
import sys
from typing import Any

from samebits.errors import UnsupportedError

NAME = "samebits"
MINIMUM = "0.33"
_LAYER = "RoutedExperts"
_FUNCTION = "fused_experts"
_logger = logging.getLogger(__name__)


class Swap:
    """What ``swap_in`` changed in vLLM; ``remove()`` undoes it, for models that are built later."""

    def __init__(self, registry: dict[str, Any], places: dict[str, Any]) -> None:
        self._registry = registry
        # Name of a module -> the function that it held.
        self._places = places

    def remove(self) -> None:
        """Give vLLM its own layer and function back."""
        self._registry.pop(_LAYER, None)
        for name, function in self._places.items():
            setattr(sys.modules[name], _FUNCTION, function)
        self._places = {}


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
        A handle, to undo it.

    Raises:
        ImportError: vLLM is absent, or has no layer that can be replaced.
        UnsupportedError: Another plug-in has replaced the layer.
    """
    from samebits.integrations.vllm.fused import fused_experts

    try:
        engine: Any = importlib.import_module("samebits.integrations.vllm.engine")
        registry: dict[str, Any] = importlib.import_module(
            "vllm.model_executor.custom_op"
        ).op_registry_oot
        home: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    except (ImportError, AttributeError) as error:
        raise ImportError(f"samebits.integrations.vllm needs vLLM >= {MINIMUM}: {error}") from error
    held = registry.get(_LAYER)
    if held is not None and held is not engine.SamebitsRoutedExperts:
        raise UnsupportedError(f"another plug-in has replaced {_LAYER} by {held.__qualname__}")
    registry[_LAYER] = engine.SamebitsRoutedExperts
    own = home.fused_experts
    places = {
        name: own
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.") and vars(module).get(_FUNCTION) is own
    }
    if own is not fused_experts:
        for name in places:
            setattr(sys.modules[name], _FUNCTION, fused_experts)
    else:
        places = {}
    return Swap(registry, places)
