"""What a rank computes of a layer: its experts on the rows that arrived, one slot each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from samebits.backends import operator
from samebits.backends.call import DIFFERENTIABLE, INPUTS, PARAMETERS, Call, Gradients
from samebits.backends.differentiable import delivered, is_direct
from samebits.backends.options import Options
from samebits.problem import ProbPlacement
from samebits.weight_gradients import Destination


class Local(Protocol):
    """Both passes over arrivals; K = 1, ids from 0 to E, E for no row."""

    # On a CPU too, the probability of a scaled input has sums of 64 columns as gradient.
    in_blocks: ClassVar[bool]

    @property
    def keeps(self) -> bool:
        """Whether the gradient of what arrived is read after ``backward``."""

    def forward(self, there: Call, *, save: bool) -> tuple[Tensor, Tensor]:
        """Return ``(y, z)``, y ``(A, H)`` or this rank's columns of it."""

    def backward(self, there: Call, z: Tensor, dout: Tensor, wanted: list[bool]) -> Gradients:
        """Return the wanted gradients; that of x with as many columns as y."""

    def whole(self, columns: Tensor) -> Tensor:
        """Return ``(…, H)`` from what a token's rank made of columns of y."""


@dataclass(frozen=True, eq=False)
class HeldExperts:
    """Whole experts, by the backends."""

    in_blocks: ClassVar[bool] = False

    # Of the layer; what comes back is not summed yet, and the input was scaled before it travelled.
    options: Options
    recompute: bool = False
    destination: Destination | None = None

    @property
    def keeps(self) -> bool:
        """See ``Local``."""
        return self.destination is not None and self.destination.policy.delayed

    def _inner(self) -> Options:
        on_input = self.options.placement == ProbPlacement.FC1_INPUT
        placement = ProbPlacement.FC2_OUTPUT if on_input else self.options.placement
        return self.options._replace(placement=placement, out_dtype=None)

    def forward(self, there: Call, *, save: bool) -> tuple[Tensor, Tensor]:
        """See ``Local``."""
        rows = there.x
        if rows.shape[0] == 0 or there.down.shape[0] == 0:
            return rows.new_empty(rows.shape), rows.new_empty(0, there.gate_up.shape[1])
        options = self._inner()._replace(recompute=save and self.recompute)
        keep = save and not self.recompute
        held = there.down.shape[0]
        if is_direct(there[:INPUTS]):
            return operator.compute(there, options, held, 0, save=keep)
        found: tuple[Tensor, Tensor] = torch.ops.samebits.experts_forward(
            *there[:INPUTS], options.text(), held, 0, keep
        )
        return found

    def backward(self, there: Call, z: Tensor, dout: Tensor, wanted: list[bool]) -> Gradients:
        """See ``Local``."""
        held = there.down.shape[0]
        names = [n for n, want in zip(DIFFERENTIABLE, wanted, strict=True) if want]
        if held == 0 or (there.x.shape[0] == 0 and self.destination is None):
            tensors = {n: t for n in names if (t := getattr(there, n)) is not None}
            zeros: dict[str, Tensor | None] = {n: torch.zeros_like(t) for n, t in tensors.items()}
            if self.destination is not None:
                zeros |= _nothing_delivered(
                    self.destination, {n: t for n, t in tensors.items() if n in PARAMETERS}
                )
            return Gradients(**zeros)
        given = (*there[:INPUTS], z, dout)
        arguments, direct = (*given, self._inner().text(), held, 0), is_direct(given)
        found: Sequence[Tensor | None]
        if self.destination is not None:
            found = delivered(self.destination, arguments, wanted, direct=direct, spend=False)
        elif direct:
            found = operator.compute_backward((*arguments, wanted), {})
        else:
            found = torch.ops.samebits.experts_backward(*arguments, wanted)
        by_name = dict(zip(DIFFERENTIABLE, found, strict=True))
        return Gradients(**{n: by_name[n] for n in names if getattr(there, n) is not None})

    def whole(self, columns: Tensor) -> Tensor:
        """See ``Local``."""
        return columns


def _nothing_delivered(
    destination: Destination, tensors: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Deliver gradients of no expert, as the ranks that have experts do; see ``delivered``."""
    names = list(tensors)

    def store() -> None:
        if destination.policy.main_grad:
            destination.close(destination.open(names))
        else:
            for name, tensor in tensors.items():
                destination.owners[name].add(torch.zeros_like(tensor))

    def later() -> None:
        store()
        if destination.policy.main_grad:
            destination.fill_placeholders(names)

    if destination.policy.delayed:
        destination.defer(names, later, ())
        return dict.fromkeys(names)
    store()
    return {n: destination.placeholder(n, t) for n, t in tensors.items()}
