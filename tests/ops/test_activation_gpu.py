"""What only a GPU shows about the activation: big offsets, graphs, host synchronisation, tiles."""

import pytest
import torch

from activation_cases import (
    GPT_OSS,
    ROWS,
    TILED_CASES,
    Case,
    collect,
    make_dh,
    make_operands,
    move,
    run_launchers,
    run_operator,
    wanted_of,
)
from samebits.ops.activation import Operands, Wanted, activate, activate_backward
from samebits.ops.activation.tuning import candidates
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [case._replace(columns=2880) for case in TILED_CASES], ids=str)
def test_tiles_do_not_change_bits_on_a_gpu(case: Case) -> None:
    dtype = torch.bfloat16
    operands = make_operands(case, dtype, rows=ROWS * 30)
    dh = make_dh(operands, case)
    expected = run_launchers(None, "cuda", torch.bfloat16)(operands, dh, case)

    for config in candidates(case.columns, dtype.itemsize, backward=True)[::3]:
        for name, value in run_launchers(config, "cuda", torch.bfloat16)(
            operands, dh, case
        ).items():
            assert_bitwise_equal(value, expected[name], f"{name} {config}")


def test_offsets_past_two_to_the_31() -> None:
    rows, columns = (1 << 16) + 40, 1 << 14
    z = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device="cuda")
    tail = make_operands(Case(columns=columns), torch.bfloat16, rows=64).z.cuda()
    z[-64:] = tail
    probs = torch.ones(rows, device="cuda")
    dh = torch.ones(1, columns, dtype=torch.bfloat16, device="cuda").expand(rows, columns)
    wanted = Wanted(dp=True)

    h = activate(z, GPT_OSS)
    grads = activate_backward(dh, Operands(z, row_probs=probs), GPT_OSS, wanted=wanted)

    assert_bitwise_equal(h[-64:], activate(tail, GPT_OSS), "h")
    small = Operands(tail, row_probs=probs[-64:])
    expected = activate_backward(dh[-64:], small, GPT_OSS, wanted=wanted)
    assert grads.dp is not None
    assert expected.dp is not None
    assert_bitwise_equal(grads.dz[-64:], expected.dz, "dz")
    assert_bitwise_equal(grads.dp[-64:], expected.dp, "dp")


def test_cuda_graph_replays_with_new_values_and_a_new_count() -> None:
    case = Case(GPT_OSS, Layout(interleave=1), bias="experts", probs=True, count=True)
    operands = move(make_operands(case, torch.bfloat16), "cuda")
    dh = make_dh(operands, case).cuda()
    run = run_operator("cuda", torch.bfloat16)
    run(operands, dh, case)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        z, bias, offsets, probs, count, _ = operands
        h = activate(
            z, case.activation, case.layout,
            bias=bias, offsets=offsets, row_probs=probs, num_rows=count,
        )  # fmt: skip
        grads = activate_backward(dh, operands, case.activation, case.layout, wanted_of(operands))

    other = move(make_operands(case, torch.bfloat16, seed=5), "cuda")
    assert operands.num_rows is not None
    operands.z.copy_(other.z)
    operands.num_rows.fill_(4)
    graph.replay()
    torch.cuda.synchronize()

    expected = run(operands._replace(num_rows=operands.num_rows.cpu()), dh, case)
    for name, value in collect(h, grads, 4).items():
        assert_bitwise_equal(value, expected[name], name)


def test_no_host_synchronisation() -> None:
    case = Case(GPT_OSS, Layout(interleave=1), bias="experts", probs=True, count=True)
    operands = move(make_operands(case, torch.bfloat16), "cuda")
    dh = make_dh(operands, case).cuda()
    activate_backward(dh, operands, case.activation, case.layout, wanted_of(operands))
    torch.cuda.set_sync_debug_mode("error")
    try:
        z, bias, offsets, probs, count, _ = operands
        activate(
            z, case.activation, case.layout,
            bias=bias, offsets=offsets, row_probs=probs, num_rows=count,
        )  # fmt: skip
        activate_backward(dh, operands, case.activation, case.layout, wanted_of(operands))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fp64_on_a_gpu_is_refused() -> None:
    z = torch.zeros(2, 4, dtype=torch.float64, device="cuda")

    with pytest.raises(NotImplementedError, match="no fp64"):
        activate(z)
