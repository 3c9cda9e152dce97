"""The activation in every tier: CPU operator, kernels in the interpreter, kernels on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from activation_cases import (
    ACTIVATIONS_TRIED,
    GPT_OSS,
    LAYOUTS,
    ROWS,
    RUNNERS,
    RUNS,
    SMALL,
    TILED_CASES,
    Case,
    Runner,
    assert_results,
    live_rows,
    make_dh,
    make_operands,
    move,
    plain_results,
    run_launchers,
    run_operator,
)
from samebits.activation import ACTIVATIONS, Activation, LimitPosition
from samebits.ops.activation import Operands, Wanted, activate, blocks
from samebits.ops.activation.blocks import BLOCK
from samebits.ops.activation.tuning import Config, block_columns
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget
from samebits.weights import Layout


@pytest.mark.parametrize(("run", "case"), RUNS)
def test_output_and_every_gradient_within_budget(run: Runner, case: Case) -> None:
    operands = make_operands(case, run.dtype)
    dh = make_dh(operands, case)

    assert_results(run(operands, dh, case), operands, dh, case)


@pytest.mark.parametrize("run", RUNNERS)
def test_gradient_of_a_clamp_is_one_at_the_bound_and_zero_outside(run: Runner) -> None:
    case = Case(Activation(limit=2.0), columns=4)
    gate = torch.tensor([[2.0, 2.0, 2.5, 1.0]])
    up = torch.tensor([[2.0, -2.0, 1.0, -2.5]])
    # An infinite gradient outside a bound must not turn the 0 into NaN.
    dh = torch.tensor([[1.0, 1.0, float("inf"), float("inf")]])

    z = torch.cat((gate, up), 1).to(run.dtype)
    dz = run(Operands(z), dh.to(run.dtype), case)["dz"]

    inside = torch.tensor([True, True, False, True, True, True, True, False])
    assert torch.equal(dz[0] != 0, inside)


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("limit_position", ["pre", "post"])
def test_gradient_of_a_clamp_passes_nan(run: Runner, limit_position: LimitPosition) -> None:
    activation = Activation(limit=2.0, limit_position=limit_position)
    gate = torch.tensor([[float("nan"), 1.0, 3.0, 1.0]])
    # Beside NaN of one half, the other is a plain number: only a mask could hide it.
    up = torch.tensor([[1.0, float("nan"), 1.0, 3.0]])
    z = torch.cat((gate, up), 1).to(run.dtype)

    dz = run(Operands(z), torch.ones(1, 4, dtype=run.dtype), Case(activation, columns=4))["dz"][0]

    assert dz.isnan().tolist() == [True, True, False, False, True, False, False, False]
    assert (dz == 0).tolist() == [False, False, True, False, False, False, False, True]


@pytest.mark.parametrize("activation", ACTIVATIONS_TRIED, ids=str)
@pytest.mark.parametrize("run", RUNNERS)
def test_nan_passes_every_clamp_and_stays_in_its_row(run: Runner, activation: Activation) -> None:
    case = Case(activation, probs=True)
    operands = make_operands(case, run.dtype, rows=4)
    dh = make_dh(operands, case)
    poisoned = operands._replace(z=operands.z.clone())
    poisoned.z[1] = float("nan")

    clean, dirty = run(operands, dh, case), run(poisoned, dh, case)

    others = [0, 2, 3]
    assert dirty["h"][1].isnan().all()
    for name in ("h", "dz"):
        assert_bitwise_equal(dirty[name][others], clean[name][others], name)


@pytest.mark.parametrize("bias", ["", "shared"])
@pytest.mark.parametrize("run", RUNNERS)
def test_rows_past_the_count_are_not_read(run: Runner, bias: str) -> None:
    case = Case(GPT_OSS, bias=bias, probs=True, count=True)
    operands = make_operands(case, run.dtype)
    dh = make_dh(operands, case)
    clean = run(operands, dh, case)
    live = live_rows(operands)
    assert operands.row_probs is not None
    for tensor in (operands.z, operands.row_probs, dh):
        tensor[live:] = float("nan")

    dirty = run(operands, dh, case)

    for name, value in clean.items():
        assert_bitwise_equal(dirty[name], value, name)


def untouched(config: Config | None, device: str) -> tuple[Tensor, Tensor]:
    """Return the rows of h and dz past the count and past the last offset."""
    from samebits.ops.activation import kernel

    tails = []
    for case in (Case(count=True), Case(bias="experts")):
        operands = move(make_operands(case, torch.float32), device)
        if operands.offsets is not None:
            operands.offsets.clamp_(max=ROWS - 2)
        options = (case.activation, case.layout)
        h = kernel.launch_activation_forward(operands, *options, config)
        dh = make_dh(operands, case).to(device)
        grads = kernel.launch_activation_backward(
            dh, operands, *options, Wanted(dbias=operands.bias is not None), config
        )
        tails.append(torch.cat((h[-2:], grads.dz[-2:]), 1))
    return tails[0], tails[1]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpret),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_rows_past_the_count_are_not_written(device: str) -> None:
    tails = untouched(SMALL, device)

    assert all(tail.isnan().all() for tail in tails)


@pytest.mark.parametrize("run", RUNNERS)
def test_any_row_stride_and_no_copy_of_meaning(run: Runner) -> None:
    case = Case(GPT_OSS, Layout(interleave=1), probs=True)
    operands = make_operands(case, run.dtype)
    dh = make_dh(operands, case)
    expected = run(operands, dh, case)
    wide = torch.full((ROWS, 2 * case.columns + 7), float("nan"), dtype=run.dtype)
    wide[:, 5:-2] = operands.z

    strided = run(operands._replace(z=wide[:, 5:-2]), dh, case)

    for name, value in expected.items():
        assert_bitwise_equal(strided[name], value, name)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.reference),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_columns_apart_and_expanded_gradients(device: str) -> None:
    z = make_operands(Case(), torch.float32).z.to(device)
    apart = z.t().contiguous().t().requires_grad_()
    bias = torch.arange(z.shape[1] * 3.0, device=device)[::3] / 64
    probs = torch.full((1,), 0.5, device=device).expand(ROWS)

    h = activate(apart, GPT_OSS, bias=bias, row_probs=probs)
    (dz,) = torch.autograd.grad(h.sum(), apart)

    reference = z.clone().requires_grad_()
    expected = activate(reference, GPT_OSS, bias=bias.clone(), row_probs=probs.clone())
    (expected_dz,) = torch.autograd.grad(expected, reference, torch.ones_like(expected))
    assert_bitwise_equal(h, expected, "h")
    assert_bitwise_equal(dz, expected_dz, "dz")


VARIED = {
    "alpha": (Activation(), Activation(alpha=1.702)),
    "limit": (Activation(), Activation(limit=2.0)),
    "limit value": (Activation(limit=1.0), Activation(limit=2.0)),
    "limit_position": (Activation(limit=1.0), Activation(limit=1.0, limit_position="post")),
    "linear_offset": (Activation(), Activation(linear_offset=1.0)),
    "gate_softcap": (
        Activation(kind="situ", gate_softcap=1.0),
        Activation(kind="situ", gate_softcap=2.0),
    ),
    "up_softcap": (
        Activation(kind="situ", gate_softcap=1.0),
        Activation(kind="situ", gate_softcap=1.0, up_softcap=2.0),
    ),
    "kind": (Activation(kind="gelu"), Activation(kind="gelu_tanh")),
}


@pytest.mark.parametrize("option", VARIED)
@pytest.mark.parametrize("run", RUNNERS)
def test_every_option_changes_the_results(run: Runner, option: str) -> None:
    first, second = (Case(activation, probs=True) for activation in VARIED[option])
    operands = make_operands(first, run.dtype)
    dh = make_dh(operands, first)

    ours, others = run(operands, dh, first), run(operands, dh, second)

    assert all(not torch.equal(ours[name], others[name]) for name in ("h", "dz"))


@pytest.mark.parametrize("run", RUNNERS)
def test_every_layout_changes_the_results(run: Runner) -> None:
    layouts = (Layout(), *LAYOUTS)
    operands = make_operands(Case(), run.dtype)
    dh = make_dh(operands, Case())

    results = [run(operands, dh, Case(GPT_OSS, layout)) for layout in layouts]

    for name in ("h", "dz"):
        assert len({str(result[name].tolist()) for result in results}) == len(layouts)


@pytest.mark.parametrize("case", TILED_CASES, ids=str)
@pytest.mark.interpret
def test_tiles_do_not_change_bits(case: Case) -> None:
    operands = make_operands(case, torch.float32)
    dh = make_dh(operands, case)

    small = run_launchers(SMALL, "cpu", torch.float32)(operands, dh, case)

    for config in (
        Config(block_r=1, block_f=256, num_warps=4),
        Config(block_r=8, block_f=128, num_warps=4, num_stages=3),
        Config(block_r=4, block_f=64, num_warps=4, walk=True),
    ):
        for name, value in run_launchers(config, "cpu", torch.float32)(operands, dh, case).items():
            assert_bitwise_equal(value, small[name], f"{name} {config}")


@pytest.mark.parametrize("run", RUNNERS)
def test_a_row_has_the_same_bits_alone_and_among_others(run: Runner) -> None:
    case = Case(Activation(kind="situ", gate_softcap=4.0), probs=True, columns=65)
    operands = make_operands(case, run.dtype, rows=33)
    dh = make_dh(operands, case)
    together = run(operands, dh, case)
    assert operands.row_probs is not None

    for row in (0, 7, 32):
        one = slice(row, row + 1)
        alone = Operands(operands.z[one], row_probs=operands.row_probs[one])
        for name, value in run(alone, dh[one], case).items():
            assert_bitwise_equal(value, together[name][one], f"{name} of row {row}")


@pytest.mark.parametrize("activation", ACTIVATIONS_TRIED, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [96, 128])
@pytest.mark.reference
def test_a_row_has_the_same_bits_among_several_blocks_of_two_threads(
    columns: int, dtype: torch.dtype, activation: Activation
) -> None:
    case = Case(activation, probs=True, columns=columns)
    run = run_operator("cpu", dtype)
    operands = make_operands(case, dtype, rows=2 * BLOCK // columns + 5)
    dh = make_dh(operands, case)
    assert operands.row_probs is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    try:
        together = run(operands, dh, case)
        for row in (0, BLOCK // columns, -1):
            one = [row]
            alone = Operands(operands.z[one], row_probs=operands.row_probs[one])
            for name, value in run(alone, dh[one], case).items():
                assert_bitwise_equal(value, together[name][one], f"{name} of row {row}")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
@pytest.mark.reference
def test_every_thread_gets_whole_vectors(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    for size in (1, 63, 768, 5000, 16448, 32768, 32832, 65536, 70001, 3 * 32768, 999_999):
        padded = blocks._padded(size)
        assert size <= padded < size + 64 * threads * threads + 64
        # As torch cuts loops, those of gelu too.
        for grain in (32768, max(1, padded // threads) if padded > 16384 else 32768):
            parts = min(threads, -(-padded // grain)) if padded > grain else 1
            assert -(-padded // parts) % 64 == 0, (size, padded, parts)


@pytest.mark.parametrize("run", RUNNERS)
def test_no_rows(run: Runner) -> None:
    case = Case(probs=True, bias="shared")
    operands = make_operands(case, run.dtype, rows=0)

    results = run(operands, make_dh(operands, case), case)

    assert results["h"].shape == (0, case.columns)
    assert not results["dbias"].any()


@pytest.mark.parametrize("run", RUNNERS)
def test_gradient_in_fp32_is_not_rounded_first(run: Runner) -> None:
    case = Case(Activation(limit=2.0))
    operands = make_operands(case, torch.float16)
    dh = torch.randn(ROWS, case.columns, generator=torch.Generator().manual_seed(2))

    wide = run(operands, dh, case)["dz"]

    exact = plain_results(operands._replace(z=operands.z.double()), dh, case, torch.float64)["dz"]
    assert_within_budget(wide, exact.to(torch.float16), exact, torch.float16)
    assert not torch.equal(wide, run(operands, dh.half(), case)["dz"])


def many_experts(run: Runner) -> None:
    """Compare the bias of more experts than one vector holds with one call per expert."""
    experts, columns = 70, 8
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 4, (experts,), generator=generator)
    offsets = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int64)
    rows = int(offsets[-1])
    z = torch.randn(rows, 2 * columns, generator=generator)
    bias = torch.randn(experts, 2 * columns, generator=generator)
    dh = torch.randn(rows, columns, generator=generator)
    case = Case(columns=columns)

    together = run(Operands(z, bias, offsets), dh, case)

    for expert in range(0, experts, 23):
        span = slice(int(offsets[expert]), int(offsets[expert + 1]))
        alone = run(Operands(z[span], bias[expert]), dh[span], case)
        for name in ("h", "dz"):
            assert_bitwise_equal(together[name][span], alone[name], name)
        assert_bitwise_equal(together["dbias"][expert], alone["dbias"], "dbias")


@pytest.mark.parametrize("run", RUNNERS)
def test_bias_of_many_experts(run: Runner) -> None:
    many_experts(run)


@pytest.mark.parametrize("run", RUNNERS)
def test_bias_gradient_over_several_chunks(run: Runner) -> None:
    case = Case(Activation(limit=2.0), bias="experts", probs=True, columns=3)
    operands = make_operands(case, run.dtype, rows=ROWS * 16)
    dh = make_dh(operands, case)

    assert_results(run(operands, dh, case), operands, dh, case)


@pytest.mark.interpret
def test_kernel_and_table_have_the_same_kinds() -> None:
    from samebits.ops.activation.tiles import KINDS

    assert set(KINDS) == set(ACTIVATIONS)


@pytest.mark.interpret
def test_tanh_is_accurate_near_zero_and_far_from_it() -> None:
    # situ with huge c2 is c2·tanh(u / c2): relative errors near 0 show in u alone.
    from samebits.ops.activation import kernel

    u = torch.cat([torch.logspace(-30, 1.2, 512), -torch.logspace(-30, 1.2, 512)])
    case = Activation(kind="situ", gate_softcap=1.0, up_softcap=1.0)
    gate = torch.full_like(u, 20.0)
    h = kernel.launch_activation_forward(
        Operands(torch.cat((gate, u))[None]), case, Layout(), SMALL
    )[0]

    scale = math.tanh(20.0) / (1.0 + math.exp(-20.0))
    exact = torch.tanh(u.double()) * scale
    units = ((h.double() - exact) / exact).abs().max() / torch.finfo(torch.float32).eps
    assert float(units) < 4.0


@pytest.mark.reference
def test_blocks_cover_a_row_with_little_waste() -> None:
    assert block_columns(768, 2048) == 256
    assert block_columns(2880, 2048) == 1024
    assert block_columns(14336, 2048) == 2048
    assert block_columns(1, 2048) == 64
