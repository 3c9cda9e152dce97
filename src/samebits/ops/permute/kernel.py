"""Routing metadata, permutation and combination of rows, and their gradients.

    metadata  rows sorted by expert, stably; offsets, slots (row → slot), inverse (slot → row, R where
              dropped); and, for one BLOCK_R, the tiles (expert, first row, end), longest expert first
    gather    rows[inverse[s], :] = D(x[s // K, :] [· p[s]])         dp[s] = Σ_H x[s // K, :] · y[inverse[s], :]
    sum       out[t, :] = D(0 + Σ rows[inverse[s], :] [· p[s]])      dp[s] = Σ_H x[t, :] · rows[inverse[s], :]
              over the slots s of token t, row ascending

Metadata of few slots is one launch: the program of an expert reads every id, counts all experts, and
ranks its own slots by a running sum. Of many slots it is two: the histogram of each block of slots,
then every block sorts its slots by (expert, slot) and places them behind those of the blocks before
it. No order is decided by atomics across programs, and nothing waits for the host.

Gather and sum are token-major: a program owns columns of a token, all of them where dp is wanted.
Sums are fp32; dp adds sums of 64 columns in ascending order, whatever the tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.ops._triton.launch import recordable
from samebits.ops._triton.rows import keys_ascending, sum_ascending, sum_of_64_columns
from samebits.ops.permute import tuning
from samebits.ops.permute.tuning import Config, Metadata, Tiles

# Tiles of one expert that are written at a time.
_STRIP = tl.constexpr(64)


@triton.jit
def _local_ids(ids_ptr, num_valid_ptr, slot, R, topk, expert_start, E):
    """Return the expert of each slot, counted from ``expert_start``; E where it is dropped."""
    live = slot < R
    if num_valid_ptr is not None:
        live = live & (slot < tl.load(num_valid_ptr).to(tl.int64) * topk)
    # The range is checked in 64 bits: an id past 2³² must not wrap into the range.
    local = tl.load(ids_ptr + slot, mask=live, other=0).to(tl.int64) - expert_start
    kept = live & (local >= 0) & (local < E)
    return tl.where(kept, local, E).to(tl.int32)


@triton.jit
def _write_tiles(
    counts, experts, expert, first_row, count,
    tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the tiles of ``expert`` behind those of every longer expert (ties: lower id)."""
    tiles = (counts + BLOCK_R - 1) // BLOCK_R
    before = (counts > count) | ((counts == count) & (experts < expert))
    place = tl.sum(tl.where(before, tiles, 0), 0)
    mine = (count + BLOCK_R - 1) // BLOCK_R
    for start in range(0, mine, _STRIP):
        index = start + tl.arange(0, _STRIP)
        mask = index < mine
        tl.store(tile_expert_ptr + place + index, tl.zeros_like(index) + expert, mask=mask)
        tl.store(tile_row_ptr + place + index, first_row + index * BLOCK_R, mask=mask)
        tl.store(tile_end_ptr + place + index, tl.zeros_like(index) + first_row + count, mask=mask)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(tiles, 0))


