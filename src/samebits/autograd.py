"""Gradients inside an operator: recorded below autograd, and laid out as the compiler is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from samebits.errors import UnsupportedError

_KEYS = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")


@contextmanager
def recording() -> Iterator[None]:
    """Record operations for ``torch.autograd.grad``, under any dispatch mode.

    ``torch.enable_grad`` is not enough: an operator that a mode calls (a counter of FLOPs, a
    tracker of memory) runs with autograd's keys excluded.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def refuse_second_derivatives() -> None:
    """Raise in a backward that is to be differentiated itself.

    Raises:
        UnsupportedError: It runs with ``create_graph``, outside compiled code.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(
            "a layer has no second derivatives; hint: call backward without create_graph"
        )


def laid_out(grad: Tensor, like: Tensor) -> Tensor:
    """Return ``grad`` with the strides of ``torch.empty_like(like)``, as a fake operator says.

    Determinism: exact.
    """
    if grad.stride() == like.stride():
        return grad
    promised = torch.empty_like(like, device="meta").stride()
    if grad.stride() == promised:
        return grad
    return grad.new_empty_strided(like.shape, promised).copy_(grad)
