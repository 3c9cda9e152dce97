"""Parameters of single experts as the owners of one stacked gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.integrations.megatron.stacking import stacked_view
from samebits.weight_gradients import Buffer, Owner, accumulates, add_to_grad, main_grad_of


class StackedOwner(Owner):
    """E parameters, one for each expert, behind one tensor of ``ExpertWeights``.

    Where their ``main_grad`` buffers are evenly spaced, the backend writes to them; otherwise to a
    temporary tensor in fp32, which is added to each: the same bits.

    Args:
        parameters: In the order in which they are stacked.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = tuple(parameters)

    def open(self, name: str) -> Buffer:
        """Return a buffer for all experts.

        Raises:
            ValueError: A ``main_grad`` is missing or does not fit.
        """
        grads = [main_grad_of(name, parameter) for parameter in self.parameters]
        wishes = {accumulates(parameter) for parameter in self.parameters}
        view = stacked_view(grads)
        if view is not None and len(wishes) == 1:
            return Buffer(view, wishes.pop())
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return Buffer(grads[0].new_empty(len(grads), *grads[0].shape, dtype=wide), False)

    def close(self, buffer: Buffer) -> None:
        """Bring what is in a temporary tensor to each ``main_grad``."""
        grads = [getattr(parameter, "main_grad") for parameter in self.parameters]  # noqa: B009
        place = buffer.tensor.untyped_storage().data_ptr()
        if place == grads[0].untyped_storage().data_ptr():
            return
        for parameter, grad, part in zip(
            self.parameters, grads, buffer.tensor.unbind(0), strict=True
        ):
            Buffer(grad, accumulates(parameter)).store(part)

    def add(self, grad: Tensor) -> None:
        """Add a stacked gradient to each ``.grad``, which takes its part of the memory."""
        for parameter, part in zip(self.parameters, grad.unbind(0), strict=True):
            add_to_grad(parameter, part)
