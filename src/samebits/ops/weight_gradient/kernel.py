"""Products and sums over the rows of each expert; see ``samebits.ops.weight_gradient``.

A program owns ``[BLOCK_M, BLOCK_N]`` of one expert's matrix and walks down its rows, BLOCK_K at a
time from the expert's first. Steps that fill BLOCK_K go through tensor descriptors; the last one
goes through pointers, since a box cannot stop at the expert's last row. A tile leaves through a box
where it can: that frees registers, for one more program a processor, and nothing waits for it. The
longest expert comes first, so that no program ends with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.ops._triton.chunks import CHUNK, chunk_of_program, chunks_of_expert
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import row_operand, weight_operand
from samebits.ops._triton.product import tile_of_position
from samebits.ops.weight_gradient.tuning import Config

# Gluon is not settled: Triton 3.9 dropped names that these two have.
_GLUON_KNOWN = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])


@recordable
@triton.jit
def _order_kernel(offsets_ptr, order_ptr, E, BINS: tl.constexpr):
    """Write each expert to its place by rows, longest first (ties: lower id)."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BINS)
    known = experts < E
    starts = tl.load(offsets_ptr + experts, mask=known, other=0)
    counts = tl.load(offsets_ptr + experts + 1, mask=known, other=0) - starts
    mine = tl.load(offsets_ptr + expert + 1) - tl.load(offsets_ptr + expert)
    before = known & ((counts > mine) | ((counts == mine) & (experts < expert)))
    tl.store(order_ptr + tl.sum(before.to(tl.int32), 0), expert)


@triton.jit
def _masked(ptr, stride_r, rows, end, column, width, BLOCK: tl.constexpr):
    columns = column + tl.arange(0, BLOCK)
    ptrs = ptr + (rows.to(tl.int64) * stride_r)[:, None] + columns[None, :]
    return tl.load(ptrs, mask=(rows < end)[:, None] & (columns < width)[None, :], other=0.0)


