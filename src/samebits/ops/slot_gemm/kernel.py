"""The two launches of ``samebits.ops.slot_gemm``.

A program owns a slot and a block of columns (``_slot_hidden_kernel``), or a token and a block of
columns (``_token_output_kernel``): the second contracts all slots of its token side by side and adds
them by ascending expert. Each contraction is one fp32 accumulator, ascending. A tile has 16 rows, of
which one is live in the first launch, and those of a token in the second.

With ``EARLY`` the second launch may begin while the first still runs: it reads ids, which the first
does not write, and waits before it reads ``h``.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from samebits.activation import Activation
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import weight_operand
from samebits.ops._triton.product import stored_columns, weight_tile
from samebits.ops._triton.rows import insert_ascending
from samebits.ops.activation.tiles import TileOptions, act_tile, glu_tile
from samebits.ops.indirect_gemm.kernel import split_parts
from samebits.ops.slot_gemm.tuning import Config, Tiles
from samebits.problem import ProbPlacement
from samebits.weights import ExpertWeights

# Rows of a tile: the matrix unit's least.
_ROWS = tl.constexpr(16)

if knobs.runtime.interpret:
    # There a launch ends before the next begins.
    @triton.jit
    def _let_the_next_launch_start():
        pass

    @triton.jit
    def _wait_for_the_launch_before():
        pass

else:

    @triton.jit
    def _let_the_next_launch_start():
        gdc_launch_dependents()

    @triton.jit
    def _wait_for_the_launch_before():
        gdc_wait()


@triton.jit
def _expert_of_slot(ids_ptr, num_valid_ptr, slot, topk, expert_start, E):
    """Return the expert of a slot, counted from ``expert_start``; E where it is dropped."""
    # The range is checked in 64 bits: an id past 2³² must not wrap into the range.
    local = tl.load(ids_ptr + slot).to(tl.int64) - expert_start
    kept = (local >= 0) & (local < E)
    if num_valid_ptr is not None:
        kept = kept & (slot // topk < tl.load(num_valid_ptr))
    return tl.where(kept, local, E).to(tl.int32)


@recordable
@triton.jit(do_not_specialize=["topk", "expert_start", "E"])
def _slot_hidden_kernel(
    x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr,
    ids_ptr, num_valid_ptr, x_probs_ptr, h_probs_ptr,
    h_ptr,
    H, F, topk, expert_start, E, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, K_TAIL: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _let_the_next_launch_start()
    PAIRED: tl.constexpr = GATED and (INTERLEAVE == 0 or BLOCK_F % INTERLEAVE != 0)
    PARTS: tl.constexpr = 2 if GATED else 1
    BLOCK_N: tl.constexpr = PARTS * BLOCK_F
    STEP: tl.constexpr = BLOCK_F if PAIRED else BLOCK_N
    dtype = h_ptr.dtype.element_ty
    blocks = tl.cdiv(F, BLOCK_F)
    slot = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    expert = _expert_of_slot(ids_ptr, num_valid_ptr, slot, topk, expert_start, E)
    if expert < E:
        bound = F if PAIRED else PARTS * F
        span = INTERLEAVE if INTERLEAVE else F
        live = (tl.arange(0, _ROWS) == 0)[:, None]
        ks = tl.arange(0, BLOCK_K)
        row_ptrs = x_ptr + (slot // topk).to(tl.int64) * stride_xt + ks[None, :]
        row_ptrs = row_ptrs + tl.zeros((_ROWS, 1), tl.int32)
        if x_probs_ptr is not None:
            x_p = tl.load(x_probs_ptr + slot).to(tl.float32)
        acc = tl.zeros((_ROWS, BLOCK_N), tl.float32)
        for k in range(0, H, BLOCK_K):
            w_tile = weight_tile(
                w, stride_we, stride_wn, stride_wk, expert, block * STEP, k, bound, H, span,
                PAIRED, TMA, TRANSPOSED, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if K_TAIL:
                a = tl.load(row_ptrs + k, mask=live & (k + ks < H)[None, :], other=0.0)
            else:
                a = tl.load(row_ptrs + k, mask=live, other=0.0)
            if x_probs_ptr is not None:
                a = (a.to(tl.float32) * x_p).to(dtype)
            acc = tl.dot(a, w_tile.T, acc, input_precision="ieee")

        if bias_ptr is not None:
            place, columns = stored_columns(block * STEP, span, PAIRED, BLOCK_N)
            bias_ptrs = bias_ptr + expert.to(tl.int64) * (PARTS * F) + columns
            acc = acc + tl.load(bias_ptrs, mask=place < bound, other=0.0).to(tl.float32)[None, :]
        z = acc.to(dtype)
        alpha, limit, offset, gate_cap, up_cap = values
        if GATED:
            first, second = split_parts(z, PAIRED, INTERLEAVE, _ROWS, BLOCK_F)
            gate, up = (second, first) if UP_FIRST else (first, second)
            h = glu_tile(
                gate.to(tl.float32), up.to(tl.float32), alpha, limit, offset, gate_cap, up_cap,
                KIND, LIMIT, HAS_OFFSET, HAS_UP_CAP,
            )  # fmt: skip
        else:
            h = act_tile(z.to(tl.float32), alpha, gate_cap, KIND)
        if h_probs_ptr is not None:
            h = h * tl.load(h_probs_ptr + slot).to(tl.float32)
        f = (block * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
        h_ptrs = h_ptr + slot.to(tl.int64) * F + f + tl.zeros((_ROWS, 1), tl.int32)
        tl.store(h_ptrs, h.to(dtype), mask=live & (f < F))


@recordable
@triton.jit(do_not_specialize=["expert_start", "E"])
def _token_output_kernel(
    h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr,
    ids_ptr, num_valid_ptr, bias_probs_ptr, y_probs_ptr,
    out_ptr,
    F, H, expert_start, E,
    TOPK: tl.constexpr, TOPK_POW2: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, K_TAIL: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    dtype = h_ptr.dtype.element_ty
    blocks = tl.cdiv(H, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < H
    first_slot = token * TOPK

    # By expert, then slot; dropped slots come last.
    ordered = ()
    kept = 0
    for k in tl.static_range(TOPK):
        expert = _expert_of_slot(ids_ptr, num_valid_ptr, first_slot + k, TOPK, expert_start, E)
        kept += (expert < E).to(tl.int32)
        ordered = insert_ascending(ordered, expert * TOPK_POW2 + k, k)
    if EARLY:
        _wait_for_the_launch_before()
    # Row r of the tile is slot r of the token, for every expert: only its own row is looked at.
    row = tl.arange(0, _ROWS)
    ks = tl.arange(0, BLOCK_K)
    row_ptrs = h_ptr + (first_slot + row)[:, None] * F + ks[None, :]
    owners = ()
    sums = ()
    held = row < 0
    for place in tl.static_range(TOPK):
        # A dropped slot, of which nothing is kept, reads what the first slot does.
        owner = tl.where(place < kept, ordered[place], ordered[0]) // TOPK_POW2
        owners = owners + (owner,)  # noqa: RUF005
        sums = sums + (tl.zeros((_ROWS, BLOCK_N), tl.float32),)  # noqa: RUF005
        held = held | ((row == ordered[place] % TOPK_POW2) & (place < kept))
    held = held[:, None]
    for k in range(0, tl.where(kept > 0, F, 0), BLOCK_K):
        if K_TAIL:
            a = tl.load(row_ptrs + k, mask=held & (k + ks < F)[None, :], other=0.0)
        else:
            a = tl.load(row_ptrs + k, mask=held, other=0.0)
        added = ()
        for place in tl.static_range(TOPK):
            w_tile = weight_tile(
                w, stride_we, stride_wn, stride_wk, owners[place], block * BLOCK_N, k, H, F, H,
                False, TMA, TRANSPOSED, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(a, w_tile.T, sums[place], input_precision="ieee")
            added = added + (acc,)  # noqa: RUF005
        sums = added

    total = tl.zeros((BLOCK_N,), tl.float32)
    for place in tl.static_range(TOPK):
        live = place < kept
        choice = ordered[place] % TOPK_POW2
        # One term and zeros: exact, up to the sign of a zero that is added to +0.0 anyway.
        y = tl.sum(tl.where((row == choice)[:, None], sums[place], 0.0), 0)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + owners[place].to(tl.int64) * H + columns
            bias = tl.load(bias_ptrs, mask=inside & live, other=0.0).to(tl.float32)
            if bias_probs_ptr is not None:
                p = tl.load(bias_probs_ptr + first_slot + choice, mask=live, other=0.0)
                bias = bias * p.to(tl.float32)
            y = y + bias
        y = y.to(dtype).to(tl.float32)
        if y_probs_ptr is not None:
            # The probability of a dropped slot may be NaN.
            p = tl.load(y_probs_ptr + first_slot + choice, mask=live, other=0.0)
            y = y * p.to(tl.float32)
        total = tl.where(live, total + y, total)
    tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch_slot_hidden(
    x: Tensor,
    topk_ids: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    probs: Tensor,
    placement: ProbPlacement,
    config: Config,
    *,
    expert_start: int = 0,
    num_valid_tokens: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Return ``h`` (T * K, F) by slot; rows of dropped slots stay unwritten.

    Args:
        x: ``(T, H)``, last dimension contiguous.
        topk_ids: ``(T, K)``.
        weights: ``down`` gives F alone.
        activation: The function between the projections.
        probs: ``(T, K)``, contiguous; used where ``placement`` says.
        placement: Where the probability is multiplied in.
        config: Tile.
        expert_start: Global id of the first expert held here.
        num_valid_tokens: ``(1,)`` int32.
        early: ``launch_token_output`` follows, and may start early.

    Determinism: one accumulator per element, contraction ascending; the same bits for every config.
    """
    w, layout = weights.gate_up, weights.layout
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.contiguous()
    ids = topk_ids.contiguous()
    total, topk = ids.numel(), ids.shape[1]
    hidden, columns = w.shape[2], weights.down.shape[2]
    h = x.new_empty(total, columns)
    interleave = layout.interleave or 0
    block_f = config.block_n // activation.columns
    paired = activation.gated and (interleave == 0 or block_f % interleave != 0)
    halves = paired and interleave == 0
    described = config.tma and (halves or not paired)
    source, strides, tma = weight_operand(
        w, (config.block_n, config.block_k) if described else None, halves=halves
    )
    tile = TileOptions.of(activation, x.dtype)
    _slot_hidden_kernel[(total * triton.cdiv(columns, block_f),)](
        x, x.stride(0), source, *strides, bias,
        ids, num_valid_tokens,
        probs if placement == ProbPlacement.FC1_INPUT else None,
        probs if placement == ProbPlacement.FC2_INPUT else None,
        h,
        hidden, columns, topk, expert_start, w.shape[0], tile.scalars,
        **tile.flags, INTERLEAVE=interleave, UP_FIRST=layout.up_first,
        TMA=tma, TRANSPOSED=w.stride(2) != 1, K_TAIL=hidden % config.block_k != 0, EARLY=early,
        BLOCK_F=block_f, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return h


def launch_token_output(
    h: Tensor,
    topk_ids: Tensor,
    w: Tensor,
    bias: Tensor | None,
    probs: Tensor,
    placement: ProbPlacement,
    out: Tensor,
    tiles: Tiles,
    *,
    expert_start: int = 0,
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Return ``out`` (T, H): the sum over each token's slots, by expert, then slot.

    Args:
        h: ``(T * K, F)`` by slot, from ``launch_slot_hidden``.
        topk_ids: ``(T, K)``; contiguous, as ``bias`` is, where ``tiles.early``: a copy would run
            between the two launches, and ids are read before the launch before has ended.
        w: ``down``, ``(E, H, F)``, any strides.
        bias: ``(E, H)``.
        probs: ``(T, K)``, contiguous; used where ``placement`` says.
        placement: Where the probability is multiplied in.
        out: Where to write; contiguous.
        tiles: Tile, and whether to start early: only right behind ``launch_slot_hidden``.
        expert_start: Global id of the first expert held here.
        num_valid_tokens: ``(1,)`` int32.

    Determinism: fixed order; each token independent of the others; the same bits for every tile.
    """
    config = tiles.output
    if tiles.early:
        assert topk_ids.is_contiguous()
        assert bias is None or bias.is_contiguous()
    bias = None if bias is None else bias.contiguous()
    ids = topk_ids.contiguous()
    tokens, topk = ids.shape
    experts, hidden, columns = w.shape
    source, strides, tma = weight_operand(
        w, (config.block_n, config.block_k) if config.tma else None
    )
    _token_output_kernel[(tokens * triton.cdiv(hidden, config.block_n),)](
        h, source, *strides, bias,
        ids, num_valid_tokens,
        probs if placement == ProbPlacement.FC2_INPUT else None,
        probs if placement == ProbPlacement.FC2_OUTPUT else None,
        out,
        columns, hidden, expert_start, experts,
        TOPK=topk, TOPK_POW2=triton.next_power_of_2(topk),
        TMA=tma, TRANSPOSED=w.stride(2) != 1, K_TAIL=columns % config.block_k != 0,
        EARLY=tiles.early, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
        **({"launch_pdl": True} if tiles.early else {}),
    )  # fmt: skip
    return out
