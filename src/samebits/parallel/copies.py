"""Slots sorted, rows gathered and added up as in ``samebits.ops.permute``, without gradients.

On a GPU each is repeated by its launches alone (``samebits.backends.passes``): in a layer over
ranks the host, which decides and checks, would take longer than the device. Arguments are those of
a call that was checked already.
"""

import torch
from torch import Tensor

from samebits.backends import passes
from samebits.ops.permute import Metadata
from samebits.ops.permute.contract import neighbours
from samebits.ops.permute.tuning import unpack

# Of the tiles of a sort, which nobody uses here.
_BLOCK_R = 128


def _launched(tensor: Tensor) -> bool:
    return tensor.is_cuda and not torch.compiler.is_compiling()


def sort(topk_ids: Tensor, num_experts: int, count: Tensor | None) -> Metadata:
    """Return the slots of ``topk_ids`` ``(T, K)``, sorted by expert.

    Determinism: exact integers.
    """
    if not _launched(topk_ids):
        buffer = torch.ops.samebits.sort_slots(topk_ids, count, num_experts, 0, _BLOCK_R)
    else:
        from samebits.ops.permute.kernel import launch_sort

        (buffer,) = passes.repeated(
            ("sort", num_experts),
            (topk_ids, count),
            lambda: (launch_sort(topk_ids, count, num_experts, 0, _BLOCK_R),),
        )
    return unpack(buffer, topk_ids.numel(), num_experts, _BLOCK_R)


def permute(x: Tensor, inverse: Tensor, topk: int, probs: Tensor | None = None) -> Tensor:
    """Return the rows ``(R, H)`` of tokens ``x`` ``(T, H)``, times their probabilities if given.

    Strides of ``x`` are the caller's; ``combine`` takes rows whose columns are neighbours.

    Determinism: elementwise.
    """
    if not _launched(x):
        return torch.ops.samebits.permute_forward(x, inverse, probs, None, topk)  # type: ignore[no-any-return]
    from samebits.ops.permute.kernel import launch_permute

    x = neighbours(x)
    rows: Tensor
    (rows,) = passes.repeated(
        ("permute", topk),
        (x, inverse, probs),
        lambda: (launch_permute(x, inverse, topk, probs),),
    )
    return rows


def combine(
    rows: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum ``(T, H)`` of each token's rows, times their probabilities if given.

    Determinism: each token's rows ascending, in fp32 from +0.0.
    """
    dtype = out_dtype or rows.dtype
    if not _launched(rows):
        return torch.ops.samebits.combine_forward(rows, inverse, probs, topk, dtype)  # type: ignore[no-any-return]
    from samebits.ops.permute.kernel import launch_combine

    out: Tensor
    (out,) = passes.repeated(
        ("combine", topk, dtype),
        (rows, inverse, probs),
        lambda: (launch_combine(rows, inverse, topk, probs, dtype),),
    )
    return out