@recordable
@triton.jit(do_not_specialize=["R", "topk", "expert_start", "E"])
def _few_metadata_kernel(
    ids_ptr, num_valid_ptr,
    slots_ptr, offsets_ptr, inverse_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    R, topk, expert_start, E,
    BINS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Programs 0 … E - 1 own an expert, program E the dropped slots.
    expert = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    experts = tl.arange(0, BINS)
    local = _local_ids(ids_ptr, num_valid_ptr, slot, R, topk, expert_start, E)

    counts = tl.where(experts < E, tl.histogram(local, BINS), 0)
    first_row = tl.sum(tl.where(experts < expert, counts, 0), 0)
    # Places past R look dropped; they are neither counted nor written.
    mine = (local == expert) & (slot < R)
    row = first_row + tl.cumsum(mine.to(tl.int32), 0) - 1

    dropped = expert == E
    tl.store(slots_ptr + row, tl.where(dropped, R, slot), mask=mine)
    tl.store(inverse_ptr + slot, tl.where(dropped, R, row), mask=mine)
    tl.store(offsets_ptr + expert, first_row)
    if expert < E:
        count = tl.sum(tl.where(experts == expert, counts, 0), 0)
        _write_tiles(
            counts, experts, expert, first_row, count,
            tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr, BLOCK_R,
        )  # fmt: skip


@recordable
@triton.jit(do_not_specialize=["R", "topk", "expert_start", "E", "chunks"])
def _histogram_kernel(
    ids_ptr, num_valid_ptr, histogram_ptr, R, topk, expert_start, E, chunks,
    BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for chunk in range(chunks):
        slot = (block * chunks + chunk).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        local = _local_ids(ids_ptr, num_valid_ptr, slot, R, topk, expert_start, E)
        counts += tl.histogram(local, BINS)
    # Places past R count as dropped in the last block; no block reads that bin of it.
    tl.store(histogram_ptr + block * BINS + tl.arange(0, BINS), counts)


@recordable
@triton.jit(do_not_specialize=["R", "topk", "expert_start", "E", "chunks", "blocks"])
def _place_kernel(
    ids_ptr, num_valid_ptr, histogram_ptr,
    slots_ptr, offsets_ptr, inverse_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    R, topk, expert_start, E, chunks, blocks,
    BINS: tl.constexpr, CHUNK: tl.constexpr, STRIP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Programs may outnumber blocks: the rest only write tiles.
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    total = tl.zeros([BINS], tl.int32)
    for start in range(0, blocks, STRIP):
        index = (start + tl.arange(0, STRIP))[:, None]
        strip = tl.load(histogram_ptr + index * BINS + bins[None, :], mask=index < blocks, other=0)
        total += tl.sum(strip, 0)
        before += tl.sum(tl.where(index < block, strip, 0), 0)
    starts = tl.cumsum(total, 0) - total
    # Row of the next slot of each expert; bin E holds the dropped.
    position = starts + before

    if block < blocks:
        place = tl.arange(0, CHUNK)
        for chunk in range(chunks):
            first = (block * chunks + chunk).to(tl.int64) * CHUNK
            local = _local_ids(ids_ptr, num_valid_ptr, first + place, R, topk, expert_start, E)
            counts = tl.histogram(local, BINS)
            # (expert, slot) in one key; keys differ, so that any sort is stable.
            key = tl.sort(local * CHUNK + place)
            expert = key // CHUNK
            slot = first + key % CHUNK
            # The first of an expert sits at its count of smaller ids, and goes to its position.
            shift = position - (tl.cumsum(counts, 0) - counts)
            row = tl.gather(shift, expert, 0) + place
            inside = slot < R
            kept = expert < E
            tl.store(slots_ptr + row, tl.where(kept, slot, R).to(tl.int32), mask=inside)
            tl.store(inverse_ptr + slot, tl.where(kept, row, R), mask=inside)
            position += counts

    held = tl.where(bins < E, total, 0)
    for expert in range(block, E, tl.num_programs(0)):
        first_row = tl.sum(tl.where(bins == expert, starts, 0), 0)
        count = tl.sum(tl.where(bins == expert, held, 0), 0)
        tl.store(offsets_ptr + expert, first_row)
        _write_tiles(
            held, bins, expert, first_row, count,
            tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr, BLOCK_R,
        )  # fmt: skip
    if block == 0:
        tl.store(offsets_ptr + E, tl.sum(held, 0))


@recordable
@triton.jit(do_not_specialize=["E"])
def _tiles_kernel(
    offsets_ptr,
    tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    E, BINS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    experts = tl.arange(0, BINS)
    known = experts < E
    starts = tl.load(offsets_ptr + experts, mask=known, other=0)
    counts = tl.load(offsets_ptr + experts + 1, mask=known, other=0) - starts
    first_row = tl.load(offsets_ptr + expert)
    count = tl.load(offsets_ptr + expert + 1) - first_row
    _write_tiles(
        counts, experts, expert, first_row, count,
        tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr, BLOCK_R,
    )  # fmt: skip


@recordable
@triton.jit(do_not_specialize=["R"])
def _gather_kernel(
    x_ptr, stride_xt, y_ptr, stride_yr, probs_ptr,
    rows_ptr, partial_ptr, dp_ptr,
    inverse_ptr, kept_ptr,
    R, H,
    TOPK: tl.constexpr, TOPK_POW2: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    WITH_DP: tl.constexpr = dp_ptr is not None  # then a program walks over all columns of its token
    BLOCK: tl.constexpr = 256 if WITH_DP and BLOCK_H > 256 else BLOCK_H
    column_blocks = tl.cdiv(H, BLOCK)
    per_token = 1 if WITH_DP else column_blocks
    token = (tl.program_id(0) // per_token).to(tl.int64)
    start = (tl.program_id(0) % per_token) * BLOCK
    stop = H if WITH_DP else tl.minimum(start + BLOCK, H)
    partials = tl.cdiv(H, 64)
    dtype = rows_ptr.dtype.element_ty

    for column in range(start, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        mask = columns < H
        x = tl.load(x_ptr + token * stride_xt + columns, mask=mask, other=0.0)
        for k in tl.static_range(TOPK):
            slot = token * TOPK + k
            row = tl.load(inverse_ptr + slot).to(tl.int64)
            live = row < R
            value = x
            if probs_ptr is not None:
                value = x.to(tl.float32) * tl.load(probs_ptr + slot).to(tl.float32)
            tl.store(rows_ptr + row * H + columns, value.to(dtype), mask=mask & live)
            if WITH_DP:
                y = tl.load(y_ptr + row * stride_yr + columns, mask=mask & live, other=0.0)
                product = tl.where(mask & live, x.to(tl.float32) * y.to(tl.float32), 0.0)
                sums = sum_of_64_columns(tl.reshape(product, [1, BLOCK]), 1, BLOCK)
                places = column // 64 + tl.arange(0, BLOCK // 64)[None, :]
                tl.store(partial_ptr + slot * partials + places, sums, mask=places < partials)
            if kept_ptr is not None:
                # Rows of no slot are the last ones; there are as many rows as slots.
                empty = slot >= tl.load(kept_ptr)
                nothing = tl.zeros([BLOCK], dtype)
                tl.store(rows_ptr + slot * H + columns, nothing, mask=mask & empty)

    if WITH_DP:
        # The partial sums were written by other threads of this program.
        tl.debug_barrier()
        choice = tl.arange(0, TOPK_POW2)
        slots = token * TOPK + choice
        known = choice < TOPK
        tl.store(
            dp_ptr + slots,
            sum_ascending(partial_ptr + slots * partials, known, partials),
            mask=known,
        )


@recordable
@triton.jit(do_not_specialize=["R"])
def _sum_kernel(
    rows_ptr, stride_r, x_ptr, stride_xt, probs_ptr,
    out_ptr, partial_ptr, dp_ptr,
    inverse_ptr,
    R, H,
    TOPK: tl.constexpr, TOPK_POW2: tl.constexpr, WIDE_KEYS: tl.constexpr,
    BLOCK_H: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    WITH_DP: tl.constexpr = dp_ptr is not None  # then a program walks over all columns of its token
    BLOCK: tl.constexpr = 256 if WITH_DP and BLOCK_H > 256 else BLOCK_H
    column_blocks = tl.cdiv(H, BLOCK)
    per_token = 1 if WITH_DP else column_blocks
    token = (tl.program_id(0) // per_token).to(tl.int64)
    start = (tl.program_id(0) % per_token) * BLOCK
    stop = H if WITH_DP else tl.minimum(start + BLOCK, H)
    partials = tl.cdiv(H, 64)
    ordered = keys_ascending(inverse_ptr, token * TOPK, R, TOPK, TOPK_POW2, WIDE_KEYS)

    for column in range(start, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        mask = columns < H
        if WITH_DP:
            x = tl.load(x_ptr + token * stride_xt + columns, mask=mask, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in tl.static_range(0, TOPK, AHEAD):
            # Up to AHEAD rows are on their way before the first is added.
            loaded = ()
            for k in tl.static_range(first, min(first + AHEAD, TOPK)):
                row = ordered[k] // TOPK_POW2
                row_ptrs = rows_ptr + row.to(tl.int64) * stride_r + columns
                y = tl.load(row_ptrs, mask=mask & (row < R), other=0.0)
                loaded = loaded + (y,)  # noqa: RUF005
            for k in tl.static_range(first, min(first + AHEAD, TOPK)):
                slot = token * TOPK + ordered[k] % TOPK_POW2
                live = ordered[k] // TOPK_POW2 < R
                y = loaded[k - first].to(tl.float32)
                if probs_ptr is None:
                    total += y
                else:
                    # The probability of a dropped slot may be NaN.
                    total += y * tl.load(probs_ptr + slot, mask=live, other=0.0).to(tl.float32)
                if WITH_DP:
                    sums = sum_of_64_columns(tl.reshape(x * y, [1, BLOCK]), 1, BLOCK)
                    places = column // 64 + tl.arange(0, BLOCK // 64)[None, :]
                    partial_ptrs = partial_ptr + slot * partials + places
                    tl.store(partial_ptrs, sums, mask=(places < partials) & live)
        tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=mask)

    if WITH_DP:
        # The partial sums were written by other threads of this program.
        tl.debug_barrier()
        choice = tl.arange(0, TOPK_POW2)
        slots = token * TOPK + choice
        known = choice < TOPK
        live = known & (tl.load(inverse_ptr + slots, mask=known, other=R) < R)
        dp = sum_ascending(partial_ptr + slots * partials, live, partials)
        tl.store(dp_ptr + slots, dp, mask=known)


def _bins(num_local: int) -> int:
    return max(32, triton.next_power_of_2(num_local + 1))


def launch_metadata(
    topk_ids: Tensor,
    num_local: int,
    block_r: int,
    *,
    expert_start: int = 0,
    num_valid_tokens: Tensor | None = None,
) -> Metadata:
    """Return the permutation of ``topk_ids`` (T, K) and its tiles; see ``samebits.ops.permute``.

    Determinism: exact integers.
    """
    buffer = launch_sort(topk_ids, num_valid_tokens, num_local, expert_start, block_r)
    return tuning.unpack(buffer, topk_ids.numel(), num_local, block_r)


def launch_sort(
    topk_ids: Tensor,
    num_valid_tokens: Tensor | None,
    num_local: int,
    expert_start: int,
    block_r: int,
) -> Tensor:
    """Return the buffer behind ``launch_metadata``.

    Determinism: exact integers.
    """
    total, topk = topk_ids.numel(), topk_ids.shape[1]
    ids = topk_ids.contiguous()
    size = tuning.buffer_size(total, num_local, block_r)
    buffer = torch.empty(size, dtype=torch.int32, device=ids.device)
    if total == 0:
        return buffer.zero_()
    metadata = tuning.unpack(buffer, total, num_local, block_r)
    outputs = (*metadata[:3], *metadata.tiles)
    sizes = (total, topk, expert_start, num_local)
    bins = _bins(num_local)
    if total <= tuning.FEW_SLOTS:
        slots = tuning.slots_of_few(total)
        _few_metadata_kernel[(num_local + 1,)](
            ids, num_valid_tokens, *outputs, *sizes, BINS=bins, SLOTS=slots, BLOCK_R=block_r,
            num_warps=max(min(4, slots // 32), slots // 512), enable_fp_fusion=False,
        )  # fmt: skip
        return buffer
    chunks = tuning.chunks_per_program(total)
    blocks = triton.cdiv(total, chunks * tuning.CHUNK)
    histogram = torch.empty(blocks, bins, dtype=torch.int32, device=ids.device)
    _histogram_kernel[(blocks,)](
        ids, num_valid_tokens, histogram, *sizes, chunks, BINS=bins, CHUNK=tuning.CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _place_kernel[(max(blocks, min(num_local, 128)),)](
        ids, num_valid_tokens, histogram, *outputs, *sizes, chunks, blocks,
        BINS=bins, CHUNK=tuning.CHUNK, STRIP=max(4, 4096 // bins), BLOCK_R=block_r,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return buffer


def launch_tiles(offsets: Tensor, total: int, block_r: int) -> Tiles:
    """Return the tiles of ``offsets`` (int32, of ``total`` rows at most) for another BLOCK_R.

    Determinism: exact integers.
    """
    num_local = offsets.shape[0] - 1
    most = tuning.capacity(total, num_local, block_r)
    expert, row, end = torch.empty(3, -(-most // 4) * 4, dtype=torch.int32, device=offsets.device)
    tiles = Tiles(expert[:most], row[:most], end[:most], offsets.new_empty(1))
    _tiles_kernel[(num_local,)](
        offsets, *tiles, num_local, BINS=_bins(num_local), BLOCK_R=block_r,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return tiles


def _scratch(like: Tensor, topk: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums of 64 columns and dp, unwritten, of ``like`` (T, H); None if not wanted."""
    if not wanted:
        return None, None
    tokens, hidden = like.shape
    sums = triton.cdiv(hidden, tuning.COLUMNS_PER_SUM)
    partial = like.new_empty(tokens * topk, sums, dtype=torch.float32)
    return partial, like.new_empty(tokens, topk, dtype=torch.float32)


def _launch_gather(x, y, inverse, topk, probs, dtype, offsets, config):
    tokens, hidden = x.shape
    rows = x.new_empty(tokens * topk, hidden, dtype=dtype)
    partial, dp = _scratch(x, topk, y is not None)
    if rows.numel() == 0:
        return rows, dp if dp is None else dp.zero_()
    config = config or tuning.heuristic(tokens, hidden, topk, x.element_size())
    blocks = 1 if y is not None else triton.cdiv(hidden, config.block_h)
    _gather_kernel[(tokens * blocks,)](
        x, x.stride(0), y, 0 if y is None else y.stride(0),
        None if probs is None else probs.contiguous(),
        rows, partial, dp, inverse, None if offsets is None else offsets[-1:],
        tokens * topk, hidden,
        TOPK=topk, TOPK_POW2=triton.next_power_of_2(topk), BLOCK_H=config.block_h,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return rows, dp


def _launch_sum(rows, x, inverse, topk, probs, dtype, config, out=None):
    total, hidden = inverse.shape[0], rows.shape[1]
    tokens = total // topk
    out = rows.new_empty(tokens, hidden, dtype=dtype) if out is None else out
    partial, dp = _scratch(out, topk, x is not None)
    if out.numel() == 0:
        return out, dp if dp is None else dp.zero_()
    config = config or tuning.heuristic(tokens, hidden, topk, rows.element_size())
    pow2 = triton.next_power_of_2(topk)
    blocks = 1 if x is not None else triton.cdiv(hidden, config.block_h)
    _sum_kernel[(tokens * blocks,)](
        rows, rows.stride(0), x, 0 if x is None else x.stride(0),
        None if probs is None else probs.contiguous(),
        out, partial, dp, inverse, total, hidden,
        TOPK=topk, TOPK_POW2=pow2, WIDE_KEYS=total * pow2 > tuning.MOST_NARROW_KEY,
        BLOCK_H=config.block_h, AHEAD=config.ahead, num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out, dp


def launch_permute(
    x: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    *,
    offsets: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return rows ``(R, H)``; rows of no slot are 0 with ``offsets``, else they stay unwritten.

    Determinism: elementwise; the same bits for every ``config``.
    """
    return _launch_gather(x, None, inverse, topk, probs, x.dtype, offsets, config)[0]


def launch_permute_backward(
    drows: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    x: Tensor | None,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(dx, dp)``; dp ``(T, K)`` only with ``x``. See ``samebits.ops.permute``.

    Determinism: fixed order; each token independent of the others; the same bits for every ``config``.
    """
    return _launch_sum(drows, x, inverse, topk, probs, drows.dtype, config)


def launch_combine(
    rows: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return ``(T, H)`` sums over each token's rows, ascending, in ``out`` where it is given.

    Determinism: fixed order; each token independent of the others; the same bits for every ``config``.
    """
    return _launch_sum(rows, None, inverse, topk, probs, dtype, config, out)[0]


def launch_combine_backward(
    dout: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    rows: Tensor | None,
    dtype: torch.dtype,
    *,
    offsets: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(drows, dp)``; dp ``(T, K)`` only with ``rows``. See ``samebits.ops.permute``.

    Rows of no slot are 0 with ``offsets``, else they stay unwritten.

    Determinism: fixed order; the same bits for every ``config``.
    """
    return _launch_gather(dout, rows, inverse, topk, probs, dtype, offsets, config)
