"""Run any torch code in fp64, whatever it casts to.

Several experts classes cast inside (`.float()`, `.to(torch.float32)`, fp32 accumulators), so
running them on fp64 tensors is no oracle: it carries fp32's error. Under `Float64Casts` every
request for a narrower float type becomes fp64.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
_NAMES = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"}


class Float64Casts(TorchFunctionMode):
    """Map every cast to a narrower float type, and every new narrow tensor, to fp64.

    Holds for code under the ``with`` statement on this thread. Integer and bool types pass.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with every narrow float dtype among its arguments replaced."""
        del types
        if func in _CASTS:
            return args[0].double()
        wide = {name: _widen(value) for name, value in (kwargs or {}).items()}
        result = func(*(_widen(value) for value in args), **wide)
        # Factories without a dtype make the default type.
        if isinstance(result, Tensor) and result.dtype in _NARROW:
            return result.double()
        return result


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value in _NARROW:
        return torch.float64
    if isinstance(value, str) and value in _NAMES:
        return torch.float64
    return value
