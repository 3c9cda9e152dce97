"""Stages of a call on a GPU that its backends share: rows by expert, the end of the output."""

import torch
from torch import Tensor

from samebits.backends.call import Call
from samebits.ops.permute.tuning import Metadata
from samebits.problem import DTYPES, Problem, ProbPlacement


def metadata_of(problem: Problem, call: Call, block_r: int) -> Metadata:
    """Return the slots of a call by expert, and the tiles for one BLOCK_R.

    Determinism: exact integers.
    """
    # Imported here: naming a backend must not need Triton.
    from samebits.ops.permute.kernel import launch_metadata
    from samebits.ops.sorted_rows.kernel import launch_sorted_rows

    if call.offsets is not None:
        return launch_sorted_rows(call.offsets, call.topk_ids.numel(), block_r)
    return launch_metadata(
        call.topk_ids,
        problem.E,
        block_r,
        expert_start=problem.expert_start,
        num_valid_tokens=call.num_valid_tokens,
    )


def by_row(problem: Problem, call: Call, tokens: Tensor, inverse: Tensor) -> Tensor:
    """Return the row of each slot, (R, H), from ``tokens`` (T, H): a copy, or ``tokens`` itself.

    Determinism: exact.
    """
    from samebits.ops.permute.kernel import launch_permute

    if call.offsets is not None and tokens.is_contiguous():
        return tokens
    return launch_permute(tokens, inverse, problem.K, None)


def factors(problem: Problem, call: Call) -> dict[ProbPlacement, Tensor | None]:
    """Return the probabilities, (T, K) contiguous, at the place where they are multiplied in.

    Determinism: exact.
    """
    probs = call.topk_probs.contiguous()
    return {place: probs if place == problem.placement else None for place in ProbPlacement}


def second_dtype(problem: Problem) -> torch.dtype | None:
    """Return the dtype of the second projection's output where it is not that of its input."""
    return None if problem.norm_eps is None else torch.float32


def combined(problem: Problem, call: Call, y: Tensor, metadata: Metadata) -> Tensor:
    """Return the output, (T, H), from the second projection's: the norm of each row, then the sum.

    Determinism: fixed order; each token independent of the others.
    """
    from samebits.ops.permute.kernel import launch_combine
    from samebits.ops.row_norm.kernel import launch_row_norm

    if problem.norm_eps is not None:
        assert call.norm_scale is not None
        kept, dtype = metadata.offsets[-1:], DTYPES[problem.dtype]
        y = launch_row_norm(y, call.norm_scale, kept, problem.norm_eps, dtype)
    return launch_combine(
        y,
        metadata.inverse,
        problem.K,
        factors(problem, call)[ProbPlacement.FC2_OUTPUT],
        DTYPES[problem.result_dtype],
        out=call.out,
    )