@recordable
@triton.jit
def _weight_gradient_kernel(
    a, a_ptr, stride_ar, b, b_ptr, stride_br,
    dw, dw_ptr, stride_e, stride_m, stride_n,
    order_ptr, offsets_ptr,
    E, M, N,
    DESCRIBED: tl.constexpr, STORED: tl.constexpr, ACCUMULATE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row_blocks, column_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    blocks = row_blocks * column_blocks
    for position in range(tl.program_id(0), E * blocks, tl.num_programs(0)):
        expert = tl.load(order_ptr + position // blocks)
        start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
        m_block, n_block = tile_of_position(position % blocks, row_blocks, column_blocks, GROUP)
        m, n = m_block * BLOCK_M, n_block * BLOCK_N
        rest = start
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if DESCRIBED:
            rest = start + (end - start) // BLOCK_K * BLOCK_K
        if DESCRIBED:
            for row in range(start, rest, BLOCK_K):
                left, right = a.load([row, m]), b.load([row, n])
                acc = tl.dot(left.T, right, acc, input_precision="ieee")
        for row in range(rest, end, BLOCK_K):
            rows = row + tl.arange(0, BLOCK_K)
            left = _masked(a_ptr, stride_ar, rows, end, m, M, BLOCK_M)
            right = _masked(b_ptr, stride_br, rows, end, n, N, BLOCK_N)
            acc = tl.dot(left.T, right, acc, input_precision="ieee")

        if STORED:
            tile = acc.to(dw_ptr.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_N)
            dw.store([expert, m, n], tile)
        else:
            ms, ns = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
            place = expert.to(tl.int64) * stride_e + (ms.to(tl.int64) * stride_m)[:, None]
            place += (ns.to(tl.int64) * stride_n)[None, :]
            mask = (ms < M)[:, None] & (ns < N)[None, :]
            if ACCUMULATE:
                acc += tl.load(dw_ptr + place, mask=mask, other=0.0).to(tl.float32)
            tl.store(dw_ptr + place, acc.to(dw_ptr.dtype.element_ty), mask=mask)


@recordable
@triton.jit
def _chunk_sums_kernel(
    rows_ptr, stride_r, slots_ptr, probs_ptr, chunk_sums_ptr, offsets_ptr, N,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    _, first, end = chunk_of_program(offsets_ptr, chunk, None, EXPERTS, EXPERTS_POW2, CHUNK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(first, end, num_stages=3):
        value = tl.load(rows_ptr + row * stride_r + columns, mask=mask, other=0.0).to(tl.float32)
        if probs_ptr is not None:
            value = value * tl.load(probs_ptr + tl.load(slots_ptr + row)).to(tl.float32)
        total += value
    tl.store(chunk_sums_ptr + chunk * N + columns, total, mask=mask & (first < end))


@recordable
@triton.jit
def _sum_chunks_kernel(
    chunk_sums_ptr, dbias_ptr, stride_e, stride_n, offsets_ptr, N,
    ACCUMULATE: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    start, end = chunks_of_expert(offsets_ptr, expert, None, EXPERTS_POW2, CHUNK)
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(start, end):
        total += tl.load(chunk_sums_ptr + chunk * N + columns, mask=mask, other=0.0)
    place = expert.to(tl.int64) * stride_e + columns.to(tl.int64) * stride_n
    if ACCUMULATE:
        total += tl.load(dbias_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(dbias_ptr + place, total.to(dbias_ptr.dtype.element_ty), mask=mask)


def launch_order(offsets: Tensor) -> Tensor:
    """Return the experts of ``offsets`` (E + 1,) int32, longest first (ties: lower id).

    Determinism: exact integers.
    """
    experts = offsets.shape[0] - 1
    order = torch.empty(experts, dtype=torch.int32, device=offsets.device)
    _order_kernel[(experts,)](
        offsets, order, experts, BINS=triton.next_power_of_2(experts),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return order


def launch_weight_gradient(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    order: Tensor,
    dw: Tensor,
    config: Config,
    *,
    accumulate: bool = False,
) -> Tensor:
    """Write ``Σ_r a[r, :] ⊗ b[r, :]`` of each expert's rows to ``dw``, and return it.

    Args:
        a: ``(R, M)``, last dimension contiguous.
        b: ``(R, N)``, of the dtype of ``a``, last dimension contiguous.
        offsets: ``(E + 1,)`` int32.
        order: Experts in the order in which programs take them.
        dw: ``(E, M, N)``, any strides, D or fp32.
        config: Tile.
        accumulate: Add to what ``dw`` holds, in fp32, instead.

    Determinism: one accumulator per element, rows ascending; the same bits for every config.
    """
    if dw.stride(1) == 1 and dw.stride(2) != 1:
        # Neighbouring threads store neighbouring elements.
        a, b, dw_seen = b, a, dw.transpose(1, 2)
    else:
        dw_seen = dw
    experts, m, n = dw_seen.shape
    work = experts * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    if work == 0:
        return dw
    if _GLUON_KNOWN and config.specialized is not None and config.tma and not accumulate:
        # Imported here: Gluon takes a quarter of a second.
        from samebits.ops.weight_gradient.specialized.kernel import (
            launch_specialized_weight_gradient,
        )

        tile = config.specialized
        if launch_specialized_weight_gradient(a, b, offsets, order, dw_seen, tile):
            return dw
    left, left_described = row_operand(a, (config.block_k, config.block_m) if config.tma else None)
    right, right_described = row_operand(
        b, (config.block_k, config.block_n) if config.tma else None
    )
    described = left_described and right_described
    # A wider dtype would need twice the shared memory.
    stored = config.stored and not accumulate and dw.element_size() == 2 and n > 1
    stored = stored and dw_seen.stride(2) == 1
    box = (config.block_m, config.block_n) if stored else None
    target, _, stored = weight_operand(dw_seen, box)
    _weight_gradient_kernel[(min(work, config.programs),)](
        left if described else a, a, a.stride(0), right if described else b, b, b.stride(0),
        target, dw_seen, *dw_seen.stride(), order, offsets, experts, m, n,
        DESCRIBED=described, STORED=stored, ACCUMULATE=accumulate,
        GROUP=config.group, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return dw


def launch_bias_gradient(
    rows: Tensor,
    offsets: Tensor,
    slots: Tensor,
    probs: Tensor | None,
    dbias: Tensor,
    *,
    accumulate: bool = False,
) -> Tensor:
    """Write the sums of each expert's rows, times their probabilities, to ``dbias``; return it.

    Args:
        rows: ``(R, N)``, last dimension contiguous.
        offsets: ``(E + 1,)`` int32.
        slots: ``(R,)`` int32; read with ``probs`` only.
        probs: Factor of each slot.
        dbias: ``(E, N)``, any strides, D or fp32.
        accumulate: Add to what ``dbias`` holds, in fp32, instead.

    Determinism: rows ascending, 64 at a time, then these sums ascending.
    """
    experts, width = dbias.shape
    # Every expert can end in a chunk that is not full.
    chunks = triton.cdiv(rows.shape[0], CHUNK) + experts
    chunk_sums = rows.new_empty(chunks, width, dtype=torch.float32)
    sizes = {"EXPERTS_POW2": triton.next_power_of_2(experts), "CHUNK": CHUNK}
    _chunk_sums_kernel[(chunks, triton.cdiv(width, 512))](
        rows, rows.stride(0), slots, probs, chunk_sums, offsets, width,
        EXPERTS=experts, **sizes, BLOCK=512, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _sum_chunks_kernel[(triton.cdiv(width, 128), experts)](
        chunk_sums, dbias, *dbias.stride(), offsets, width,
        ACCUMULATE=accumulate, **sizes, BLOCK=128, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return dbias
