"""The grouped backend on a GPU: the bits of the fused one, whichever product computes them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from samebits.backends.grouped import device as stages
from samebits.experts import experts, grouped_experts
from samebits.ops.grouped_gemm import kernel, tuning
from samebits.ops.permute.kernel import launch_metadata
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Routing
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

DTYPES = ("bf16", "fp16", "fp32")
RUNNABLE = [
    name
    for name, problem in CASES.items()
    if stages.why_not(replace(problem, grad=False, device="sm_90")) is None
]
# Rows per expert that take each way: weights streamed, tiles in between, torch's product.
CALLS = ((3, "dropped"), (70, "zipf"), (600, "uniform"))


def _in(problem: Problem, dtype: str) -> Problem:
    biases = {
        name: None if getattr(problem, name) is None else dtype
        for name in ("gate_up_bias", "down_bias")
    }
    same_probs = "fp32" if problem.probs == "fp32" else dtype
    return replace(problem, dtype=dtype, probs=same_probs, grad=False, **biases)


# Every case in bf16; the other dtypes take every fourth.
SPREAD = [
    (name, dtype)
    for place, name in enumerate(RUNNABLE)
    for turn, dtype in enumerate(DTYPES)
    if dtype == "bf16" or place % 4 == turn
]


@pytest.mark.parametrize(("name", "dtype"), SPREAD)
def test_has_the_bits_of_fused(name: str, dtype: str) -> None:
    problem = _in(CASES[name], dtype)
    tokens, distribution = CALLS[RUNNABLE.index(name) % len(CALLS)]
    inputs = make_inputs(
        problem, tokens, distribution=distribution, device="cuda", valid_tokens=tokens - 1
    )

    out = run(problem, inputs, "grouped")["out"]

    assert_bitwise_equal(out, run(problem, inputs, "fused")["out"])


@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize("contraction", [72, 2056, 2880, 7168])
def test_torch_and_the_kernel_have_one_set_of_bits(contraction: int, orientation: str) -> None:
    generator = torch.Generator(device="cuda").manual_seed(contraction)
    experts, columns, total = 6, 264, 1900
    ids = torch.randint(-1, experts - 1, (total, 1), device="cuda", generator=generator)
    ids[: total // 2] = 2
    shape = (experts, columns, contraction)
    w = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    w = w if orientation == "out_in" else w.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.randn(total, contraction, device="cuda", generator=generator).bfloat16()
    rows *= torch.logspace(-2, 2, total, device="cuda").bfloat16()[:, None]
    config = tuning.config_of(total, experts, "sm_90", "bf16")
    metadata = launch_metadata(ids, experts, config.block_r)
    live = int(metadata.offsets[-1])

    products = [
        kernel.launch_grouped_gemm(rows, metadata, w, None, None, config, device)
        for device in ("sm_90", "the kernel's")
    ]

    assert tuning.prefers_torch(total, experts)
    assert_bitwise_equal(products[0][:live], products[1][:live])


@pytest.mark.parametrize("placement", ProbPlacement)
def test_torch_serves_a_layer_in_a_graph(placement: ProbPlacement) -> None:
    problem = replace(CASES["swiglu"], H=256, F=128, E=4, grad=False, placement=placement)
    problem = replace(problem, dtype="bf16")
    inputs = make_inputs(problem, 600, device="cuda")
    new = make_inputs(problem, 600, seed=1, distribution="one", device="cuda")
    expected = run(problem, new, "fused")["out"]
    run(problem, inputs, "grouped")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = experts(
                inputs.x, inputs.routing, inputs.weights, problem.activation,
                placement=placement, backend="grouped",
            )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    inputs.x.copy_(new.x)
    inputs.routing.topk_ids.copy_(new.routing.topk_ids)
    inputs.routing.topk_probs.copy_(new.routing.topk_probs)
    inputs.weights.gate_up.copy_(new.weights.gate_up)
    inputs.weights.down.copy_(new.weights.down)

    graph.replay()

    assert_bitwise_equal(out, expected)


@pytest.mark.usefixtures("unpoisoned_memory")
@pytest.mark.parametrize("backend", ["fused", "grouped"])
@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("rows", [3, 200, 3000])
def test_sorted_rows_have_the_bits_of_experts(
    rows: int, placement: ProbPlacement, backend: str
) -> None:
    whole = replace(CASES["gpt-oss-whole"], H=256, F=128, E=8, K=1, placement=placement)
    problem = replace(_in(whole, "bf16"), grad=True)
    inputs = make_inputs(problem, rows, device="cuda")
    # The last experts have no rows, and the last row has no expert.
    counts = torch.bincount(torch.arange(rows - 1, device="cuda") % 6, minlength=8)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    ids = torch.arange(8, device="cuda").repeat_interleave(counts)
    ids = torch.nn.functional.pad(ids, (0, 1), value=-1)[:, None]
    probs = inputs.routing.topk_probs.requires_grad_()
    x = inputs.x.requires_grad_()
    wanted = [x, probs, inputs.weights.gate_up, inputs.weights.down]
    for tensor in wanted[2:]:
        tensor.requires_grad_()
    options = {"placement": placement, "backend": backend}

    def results(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            alone = call()
        out = call()
        return [alone, out, *torch.autograd.grad(out, wanted, inputs.dout)]

    expected = results(
        lambda: experts(x, Routing(ids, probs), inputs.weights, problem.activation, **options)
    )
    # The first is recorded, or seen; the others repeat it.
    for _ in range(4):
        found = results(
            lambda: grouped_experts(
                x, offsets, inputs.weights, problem.activation, row_probs=probs[:, 0], **options
            )
        )
        for value, other in zip(found, expected, strict=True):
            assert_bitwise_equal(value, other)
