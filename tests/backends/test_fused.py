"""A forward on a GPU: the error budget of fused, and every promise of bits, of grouped too."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.backends import BACKENDS, repetition
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
BOTH = pytest.mark.parametrize("backend", ["fused", "grouped"])
# One call for each regime of tiles, and none.
CALLS = ((0, "uniform"), (3, "dropped"), (70, "zipf"), (600, "one"))
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
    # Every case meets every regime in one of its dtypes; the whole of gpt-oss in each of them.
    turn = RUNNABLE.index(name) + DTYPES.index(dtype)
    calls = CALLS if "gpt-oss" in name else (CALLS[0], CALLS[1 + turn % 3])
    for tokens, distribution in calls:
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

    results = run(problem, inputs, "fused")

    judgements = judge_all(problem, inputs, results)
    assert judgements["out"].passed, str(judgements["out"])
    assert_bitwise_equal(run(problem, inputs, "grouped")["out"], results["out"])


@pytest.mark.parametrize("experts_", [1, 3, 5, 6, 7, 33, 72, 384])
def test_expert_counts(experts_: int) -> None:
    problem = replace(CASES["bf16"], E=experts_, K=min(3, experts_), grad=False)
    inputs = make_inputs(problem, 130, distribution="dropped", device="cuda")

    results = run(problem, inputs, "fused")

    judgements = judge_all(problem, inputs, results)
    assert judgements["out"].passed, str(judgements["out"])
    assert_bitwise_equal(run(problem, inputs, "grouped")["out"], results["out"])


@BOTH
@pytest.mark.parametrize("name", ["bf16-gpt-oss", "fp16-gpt-oss", "gpt-oss-whole", "bf16"])
def test_rows_do_not_depend_on_the_batch(name: str, backend: str) -> None:
    problem = replace(CASES[name], H=256, F=128, E=8, grad=False)
    whole = make_inputs(problem, max(TOKENS), device="cuda")
    expected = run(problem, whole, backend)["out"]

    for tokens in TOKENS:
        for start in (0, max(TOKENS) - tokens):
            span = torch.arange(start, start + tokens, device="cuda")
            part = run(problem, _rows(whole, span), backend)["out"]
            assert_bitwise_equal(part, expected[span], f"T = {tokens} from {start}")


@BOTH
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_rows_do_not_depend_on_their_neighbours(poison: float, backend: str) -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    for tokens in (16, 300):
        inputs = make_inputs(problem, tokens, device="cuda")
        expected = run(problem, inputs, backend)["out"]
        x = inputs.x.clone()
        x[1::2] = poison

        out = run(problem, replace(inputs, x=x), backend)["out"]

        assert_bitwise_equal(out[::2], expected[::2])


@BOTH
def test_order_of_slots_changes_nothing(backend: str) -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    inputs = make_inputs(problem, 100, device="cuda")
    routing = inputs.routing
    order = torch.rand(100, problem.K, device="cuda").argsort(1)
    shuffled = Routing(
        routing.topk_ids.gather(1, order), routing.topk_probs.gather(1, order), routing.num_experts
    )

    out = run(problem, replace(inputs, routing=shuffled), backend)["out"]

    assert_bitwise_equal(out, run(problem, inputs, backend)["out"])


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


@BOTH
def test_graph_replay_sees_new_tokens_routing_and_weights(backend: str) -> None:
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False)
    for tokens in (4, 200):
        inputs = make_inputs(problem, tokens, device="cuda")
        _call(problem, inputs, backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _call(problem, inputs, backend)
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


def _call(
    problem: Problem, inputs: Inputs, backend: str = "fused", out: Tensor | None = None
) -> Tensor:
    with torch.no_grad():
        return experts(
            inputs.x,
            inputs.routing,
            inputs.weights,
            problem.activation,
            placement=problem.placement,
            backend=backend,
            out=out,
        )


@BOTH
@pytest.mark.parametrize("placement", ProbPlacement)
def test_no_host_synchronisation(placement: ProbPlacement, backend: str) -> None:
    problem = replace(CASES["bf16-gpt-oss"], grad=False, placement=placement)
    for tokens in (100, 600):
        inputs = make_inputs(problem, tokens, device="cuda")
        _call(problem, inputs, backend)

        torch.cuda.set_sync_debug_mode("error")
        try:
            _call(problem, inputs, backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@BOTH
@pytest.mark.parametrize("placement", ProbPlacement)
def test_a_call_that_is_repeated_has_the_bits_of_the_first(
    placement: ProbPlacement, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests fill the memory that a call takes: here that is no operation of the call.
    monkeypatch.setattr(repetition, "ALLOCATIONS", repetition.ALLOCATIONS | {"fill_"})
    problem = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=8, grad=False, placement=placement)
    for tokens in (1, 16, repetition.MOST_TOKENS):
        first, other = (make_inputs(problem, tokens, seed=s, device="cuda") for s in (0, 1))
        repetition.forget()
        expected = [_call(problem, inputs, backend) for inputs in (first,)]
        repetition.forget()
        expected += [_call(problem, other, backend)]

        # The second call of a kind repeats the launches of the first, on other addresses.
        results = [_call(problem, inputs, backend) for inputs in (first, other)]
        given = torch.empty_like(results[0])
        _call(problem, first, backend, out=given)
        given.fill_(float("nan"))
        assert _call(problem, first, backend, out=given) is given

        for result, value in zip((*results, given), (*expected, expected[0]), strict=True):
            assert_bitwise_equal(result, value)
        # On the rows' way to FC2_INPUT the grouped backend fetches probabilities with torch.
        fetched = backend == "grouped" and placement == ProbPlacement.FC2_INPUT
        assert [plan is None for plan in repetition.plans()] == [fetched] * 2


def test_a_first_call_inside_a_graph_needs_a_warmup() -> None:
    program = (
        "import sys, torch, samebits;"
        "from samebits.testing.inputs import make_inputs, run;"
        "p = samebits.Problem(H=208, F=112, E=6, K=2, dtype='bf16');"
        "i = make_inputs(p, 4, device='cuda');"
        "sys.argv[1] == 'warm' and samebits.warmup(p, tokens=[4]);"
        "torch.cuda.synchronize(); g = torch.cuda.CUDAGraph();"
        "c = torch.cuda.graph(g); c.__enter__();"
        "o = samebits.experts(i.x, i.routing, i.weights, backend='fused'); c.__exit__(*[None] * 3);"
        "g.replay(); w = o.clone();"
        "assert torch.equal(w, run(p, i, 'fused')['out']); print('captured')"
    )
    warm, cold = (
        subprocess.run(
            [sys.executable, "-c", program, how], capture_output=True, text=True, check=False
        )
        for how in ("warm", "cold")
    )

    assert warm.stdout.strip() == "captured", warm.stderr
    # A driver that loads modules while capturing needs no warmup; one that does not is named.
    assert "captured" in cold.stdout or "hint: call samebits.warmup(" in cold.stderr, cold.stderr


@BOTH
def test_compiled_has_the_bits_of_eager_and_does_not_recompile(backend: str) -> None:
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
            backend=backend,
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

        assert_bitwise_equal(out, _call(problem, inputs, backend))
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


@BOTH
def test_more_than_2_31_elements(backend: str) -> None:
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
        x, Routing(ids, probs), ExpertWeights(gate_up=gate_up, down=down), backend=backend
    )

    expected = experts(x, Routing(torch.zeros_like(ids), probs), last, backend="fused")
    assert_bitwise_equal(out, expected)
