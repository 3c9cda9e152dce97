"""The fused backend's gradients on a GPU: the error budget, and every promise of bits."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.backends import BACKENDS, passes
from samebits.backends.recorder import Pass
from samebits.experts import experts
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Routing
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, judge_all, make_inputs, run, run_function
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.gpu

FUSED = BACKENDS["fused"]
RUNNABLE = [
    name
    for name, problem in CASES.items()
    if FUSED.why_not(replace(problem, grad=True, device="sm_90")) is None
]
DTYPES = ("bf16", "fp16", "fp32")
RUNS = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name in RUNNABLE for dtype in DTYPES]
SHAPE = {"H": 256, "F": 128, "E": 8}


def _in(problem: Problem, dtype: str) -> Problem:
    biases = {
        name: None if getattr(problem, name) is None else dtype
        for name in ("gate_up_bias", "down_bias")
    }
    same_probs = "fp32" if problem.probs == "fp32" else dtype
    return replace(problem, dtype=dtype, probs=same_probs, grad=True, **biases)


def _failures(problem: Problem, inputs: Inputs) -> dict[str, str]:
    judgements = judge_all(problem, inputs, run(problem, inputs, "fused"))
    return {name: str(j) for name, j in judgements.items() if not j.passed}


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_every_gradient_is_within_the_budget(name: str, dtype: str) -> None:
    problem = _in(CASES[name], dtype)
    # Nine probabilities are no sample of the plain loop's error in fp32.
    few = 24 if dtype == "fp32" else 3
    for tokens, distribution in ((0, "uniform"), (few, "dropped"), (70, "zipf"), (600, "one")):
        valid = max(tokens - 2, 0)
        inputs = make_inputs(
            problem, tokens, distribution=distribution, device="cuda", valid_tokens=valid
        )

        assert not _failures(problem, inputs), (tokens, distribution)


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("hidden", [7, 12, 24, 40, 72, 2056])
def test_odd_sizes(hidden: int, placement: ProbPlacement) -> None:
    whole = replace(CASES["gpt-oss-whole"], H=hidden, F=hidden + 1, placement=placement)
    problem = _in(whole, "bf16")
    inputs = make_inputs(problem, 33, distribution="dropped", device="cuda")

    assert not _failures(problem, inputs)


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
def test_repeats_have_the_same_bits(orientation: str, placement: ProbPlacement) -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), placement=placement, H=2048, F=768, E=32)
    inputs = make_inputs(problem, 3000, distribution="zipf", device="cuda")
    inputs = replace(inputs, weights=inputs.weights.to_storage(orientation))
    expected = run(problem, inputs, "fused")

    noise = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(noise):
            torch.randn(1 << 24, device="cuda").sort()
        for name, value in run(problem, inputs, "fused").items():
            assert_bitwise_equal(value, expected[name], name)


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("name", ["bf16", "gpt-oss-whole"])
def test_grouped_has_the_same_bits(name: str, placement: ProbPlacement) -> None:
    problem = replace(_in(CASES[name], "bf16"), placement=placement, **SHAPE)
    for tokens, distribution in ((3, "dropped"), (300, "zipf")):
        inputs = make_inputs(problem, tokens, distribution=distribution, device="cuda")
        expected = run(problem, inputs, "fused")

        for quantity, value in run(problem, inputs, "grouped").items():
            assert_bitwise_equal(value, expected[quantity], quantity)


@pytest.mark.usefixtures("unpoisoned_memory")
@pytest.mark.parametrize("name", ["bf16", "gpt-oss-whole", "counted"])
@pytest.mark.parametrize("tokens", [3, 300, 3000])
def test_repeated_steps_have_the_same_bits(name: str, tokens: int) -> None:
    problem = replace(_in(CASES[name], "bf16"), **SHAPE)
    inputs = make_inputs(problem, tokens, distribution="zipf", device="cuda", valid_tokens=tokens)
    passes.forget()
    expected = run(problem, inputs, "fused")

    for _ in range(5):
        for quantity, value in run(problem, inputs, "fused").items():
            assert_bitwise_equal(value, expected[quantity], quantity)
    # Both were recorded: a forward and a backward.
    assert [k for k in passes.passes() if not isinstance(k, Pass)] == []
    assert len(passes.passes()) == 2


@pytest.mark.usefixtures("unpoisoned_memory")
def test_repeated_steps_make_their_copies_again() -> None:
    # The gradient comes in fp32; that of the probabilities is made in fp32.
    options = {"placement": ProbPlacement.FC1_INPUT, "probs": "bf16", "out_dtype": "fp32"}
    problem = replace(_in(CASES["bf16"], "bf16"), **SHAPE, **options)
    inputs = make_inputs(problem, 300, distribution="zipf", device="cuda")
    passes.forget()
    expected = run(problem, inputs, "fused")

    for _ in range(4):
        for quantity, value in run(problem, inputs, "fused").items():
            assert_bitwise_equal(value, expected[quantity], quantity)
    assert [k for k in passes.passes() if not isinstance(k, Pass)] == []


@pytest.mark.usefixtures("unpoisoned_memory")
@pytest.mark.parametrize("backend", ["fused", "grouped"])
@pytest.mark.parametrize("placement", ProbPlacement)
def test_a_recomputed_projection_has_the_same_bits(placement: ProbPlacement, backend: str) -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), placement=placement, **SHAPE)
    inputs = make_inputs(problem, 300, distribution="dropped", device="cuda")
    expected = run(problem, inputs, backend)

    for _ in range(4):
        found = run_function(problem, inputs, partial(experts, backend=backend, recompute=True))
        for quantity, value in found.items():
            assert_bitwise_equal(value, expected[quantity], quantity)


@pytest.mark.usefixtures("unpoisoned_memory")
@pytest.mark.parametrize("backend", ["fused", "grouped"])
@pytest.mark.parametrize("placement", ProbPlacement)
def test_gradients_around_a_norm_repeat_and_are_those_of_a_recomputed_pass(
    placement: ProbPlacement, backend: str
) -> None:
    whole = replace(CASES["gpt-oss-whole"], norm_eps=1e-5, placement=placement, **SHAPE)
    problem = _in(whole, "bf16")
    inputs = make_inputs(problem, 300, distribution="dropped", device="cuda")
    expected = run(problem, inputs, "fused")
    assert "d_norm_scale" in expected

    for recompute in (False, True):
        layer = partial(experts, backend=backend, recompute=recompute)
        for _ in range(4):
            for quantity, value in run_function(problem, inputs, layer).items():
                assert_bitwise_equal(value, expected[quantity], quantity)


@pytest.mark.usefixtures("unpoisoned_memory")
def test_backward_again_where_the_graph_is_kept() -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), **SHAPE)
    inputs = make_inputs(problem, 300, device="cuda")
    x = inputs.x.requires_grad_()
    for _ in range(3):
        out = experts(x, inputs.routing, inputs.weights, problem.activation, backend="fused")
        node = out.grad_fn
        assert node is not None
        z = node.saved_tensors[-1]
        kept = [torch.autograd.grad(out, x, inputs.dout, retain_graph=True)[0] for _ in range(2)]
        assert z.untyped_storage().nbytes() > 0
        (last,) = torch.autograd.grad(out, x, inputs.dout)

        # Read for the last time: given back, whoever holds it.
        assert z.untyped_storage().nbytes() == 0
        assert_bitwise_equal(kept[1], kept[0], "second")
        assert_bitwise_equal(last, kept[0], "last")


def test_a_training_forward_has_the_bits_of_inference() -> None:
    for name in ("bf16-gpt-oss", "gpt-oss-whole", "bf16"):
        problem = replace(_in(CASES[name], "bf16"), **SHAPE)
        for tokens in (1, 17, 300, 3000):
            inputs = make_inputs(problem, tokens, device="cuda")

            trained = run(problem, inputs, "fused")["out"]
            served = run(replace(problem, grad=False), inputs, "fused")["out"]

            assert_bitwise_equal(trained, served, f"{name} {tokens}")


def _rows(inputs: Inputs, index: Tensor) -> Inputs:
    routing = inputs.routing
    picked = Routing(routing.topk_ids[index], routing.topk_probs[index], routing.num_experts)
    return replace(inputs, x=inputs.x[index], routing=picked, dout=inputs.dout[index])


@pytest.mark.parametrize("placement", ProbPlacement)
def test_token_gradients_do_not_depend_on_the_batch(placement: ProbPlacement) -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), placement=placement, **SHAPE)
    whole = make_inputs(problem, 4096, device="cuda")
    expected = run(problem, whole, "fused")

    for tokens in (1, 2, 7, 16, 17, 63, 64, 65, 128, 257, 1024):
        for start in (0, 4096 - tokens):
            span = torch.arange(start, start + tokens, device="cuda")
            part = run(problem, _rows(whole, span), "fused")
            for name in ("out", "d_x", "d_topk_probs"):
                assert_bitwise_equal(part[name], expected[name][span], f"{name} {tokens} {start}")


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_poisoned_expert_stays_alone(poison: float) -> None:
    problem = replace(_in(CASES["biases"], "bf16"), H=256, F=128, E=4, K=1)
    inputs = make_inputs(problem, 300, device="cuda")
    expected = run(problem, inputs, "fused")
    hit = (inputs.routing.topk_ids == 1).any(1)
    x, dout = inputs.x.clone(), inputs.dout.clone()
    x[hit] = poison
    dout[hit] = poison

    results = run(problem, replace(inputs, x=x, dout=dout), "fused")

    others = torch.tensor([0, 2, 3], device="cuda")
    for name, value in results.items():
        kept = ~hit if name in ("out", "d_x", "d_topk_probs") else others
        assert_bitwise_equal(value[kept], expected[name][kept], name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_tile_has_the_same_bits(dtype: str) -> None:
    from samebits.ops.hidden_gradient import tuning as hidden
    from samebits.ops.hidden_gradient.kernel import launch_hidden_gradient
    from samebits.ops.indirect_gemm import tuning as product
    from samebits.ops.indirect_gemm.kernel import launch_second_projection
    from samebits.ops.permute.kernel import launch_metadata
    from samebits.ops.weight_gradient import tuning as outer
    from samebits.ops.weight_gradient.kernel import launch_order, launch_weight_gradient

    for hidden_size, columns in ((72, 40), (2056, 136), (512, 512)):
        problem = replace(_in(CASES["gpt-oss-whole"], dtype), H=hidden_size, F=columns)
        inputs = make_inputs(problem, 150, distribution="zipf", device="cuda")
        weights, routing = inputs.weights, inputs.routing
        z = torch.randn(450, 2 * columns, device="cuda").to(inputs.x.dtype)
        expected: dict[Activation, list[torch.Tensor]] = {}
        # Of the second activation a large tile asks for z early.
        given = (problem.activation, problem.layout), (Activation(), Layout())
        runs = [(config, *one) for _, config in hidden.TABLE for one in given]
        for config, activation, layout in runs:
            for tma in (True, False):
                meta = launch_metadata(routing.topk_ids, problem.E, config.block_r)
                live = int(meta.offsets[-1])
                rows = launch_hidden_gradient(
                    inputs.dout.to(z.dtype), weights.down, z, meta.slots, meta.tiles,
                    routing.topk_probs, activation, layout, replace(config, tma=tma),
                    topk=problem.K, gather=True, want_dz=True, want_h=True, want_partial=True,
                )  # fmt: skip
                values = [value[:live] for value in rows]
                others = expected.setdefault(activation, values)
                for value, other in zip(values, others, strict=True):
                    assert_bitwise_equal(value, other, str(config))
        slot_gradients = None
        for _, config in product.INPUT_GRADIENT_TABLE:
            for tma in (True, False):
                meta = launch_metadata(routing.topk_ids, problem.E, config.block_r)
                rows = launch_second_projection(
                    z, meta.slots, meta.tiles, weights.gate_up.transpose(1, 2), None, None,
                    replace(config, tma=tma),
                )[:live]  # fmt: skip
                slot_gradients = rows if slot_gradients is None else slot_gradients
                assert_bitwise_equal(rows, slot_gradients, str(config))
        order, first = launch_order(meta.offsets), None
        a, b = z, torch.randn(450, hidden_size, device="cuda").to(z.dtype)
        for _, config in outer.TABLE:
            for tma in (True, False):
                for dw in (
                    torch.empty(problem.E, 2 * columns, hidden_size, device="cuda", dtype=z.dtype),
                    torch.empty(
                        problem.E, hidden_size, 2 * columns, device="cuda", dtype=z.dtype
                    ).transpose(1, 2),
                ):
                    tile = replace(config, tma=tma)
                    launch_weight_gradient(a, b, meta.offsets, order, dw, tile)
                    first = dw if first is None else first
                    assert_bitwise_equal(dw, first, str(config))


def test_a_step_is_captured_and_replayed_with_new_values() -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), **SHAPE)
    first, second = (make_inputs(problem, 100, seed=s, device="cuda") for s in (0, 1))
    x = first.x.clone().requires_grad_()
    probs = first.routing.topk_probs.clone().requires_grad_()
    ids = first.routing.topk_ids.clone()
    weights = first.weights.map(lambda t: t.clone().requires_grad_())
    leaves = [x, probs, *weights.named_tensors().values()]
    dout = first.dout.clone()

    def step() -> tuple[Tensor, ...]:
        out = experts(x, Routing(ids, probs), weights, problem.activation, backend="fused")
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for inputs in (second, first):
        with torch.no_grad():
            x.copy_(inputs.x)
            probs.copy_(inputs.routing.topk_probs)
            ids.copy_(inputs.routing.topk_ids)
            dout.copy_(inputs.dout)
            for name, tensor in weights.named_tensors().items():
                tensor.copy_(inputs.weights.named_tensors()[name])
        graph.replay()
        expected = run(problem, inputs, "fused")

        for value, name in zip(results, expected, strict=True):
            assert_bitwise_equal(value, expected[name], name)


def test_nothing_waits_for_the_host() -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), **SHAPE)
    inputs = make_inputs(problem, 100, device="cuda")
    run(problem, inputs, "fused")
    leaves = inputs.map(lambda t: t.clone().requires_grad_())
    tensors = list(leaves.weights.named_tensors().values())

    torch.cuda.set_sync_debug_mode("error")
    try:
        out = experts(leaves.x, leaves.routing, leaves.weights, problem.activation, backend="fused")
        torch.autograd.grad(out, [leaves.x, leaves.routing.topk_probs, *tensors], inputs.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_compiled_step_has_the_bits_of_an_eager_one() -> None:
    problem = replace(_in(CASES["gpt-oss-whole"], "bf16"), **SHAPE)

    def layer(x, ids, probs, weights):
        return experts(x, Routing(ids, probs), weights, problem.activation, backend="fused")

    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (16, 100, 33):
        inputs = make_inputs(problem, tokens, device="cuda")
        leaves = inputs.map(lambda t: t.clone().requires_grad_())
        tensors = [leaves.x, leaves.routing.topk_probs, *leaves.weights.named_tensors().values()]
        out = compiled(leaves.x, leaves.routing.topk_ids, leaves.routing.topk_probs, leaves.weights)
        grads = torch.autograd.grad(out, tensors, inputs.dout)
        expected = run(problem, inputs, "fused")

        for value, name in zip((out.detach(), *grads), expected, strict=True):
            assert_bitwise_equal(value, expected[name], name)


_PROCESS = """
import hashlib
from dataclasses import replace
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs, run
problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=True)
results = run(problem, make_inputs(problem, 500, device="cuda"), "fused")
digest = hashlib.sha256()
for name in sorted(results):
    digest.update(results[name].float().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def test_another_process_has_the_same_bits() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        for _ in range(2)
    }

    assert len(digests) == 1
