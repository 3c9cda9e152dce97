"""Very few tokens on a GPU: the bits of a batch, any size; weights that move or change."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.backends import repetition
from samebits.experts import experts
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Routing
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights

pytestmark = pytest.mark.gpu

SMALL = replace(CASES["bf16-gpt-oss"], H=256, F=128, E=16, K=3, grad=False)


def _some(inputs: Inputs, span: slice) -> Inputs:
    routing = inputs.routing
    picked = Routing(routing.topk_ids[span], routing.topk_probs[span], routing.num_experts)
    return replace(inputs, x=inputs.x[span], routing=picked, dout=inputs.dout[span])


def _assert_one_is_as_many(problem: Problem, inputs: Inputs) -> None:
    expected = run(problem, inputs, "fused")["out"]
    for token in (0, 1, 5):
        out = run(problem, _some(inputs, slice(token, token + 1)), "fused")["out"]
        assert_bitwise_equal(out, expected[token : token + 1], f"{problem} token {token}")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("hidden", "placement"), [*zip([7, 12, 24, 40, 72, 2880], [*ProbPlacement] * 2, strict=True)]
)
def test_one_token_of_any_size_has_the_bits_of_a_batch(
    hidden: int, placement: ProbPlacement, dtype: str
) -> None:
    problem = replace(
        SMALL, H=hidden, F=hidden + 8,
        placement=placement, dtype=dtype, gate_up_bias=dtype, down_bias=dtype,
    )  # fmt: skip
    _assert_one_is_as_many(problem, make_inputs(problem, 40, distribution="dropped", device="cuda"))


@pytest.mark.parametrize(
    ("name", "topk"),
    [
        ("interleave-16", 1), ("interleave-16", 16), ("interleave-1-up-first", 2), ("relu2", 4),
        ("situ", 7), ("situ", 8),
    ],
)  # fmt: skip
def test_one_token_of_any_choices_has_the_bits_of_a_batch(name: str, topk: int) -> None:
    problem = replace(CASES[name], H=128, F=96, E=16, K=topk, dtype="bf16", grad=False)
    for distribution in ("uniform", "dropped", "one"):
        inputs = make_inputs(problem, 40, distribution=distribution, device="cuda")
        _assert_one_is_as_many(problem, inputs)


@pytest.mark.parametrize(
    "name", ["local-experts", "counted", "one-expert", "odd-sizes", "tiny-sizes"]
)
def test_one_token_of_any_kind_has_the_bits_of_a_batch(name: str) -> None:
    problem = replace(CASES[name], dtype="bf16", grad=False)
    _assert_one_is_as_many(problem, make_inputs(problem, 40, valid_tokens=30, device="cuda"))


@pytest.mark.parametrize("distribution", ["uniform", "dropped", "one"])
def test_as_many_as_need_no_sort_have_the_bits_of_one_token(distribution: str) -> None:
    problem = replace(SMALL, H=136, F=96, E=128, K=2, N=130, expert_start=1, counted=True)
    inputs = make_inputs(
        problem, 40, distribution=distribution, valid_tokens=7, seed=3, device="cuda"
    )
    expected = run(problem, inputs, "fused")["out"]

    # T * K = E / 8 is the limit.
    for tokens in (2, 8, 9):
        out = run(problem, _some(inputs, slice(0, tokens)), "fused")["out"]
        assert_bitwise_equal(out, expected[:tokens], f"{tokens} tokens")


@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
def test_one_token_under_load_repeats_its_bits(orientation: str) -> None:
    problem = replace(SMALL, H=1024, F=512)
    inputs = make_inputs(problem, 1, device="cuda")
    inputs = replace(inputs, weights=inputs.weights.to_storage(orientation))
    expected = run(problem, inputs, "fused")["out"]
    noise, other = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()

    for _ in range(200):
        with torch.cuda.stream(other):
            noise @ noise
        assert_bitwise_equal(run(problem, inputs, "fused")["out"], expected)


def _call(problem: Problem, inputs: Inputs, weights: ExpertWeights) -> Tensor:
    with torch.no_grad():
        return experts(
            inputs.x, inputs.routing, weights, problem.activation,
            placement=problem.placement, backend="fused",
        )  # fmt: skip


def test_one_token_through_layers_of_a_graph_sees_new_tokens_and_choices() -> None:
    problem = replace(SMALL, H=512, F=256)
    first, second = (make_inputs(problem, 1, seed=s, device="cuda") for s in range(2))

    def layers(inputs: Inputs) -> Tensor:
        x = inputs.x
        # Memory of a layer is taken again by the next.
        for _ in range(8):
            x = _call(problem, replace(inputs, x=x), inputs.weights)
            x = x / x.float().norm().to(x.dtype)
        return x

    expected = layers(second)
    layers(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(first)
    for name in ("topk_ids", "topk_probs"):
        getattr(first.routing, name).copy_(getattr(second.routing, name))
    first.x.copy_(second.x)
    for name, tensor in first.weights.named_tensors().items():
        tensor.copy_(getattr(second.weights, name))

    for _ in range(20):
        graph.replay()
        assert_bitwise_equal(out, expected)


def test_one_token_with_choices_of_any_strides_has_the_bits_of_a_batch() -> None:
    inputs = make_inputs(SMALL, 40, device="cuda")
    ids = inputs.routing.topk_ids
    wide = torch.stack([ids, torch.full_like(ids, -1)], 2)[:, :, 0]
    assert not wide.is_contiguous()
    routing = Routing(wide, inputs.routing.topk_probs, inputs.routing.num_experts)
    _assert_one_is_as_many(SMALL, replace(inputs, routing=routing))


@pytest.mark.parametrize("tokens", [1, 16])
def test_repeated_calls_see_the_weights_that_are_there(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests fill the memory that a call takes: here that is no operation of the call.
    monkeypatch.setattr(repetition, "ALLOCATIONS", repetition.ALLOCATIONS | {"fill_"})
    problem = replace(SMALL, gate_up_bias=None, down_bias=None)
    inputs = make_inputs(problem, tokens, device="cuda")
    layers = [make_inputs(problem, tokens, seed=s, device="cuda").weights for s in range(3)]
    plain = layers[0]
    expected = [run(problem, replace(inputs, weights=w), "fused")["out"] for w in layers]
    stacked = {
        name: torch.stack([getattr(w, name) for w in layers]) for name in ("gate_up", "down")
    }

    def layer(number: int, stacked: dict[str, Tensor]) -> Tensor:
        views = {name: tensor[number] for name, tensor in stacked.items()}
        return _call(problem, inputs, replace(plain, **views))

    repetition.forget()
    for number in (0, 1, 2, 0):
        assert_bitwise_equal(layer(number, stacked), expected[number])
    # A refit in place, twice.
    for _ in range(2):
        for name, tensor in stacked.items():
            tensor[0].copy_(getattr(layers[2], name))
    assert_bitwise_equal(layer(0, stacked), expected[2])
    # The same places, other matrices: stored transposed.
    memory = {n: t[1].transpose(1, 2).contiguous() for n, t in stacked.items()}
    for name, tensor in stacked.items():
        tensor.view(3, -1)[1].copy_(memory[name].view(-1))
    turned = {n: t.view(3, -1)[1].view(memory[n].shape).transpose(1, 2) for n, t in stacked.items()}
    assert_bitwise_equal(_call(problem, inputs, replace(plain, **turned)), expected[1])
    # Memory that is given back and taken again, elsewhere or not.
    kept = layers[1]
    del stacked, memory, turned
    torch.cuda.empty_cache()
    assert_bitwise_equal(_call(problem, inputs, kept), expected[1])
    moved = kept.map(torch.clone)
    assert_bitwise_equal(_call(problem, inputs, moved), expected[1])
    assert len(repetition.plans()) == 2


def test_one_token_without_waiting_for_the_host() -> None:
    inputs = make_inputs(SMALL, 1, device="cuda")
    _call(SMALL, inputs, inputs.weights)

    torch.cuda.set_sync_debug_mode("error")
    try:
        _call(SMALL, inputs, inputs.weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_token_beyond_2_31_elements() -> None:
    problem = Problem(H=4096, F=2048, E=140, K=2, dtype="bf16", N=140)
    assert problem.E * 2 * problem.F * problem.H > 2**31
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up = torch.empty(problem.E, 2 * problem.F, problem.H, **draw).normal_(0, 0.02)
    down = torch.empty(problem.E, problem.H, problem.F, **draw).normal_(0, 0.02)
    x, probs = torch.randn(1, problem.H, **draw), torch.rand(1, 2, device="cuda")
    last = torch.tensor([[problem.E - 1, problem.E - 2]], device="cuda")

    out = experts(x, Routing(last, probs), ExpertWeights(gate_up=gate_up, down=down))

    few = ExpertWeights(gate_up=gate_up[-2:].clone(), down=down[-2:].clone())
    many = Routing(torch.tensor([[1, 0]], device="cuda").expand(64, 2), probs.expand(64, 2))
    expected = experts(x.expand(64, -1), many, few)
    assert_bitwise_equal(out, expected[:1])
