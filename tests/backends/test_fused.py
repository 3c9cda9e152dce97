"""The fused backend on a GPU: the error budget, and every promise of bits of a forward."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.backends import BACKENDS
from samebits.experts import experts
from samebits.ops.indirect_gemm.tuning import TABLE
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Permutation, Routing
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, judge_all, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights

pytestmark = pytest.mark.gpu

FUSED = BACKENDS["fused"]
RUNNABLE = [
    name
    for name, problem in CASES.items()
    if FUSED.why_not(replace(problem, grad=False, device="sm_90")) is None
]
DTYPES = ("bf16", "fp16", "fp32")
TOKENS = (1, 2, 7, 16, 17, 63, 64, 65, 128, 257, 1024, 4096)


def _in(problem: Problem, dtype: str) -> Problem:
    biases = {
        name: None if getattr(problem, name) is None else dtype
        for name in ("gate_up_bias", "down_bias")
    }
    same_probs = "fp32" if problem.probs == "fp32" else dtype
    return replace(problem, dtype=dtype, probs=same_probs, grad=False, **biases)


def _rows(inputs: Inputs, index: Tensor) -> Inputs:
    routing = inputs.routing
    picked = Routing(routing.topk_ids[index], routing.topk_probs[index], routing.num_experts)
    return replace(inputs, x=inputs.x[index], routing=picked, dout=inputs.dout[index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNNABLE)
def test_output_within_budget(name: str, dtype: str) -> None:
    problem = _in(CASES[name], dtype)
    for tokens, distribution in ((0, "uniform"), (3, "dropped"), (70, "zipf"), (600, "one")):
        inputs = make_inputs(
            problem,
            tokens,
            distribution=distribution,
            device="cuda",
            valid_tokens=max(tokens - 2, 0),
        )

        judgements = judge_all(problem, inputs, run(problem, inputs, "fused"))

        assert judgements["out"].passed, (tokens, problem, str(judgements["out"]))


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [7, 12, 24, 40, 72, 2056])
def test_odd_contractions(hidden: int, dtype: str, placement: ProbPlacement) -> None:
    whole = replace(CASES["gpt-oss-whole"], H=hidden, F=hidden + 1, placement=placement)
    problem = _in(whole, dtype)
    inputs = make_inputs(problem, 33, distribution="dropped", device="cuda")

    judgements = judge_all(problem, inputs, run(problem, inputs, "fused"))

    assert judgements["out"].passed, str(judgements["out"])


@pytest.mark.parametrize("experts_", [1, 3, 5, 6, 7, 33, 72, 384])
def test_expert_counts(experts_: int) -> None:
    problem = replace(CASES["bf16"], E=experts_, K=min(3, experts_), grad=False)
    inputs = make_inputs(problem, 130, distribution="dropped", device="cuda")

    judgements = judge_all(problem, inputs, run(problem, inputs, "fused"))

    assert judgements["out"].passed, str(judgements["out"])


@pytest.mark.parametrize("name", ["bf16-gpt-oss", "fp16-gpt-oss", "gpt-oss-whole", "bf16"])
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    problem = replace(CASES[name], H=256, F=128, E=8, grad=False)
    whole = make_inputs(problem, max(TOKENS), device="cuda")
    expected = run(problem, whole, "fused")["out"]

    for tokens in TOKENS:
        for start in (0, max(TOKENS) - tokens):
            span = torch.arange(start, start + tokens, device="cuda")
            part = run(problem, _rows(whole, span), "fused")["out"]
            assert_bitwise_equal(part, expected[span], f"T = {tokens} from {start}")


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_rows_do_not_depend_on_their_neighbours(poison: float) -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    for tokens in (16, 300):
        inputs = make_inputs(problem, tokens, device="cuda")
        expected = run(problem, inputs, "fused")["out"]
        x = inputs.x.clone()
        x[1::2] = poison

        out = run(problem, replace(inputs, x=x), "fused")["out"]

        assert_bitwise_equal(out[::2], expected[::2])


def test_order_of_slots_changes_nothing() -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    inputs = make_inputs(problem, 100, device="cuda")
    routing = inputs.routing
    order = torch.rand(100, problem.K, device="cuda").argsort(1)
    shuffled = Routing(
        routing.topk_ids.gather(1, order), routing.topk_probs.gather(1, order), routing.num_experts
    )

    out = run(problem, replace(inputs, routing=shuffled), "fused")["out"]

    assert_bitwise_equal(out, run(problem, inputs, "fused")["out"])


@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_entry_of_the_table_has_the_same_bits(dtype: str, orientation: str) -> None:
    from samebits.ops.indirect_gemm.kernel import launch_first_projection, launch_second_projection
    from samebits.ops.permute.reference import tiles

    for hidden, columns in ((72, 40), (2056, 136), (512, 512)):
        problem = replace(_in(CASES["gpt-oss-whole"], dtype), H=hidden, F=columns)
        inputs = make_inputs(problem, 150, distribution="zipf", device="cuda")
        weights = inputs.weights.to_storage(orientation)
        permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
        results = []
        for entry in TABLE:
            for tma in (True, False):
                first, second = (replace(c, tma=tma) for c in (entry.first, entry.second))
                table = tiles(permutation.offsets.int(), 150 * problem.K, first.block_r)
                slots = permutation.slots.int()
                h, z = launch_first_projection(
                    inputs.x, slots, table, weights, problem.activation, None, first,
                    topk=problem.K, gather=True, save=True,
                )  # fmt: skip
                y = launch_second_projection(
                    h, slots, table, weights.down, weights.down_bias, None, second
                )
                results.append((h, z, y, (first, second)))

        for h, z, y, configs in results[1:]:
            for value, expected in zip((h, z, y), results[0], strict=False):
                assert value is not None
                assert_bitwise_equal(value, expected, f"{hidden} {columns} {configs}")


def test_graph_replay_sees_new_tokens_routing_and_weights() -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    for tokens in (4, 200):
        inputs = make_inputs(problem, tokens, device="cuda")
        run(problem, inputs, "fused")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _call(problem, inputs)
        scenarios = [make_inputs(problem, tokens, seed=s, distribution=d, device="cuda")
                     for s, d in ((1, "uniform"), (2, "one"), (3, "dropped"))]  # fmt: skip
        empty = make_inputs(problem, tokens, seed=4, device="cuda")
        empty.routing.topk_ids.fill_(-1)
        for new in (*scenarios, empty):
            inputs.x.copy_(new.x)
            inputs.routing.topk_ids.copy_(new.routing.topk_ids)
            inputs.routing.topk_probs.copy_(new.routing.topk_probs)
            for old, value in zip(
                inputs.weights.named_tensors().values(),
                new.weights.named_tensors().values(),
                strict=True,
            ):
                old.copy_(value)

            graph.replay()

            assert_bitwise_equal(out, run(problem, new, "fused")["out"])


def _call(problem: Problem, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return experts(
            inputs.x,
            inputs.routing,
            inputs.weights,
            problem.activation,
            placement=problem.placement,
            backend="fused",
        )


def test_no_host_synchronisation() -> None:
    problem = replace(CASES["bf16-gpt-oss"], grad=False)
    inputs = make_inputs(problem, 100, device="cuda")
    _call(problem, inputs)

    torch.cuda.set_sync_debug_mode("error")
    try:
        _call(problem, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_has_the_bits_of_eager_and_does_not_recompile() -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda x, ids, probs, weights: experts(
            x,
            Routing(ids, probs),
            weights,
            problem.activation,
            placement=problem.placement,
            backend="fused",
        ),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for tokens in (127, 193, 16):
        inputs = make_inputs(problem, tokens, device="cuda")
        with torch.no_grad():
            out = compiled(
                inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs, inputs.weights
            )

        assert_bitwise_equal(out, _call(problem, inputs))
    assert counter.frame_count == 1


def test_every_option_changes_the_output() -> None:
    base = replace(
        _in(CASES["gpt-oss-whole"], "bf16"),
        K=1,
        activation=Activation(alpha=1.3, limit=2.0, linear_offset=0.5),
    )
    options = base.activation
    inputs = make_inputs(base, 50, device="cuda")
    expected = run(base, inputs, "fused")["out"]
    changed = {
        "alpha": replace(base, activation=replace(options, alpha=1.4)),
        "limit": replace(base, activation=replace(options, limit=1.5)),
        "post": replace(base, activation=replace(options, limit_position="post")),
        "offset": replace(base, activation=replace(options, linear_offset=0.25)),
        "kind": replace(base, activation=replace(options, kind="gelu_tanh", alpha=1.0)),
        "fc1_input": replace(base, placement=ProbPlacement.FC1_INPUT),
        "fc2_input": replace(base, placement=ProbPlacement.FC2_INPUT),
    }
    for option, problem in changed.items():
        out = run(problem, inputs, "fused")["out"]
        assert not torch.equal(out, expected), option


def test_second_process_and_load_give_the_same_bits() -> None:
    script = (
        "import torch, hashlib;"
        "from dataclasses import replace;"
        "from samebits.testing.cases import CASES;"
        "from samebits.testing.inputs import make_inputs, run;"
        "p = replace(CASES['bf16-gpt-oss'], H=512, F=256, E=8, grad=False);"
        "o = run(p, make_inputs(p, 500, device='cuda'), 'fused')['out'];"
        "print(hashlib.sha256(o.cpu().view(torch.int16).numpy().tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    }
    assert len(digests) == 1

    problem = replace(CASES["bf16-gpt-oss"], H=512, F=256, E=8, grad=False)
    inputs = make_inputs(problem, 500, device="cuda")
    expected = run(problem, inputs, "fused")["out"]
    noise, other = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):
            noise @ noise
        assert_bitwise_equal(run(problem, inputs, "fused")["out"], expected)


def test_more_than_2_31_elements() -> None:
    problem = Problem(H=4096, F=2048, E=140, K=1, dtype="bf16", N=140)
    assert problem.E * 2 * problem.F * problem.H > 2**31
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (problem.E, 2 * problem.F, problem.H)
    gate_up = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(
        0, 0.02, generator=generator
    )
    down = torch.empty(problem.E, problem.H, problem.F, device="cuda", dtype=torch.bfloat16)
    down.normal_(0, 0.02, generator=generator)
    x = torch.randn(20, problem.H, device="cuda", generator=generator).bfloat16()
    ids = torch.full((20, 1), problem.E - 1, device="cuda")
    probs = torch.ones(20, 1, device="cuda")
    last = ExpertWeights(gate_up=gate_up[-1:].clone(), down=down[-1:].clone())

    out = experts(
        x, Routing(ids, probs), ExpertWeights(gate_up=gate_up, down=down), backend="fused"
    )

    expected = experts(x, Routing(torch.zeros_like(ids), probs), last, backend="fused")
    assert_bitwise_equal(out, expected)
