"""Gradients of DTensor parameters that a layer delivers itself, on the rank that has them."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from samebits.errors import must
from samebits.weight_gradients import Buffer, Owner, accumulates, add_to_grad, main_grad_of


class ShardedOwner(Owner):
    """A DTensor parameter whose gradient is computed on the rank that holds the experts.

    ``main_grad`` is a DTensor spread like the parameter (``torch.zeros_like`` of it), and so is
    ``.grad``.
    """

    def open(self, name: str) -> Buffer:
        """Return this rank's part of the ``main_grad`` buffer.

        Raises:
            TypeError: It is no DTensor.
            ValueError: There is none, or it is not spread like the parameter.
        """
        (parameter,) = self.parameters
        buffer = main_grad_of(name, parameter)
        check_spread(f"{name}.main_grad", buffer, parameter)
        assert isinstance(buffer, DTensor)
        return Buffer(self._seen(buffer.to_local()), accumulates(parameter))

    def add(self, grad: Tensor) -> None:
        """Add this rank's part of a gradient to ``.grad``, as autograd does."""
        (parameter,) = self.parameters
        assert isinstance(parameter, DTensor)
        add_to_grad(parameter, _spread_like(self._seen(grad), parameter))


def check_spread(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raise unless ``tensor`` is a DTensor on the mesh and with the placements of ``like``.

    Raises:
        TypeError: It is no DTensor.
        ValueError: It is spread otherwise.

    Determinism: no arithmetic.
    """
    assert isinstance(like, DTensor)
    rule = f"be a DTensor with placements {like.placements} on the mesh of the parameter"
    if not isinstance(tensor, DTensor):
        raise TypeError(must(name, rule, "a plain tensor"))
    if tensor.placements != like.placements or tensor.device_mesh != like.device_mesh:
        raise ValueError(must(name, rule, tensor.placements))


def local_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of a DTensor parameter, whose gradient may stay away.

    ``to_local`` makes a gradient of zeros where a layer delivered it elsewhere.

    Determinism: no arithmetic.
    """
    return _LocalPart.apply(parameter)  # type: ignore[no-any-return, no-untyped-call]


def _spread_like(local: Tensor, like: DTensor) -> DTensor:
    spread: DTensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return spread


class _LocalPart(torch.autograd.Function):
    """The local tensor of a DTensor; no gradient stays no gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.like = parameter.detach()
        local = parameter.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        (grad,) = grads
        return None if grad is None else _spread_like(grad, ctx.like)
