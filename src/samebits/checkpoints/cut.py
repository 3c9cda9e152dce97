"""Experts that several ranks share: put together when read, cut apart when written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.checkpoints.files import BadFileError
from samebits.checkpoints.layers import Experts, Matrix, StoredExperts, layout_of_scales
from samebits.checkpoints.schemes import Kind, Part
from samebits.checkpoints.source import Rank
from samebits.errors import UnsupportedError, must
from samebits.weights import Layout


class CutExperts:
    """The experts of one layer that several ranks hold, as if they were in one place."""

    def __init__(self, ranks: Sequence[tuple[Rank, StoredExperts]]) -> None:
        self._ranks = dict(ranks)
        first_rank, first = ranks[0]
        self.root = first.root
        self.num_experts = sum(held.num_experts for rank, held in ranks if rank.tp == 0)
        for rank, held in ranks:
            own = len(rank.experts(self.num_experts))
            if held.num_experts != own:
                raise BadFileError(
                    must(f"{rank.folder}: {held.root}", f"hold {own} experts", held.num_experts)
                )
            if held.matrices != first.matrices:
                raise BadFileError(
                    f"{rank.folder}: {held.root} has other shapes than in {first_rank.folder}"
                )
        self._tp_size, self._ep_size = first_rank.tp_size, first_rank.ep_size
        self.matrices = {
            (part, kind): Matrix(matrix.dtype, self._whole(part, kind, matrix.shape))
            for (part, kind), matrix in first.matrices.items()
        }

    def _whole(self, part: Part, kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = cut_dimension(part, kind)
        if dim is None:
            return shape
        return (*shape[:dim], shape[dim] * self._tp_size, *shape[dim + 1 :])

    def read(self, part: Part, kind: Kind, expert: int) -> Tensor:
        """Return one matrix of one expert, put together; see ``Experts``.

        Raises:
            BadFileError: The bias of the second projection, which every rank has whole, differs.

        Determinism: exact.
        """
        ep = next(rank.ep for rank in self._ranks if expert in rank.experts(self.num_experts))
        pieces = []
        for tp in range(self._tp_size):
            rank = Rank(tp, self._tp_size, ep, self._ep_size)
            local = expert - rank.experts(self.num_experts).start
            pieces.append(self._ranks[rank].read(part, kind, local))
        dim = cut_dimension(part, kind)
        if dim is not None:
            return torch.cat(pieces, dim)
        if not all(torch.equal(piece, pieces[0]) for piece in pieces):
            raise BadFileError(f"the ranks disagree on the {part} {kind} of {self.root}")
        return pieces[0]


class RankExperts:
    """What one rank holds of a layer's experts: gate and up are cut apart, each by its rows."""

    def __init__(self, whole: Experts, rank: Rank) -> None:
        self._experts, self._whole, self._rank = rank.experts(whole.num_experts), whole, rank
        self.root = whole.root
        self.num_experts = len(self._experts)
        self.matrices = {
            (part, kind): Matrix(matrix.dtype, self._share(part, kind, matrix.shape))
            for (part, kind), matrix in whole.matrices.items()
        }

    def _share(self, part: Part, kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim, size = cut_dimension(part, kind), self._rank.tp_size
        if dim is None or size == 1:
            return shape
        if shape[dim] % size:
            rule = f"have a multiple of {size} in dimension {dim}"
            raise UnsupportedError(must(f"{part} {kind} of {self.root}", rule, shape))
        if kind == "scale":
            layout_of_scales(Layout(), self._whole.matrices["gate", "weight"].shape[0], shape[dim])
        return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])

    def read(self, part: Part, kind: Kind, expert: int) -> Tensor:
        """Return this rank's share of one matrix; see ``Experts``.

        Determinism: exact.
        """
        value = self._whole.read(part, kind, self._experts[expert])
        dim = cut_dimension(part, kind)
        return value if dim is None else value.chunk(self._rank.tp_size, dim)[self._rank.tp]


def cut_dimension(part: Part, kind: Kind) -> int | None:
    """Return the dimension that tensor-parallel ranks share; None where each has the whole.

    The bias of the second projection is added once, after the ranks' sum: every rank keeps it.
    """
    if part == "down":
        return None if kind == "bias" else 1
    return 0
