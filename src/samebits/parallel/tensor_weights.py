"""One rank's part of experts that are cut: gate_up along F, down along H."""

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.parallel.ranks import require_rank
from samebits.parallel.stages import COLUMNS
from samebits.weights import ExpertWeights, Layout, split_gate_up

_HALVES = Layout()


def require_ends_of_sums(columns: int, size: int) -> None:
    """Raise unless sums of dp end where F = ``columns`` is cut over ``size`` ranks."""
    if size > 1 and columns % (COLUMNS * size):
        rule = f"have F that is a multiple of {COLUMNS} * {size} (sums of dp end there)"
        raise ValueError(must("down", rule, columns))


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallelWeights:
    """One rank's part of the parameters of all experts; made by ``shard``, or loaded so.

    Raises:
        TypeError: A parameter is no tensor, or a layout no ``Layout``.
    """

    # (E, 2F / W or F / W, H), rows in the order of part_layout: by default gate, then up.
    gate_up: Tensor
    # (E, H / W, F).
    down: Tensor
    # (E, 2F / W or F / W), as gate_up.
    gate_up_bias: Tensor | None = None
    # (E, H / W).
    down_bias: Tensor | None = None
    # Order of gate and up where one rank holds everything: the order of the sum of dx.
    layout: Layout = _HALVES
    # Order of this rank's rows of gate and up.
    part_layout: Layout = _HALVES

    def __post_init__(self) -> None:
        require_type("gate_up", self.gate_up, Tensor)
        require_type("down", self.down, Tensor)
        for name in ("gate_up_bias", "down_bias"):
            bias = getattr(self, name)
            if bias is not None:
                require_type(name, bias, Tensor)
        require_type("layout", self.layout, Layout)
        require_type("part_layout", self.part_layout, Layout)

    @staticmethod
    def shard(weights: ExpertWeights, rank: int, size: int) -> "TensorParallelWeights":
        """Return the part of ``rank`` of ``size``; copies.

        Raises:
            ValueError: F is no multiple of 64 * size, or H none of size; or there is no such rank.
            UnsupportedError: The weights have a post-expert norm, which needs all of H.
        """
        require_type("weights", weights, ExpertWeights)
        require_rank(rank, size)
        if weights.norm is not None:
            raise UnsupportedError("a post-expert norm takes its mean over all of H, here cut")
        _, hidden, columns = weights.down.shape
        require_ends_of_sums(columns, size)
        if hidden % size:
            raise ValueError(must("down", f"have H that is a multiple of {size}", hidden))

        def by_columns(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            parts = split_gate_up(tensor, weights.layout, 1) if weights.gated else (tensor,)
            return torch.cat([part.chunk(size, 1)[rank] for part in parts], 1)

        gate_up = by_columns(weights.gate_up)
        assert gate_up is not None
        bias = weights.down_bias
        return TensorParallelWeights(
            gate_up=gate_up,
            down=weights.down.chunk(size, 1)[rank].clone(),
            gate_up_bias=by_columns(weights.gate_up_bias),
            down_bias=None if bias is None else bias.chunk(size, 1)[rank].clone(),
            layout=weights.layout,
        )
