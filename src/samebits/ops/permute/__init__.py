"""Sort slots by expert, gather their rows, and add each token's rows up again.

With R = T*K slots, ``rows = permute(x, m.inverse, K)`` puts the token of slot s into row
``m.inverse[s]``, and ``combine(rows, m.inverse, K)`` adds the K rows of each token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.errors import UnsupportedError, must
from samebits.ops.permute.contract import run_combine, run_permute, sort
from samebits.ops.permute.tuning import Metadata, Tiles

__all__ = ["Metadata", "Tiles", "combine", "permute", "sort_slots"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Slots are int32 in the kernels; the margin is what a last, partly filled block may add.
MOST_SLOTS = (1 << 31) - (1 << 20)


def sort_slots(
    topk_ids: Tensor,
    num_local: int,
    *,
    block_r: int = 128,
    expert_start: int = 0,
    num_valid_tokens: Tensor | None = None,
) -> Metadata:
    """Sort the slots of ``topk_ids`` by expert, stably, without a host sync.

    The same permutation as ``samebits.routing.Permutation``, in int32, with the tiles for one
    BLOCK_R. Ids are range-checked as they are: 2**32 + 3 is dropped, it is not expert 3.

    Args:
        topk_ids: ``(T, K)`` int32 or int64. Ids outside ``[expert_start, expert_start +
            num_local)`` are dropped, whatever they are.
        num_local: E, the experts held here.
        block_r: Rows of a tile.
        expert_start: First of the experts held here.
        num_valid_tokens: ``(1,)`` int32 on the device; slots of tokens from there on are dropped.
            None means all are valid.

    Returns:
        The permutation and its tiles, every shape a function of T, K, E and ``block_r``.

    Raises:
        TypeError: A dtype is not one of the allowed ones.
        ValueError: Shapes, devices or sizes are wrong; the message names them.

    Determinism: exact integers.
    """
    check_slots(topk_ids, num_local, num_valid_tokens)
    if block_r < 1:
        raise ValueError(must("block_r", "be >= 1", block_r))
    return sort(topk_ids, num_valid_tokens, num_local, expert_start, block_r)


def check_slots(topk_ids: Tensor, num_local: int, num_valid_tokens: Tensor | None) -> None:
    """Raise unless the slots of ``topk_ids`` can be sorted; see ``sort_slots``.

    Determinism: no arithmetic.
    """
    if topk_ids.dim() != 2:
        raise ValueError(must("topk_ids", "have shape (T, K)", tuple(topk_ids.shape)))
    if topk_ids.shape[1] < 1:
        raise ValueError(must("topk_ids", "have K >= 1", tuple(topk_ids.shape)))
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(must("topk_ids", "be int32 or int64", topk_ids.dtype))
    if num_local < 1:
        raise ValueError(must("num_local", "be >= 1", num_local))
    if topk_ids.numel() > MOST_SLOTS:
        raise ValueError(must("topk_ids", f"have at most {MOST_SLOTS} slots", topk_ids.numel()))
    if num_valid_tokens is not None:
        _check_count(num_valid_tokens, topk_ids.device)


def _check_count(count: Tensor, device: torch.device) -> None:
    if count.shape != (1,):
        raise ValueError(must("num_valid_tokens", "have shape (1,)", tuple(count.shape)))
    if count.dtype not in (torch.int32, torch.int64):
        raise TypeError(must("num_valid_tokens", "be int32 or int64", count.dtype))
    if count.device != device:
        raise ValueError(must("num_valid_tokens", f"be on {device}, as topk_ids", count.device))


class _Operands(NamedTuple):
    """What permute and combine share; ``rows`` are named ``name`` in errors."""

    name: str
    rows: Tensor
    inverse: Tensor
    topk: int
    topk_probs: Tensor | None
    offsets: Tensor | None

    def check(self) -> None:
        """Raise unless the operands fit one another."""
        name, rows, inverse, topk, topk_probs, offsets = self
        if rows.dim() != 2:
            raise ValueError(must(name, "have two dimensions", tuple(rows.shape)))
        if rows.dtype not in DTYPES:
            raise TypeError(must(name, "be bf16, fp16, fp32 or fp64", rows.dtype))
        if rows.dtype == torch.float64 and rows.device.type != "cpu":
            raise UnsupportedError(f"there are no fp64 kernels; {name} is fp64 on {rows.device}")
        if topk < 1:
            raise ValueError(must("topk", "be >= 1", topk))
        _check_index("inverse", inverse)
        if offsets is not None:
            _check_index("offsets", offsets)
        if topk_probs is not None:
            _check_probs(topk_probs, (inverse.shape[0] // topk, topk))
        for what in ("inverse", "topk_probs", "offsets"):
            tensor = getattr(self, what)
            if tensor is not None and tensor.device != rows.device:
                raise ValueError(must(what, f"be on {rows.device}, where {name} is", tensor.device))


def _check_index(name: str, index: Tensor) -> None:
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(must(name, "be int32 or int64", index.dtype))
    if index.dim() != 1:
        raise ValueError(must(name, "have one dimension", tuple(index.shape)))
    if index.shape[0] > 1 and index.stride(0) != 1:
        raise ValueError(must(name, "be contiguous", f"stride {index.stride(0)}"))


def _check_probs(topk_probs: Tensor, expected: tuple[int, int]) -> None:
    if topk_probs.dtype not in DTYPES:
        raise TypeError(must("topk_probs", "be bf16, fp16, fp32 or fp64", topk_probs.dtype))
    if topk_probs.shape != expected:
        rule = f"have shape (T, K) = {expected}"
        raise ValueError(must("topk_probs", rule, tuple(topk_probs.shape)))


def permute(
    x: Tensor,
    inverse: Tensor,
    topk: int,
    topk_probs: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
) -> Tensor:
    """Copy each token to the rows of its slots.

    ``rows[inverse[s]] = x[s // K]``, or ``D(fp32(x[s // K]) * topk_probs[s])`` with probabilities
    (``ProbPlacement.FC1_INPUT``). Reads a token once.

    Args:
        x: ``(T, H)``, any row stride.
        inverse: ``(R,)`` int32 or int64, slot -> row; R for a dropped slot.
        topk: K.
        topk_probs: ``(T, K)``, any float dtype; None means no factor.
        offsets: ``(E + 1,)``; with it the rows from ``offsets[E]`` on, which belong to no slot,
            are written 0. Without it they are unspecified.

    Returns:
        ``(R, H)`` in ``x.dtype``, contiguous. Differentiable once, in x (a token's gradient is the
        sum of its rows' gradients by ascending row, in fp32 from +0.0, times the probability) and
        in topk_probs (sums of 64 columns, added in ascending order; 0 for dropped slots).

    Raises:
        TypeError: A dtype is not one of the allowed ones.
        ValueError: Shapes or devices disagree; the message names both.
        UnsupportedError: fp64 on a device other than the CPU.

    Determinism: elementwise; gradients repeat bit for bit and do not depend on the other tokens.
    """
    _Operands("x", x, inverse, topk, topk_probs, offsets).check()
    if inverse.shape[0] != x.shape[0] * topk:
        rule = f"have shape (R,) with R = T * K = {x.shape[0] * topk}"
        raise ValueError(must("inverse", rule, tuple(inverse.shape)))
    return run_permute(x, inverse, topk_probs, offsets, topk)


def combine(
    rows: Tensor,
    inverse: Tensor,
    topk: int,
    topk_probs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Add the rows of each token up.

    ``out[t] = D(Σ fp32(rows[inverse[s]]) [* topk_probs[s]])`` over the token's slots by ascending
    row, in fp32, from +0.0; product and sum are two roundings.

    Args:
        rows: ``(R, H)``, any row stride; rows of no slot are not read.
        inverse: ``(R,)`` int32 or int64, slot -> row; R for a dropped slot, which adds nothing.
        topk: K.
        topk_probs: ``(T, K)``, any float dtype; None means no factor.
        out_dtype: ``rows.dtype`` or fp32; None means ``rows.dtype``.
        offsets: ``(E + 1,)``; with it the gradient of the rows of no slot is written 0. Without it
            it is unspecified.

    Returns:
        ``(T, H)``, contiguous; tokens whose slots are all dropped are 0. Differentiable once, in
        rows (``D(dout * p)``) and topk_probs (sums of 64 columns, added in ascending order; 0 for
        dropped slots).

    Raises:
        TypeError: A dtype is not one of the allowed ones.
        ValueError: Shapes, dtypes or devices disagree; the message names both.
        UnsupportedError: fp64 on a device other than the CPU.

    Determinism: fixed order; each token independent of the others.
    """
    _Operands("rows", rows, inverse, topk, topk_probs, offsets).check()
    if rows.shape[0] != inverse.shape[0] or rows.shape[0] % topk:
        rule = f"have shape (R, H) with R = T * K = {inverse.shape[0]}, K = {topk}"
        raise ValueError(must("rows", rule, tuple(rows.shape)))
    if out_dtype not in (None, rows.dtype, torch.float32):
        raise TypeError(must("out_dtype", f"be {rows.dtype} (as rows) or fp32", out_dtype))
    return run_combine(rows, inverse, topk_probs, offsets, topk, out_dtype or rows.dtype)
