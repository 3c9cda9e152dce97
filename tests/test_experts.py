"""The expert layer as a function: what it refuses, with the reason, and edges of what it takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from samebits.errors import UnsupportedError
from samebits.experts import experts, grouped_experts
from samebits.problem import DTYPES, ProbPlacement
from samebits.routing import Permutation, Routing, RoutingRule
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, judge_all, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal, judge, relative_error
from samebits.weights import Layout, split_gate_up

pytestmark = pytest.mark.reference

TOKENS = 5


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(CASES["gpt-oss-whole"], TOKENS)


def _call(inputs: Inputs, x: Tensor, **options: Any) -> Tensor:
    return experts(x, inputs.routing, inputs.weights, **options)


@pytest.mark.parametrize("placement", list(ProbPlacement))
@pytest.mark.parametrize("kinds", [("fp32", "fp32"), ("fp32", "fp64"), ("fp64", "fp32")])
def test_fp64_with_narrower_biases_computes_in_fp64(
    placement: ProbPlacement, kinds: tuple[str, str]
) -> None:
    problem = replace(
        CASES["fp64-gpt-oss"], placement=placement, gate_up_bias=kinds[0], down_bias=kinds[1]
    )
    made = make_inputs(problem, 7)

    judgements = judge_all(problem, made, run(problem, made, "grouped"))

    assert {name: str(j) for name, j in judgements.items() if not j.passed} == {}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
def test_autocast_takes_float_tokens_only(inputs: Inputs, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"x must .* dtype"):
        _call(inputs, inputs.x.to(dtype))


def test_autocast_leaves_fp64_parameters_alone(inputs: Inputs) -> None:
    weights = inputs.weights.map(torch.Tensor.double)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="x must have the"):
        experts(inputs.x, inputs.routing, weights)


@pytest.mark.parametrize("value", [3.0, True, "3", torch.tensor(3)])
def test_expert_numbers_are_ints(inputs: Inputs, value: object) -> None:
    routing = inputs.routing
    with pytest.raises(TypeError, match="num_experts must be an int"):
        Routing(routing.topk_ids, routing.topk_probs, value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expert_start must be an int"):
        _call(inputs, inputs.x, expert_start=value)


@pytest.mark.parametrize("count", [-1, -2, -TOKENS, -TOKENS - 1])
def test_a_negative_token_count_reads_nothing(inputs: Inputs, count: int) -> None:
    ids = torch.full_like(inputs.routing.topk_ids, 1000)
    routing = Routing(ids, inputs.routing.topk_probs)
    number = torch.tensor([count], dtype=torch.int32)

    out = experts(inputs.x, routing, inputs.weights, num_valid_tokens=number)

    assert_bitwise_equal(out, torch.zeros_like(inputs.x))


def _offsets(inputs: Inputs, first: int, *rest: int) -> Tensor:
    """Return offsets that begin with the numbers given and repeat the last one."""
    given = [first, *rest]
    missing = inputs.weights.down.shape[0] + 1 - len(given)
    return torch.tensor(given + [given[-1]] * missing)


@pytest.mark.parametrize(
    "values", [(2, 3), (-1, 3), (0, 4, 3), (0, TOKENS + 1)], ids=["start", "sign", "order", "end"]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_that_are_no_offsets_are_refused(
    inputs: Inputs, values: tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match="offsets must ascend from 0"):
        grouped_experts(inputs.x, _offsets(inputs, *values).to(dtype), inputs.weights)


@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_offsets_that_are_no_offsets_are_refused_in_one_graph_too(
    inputs: Inputs, backend: str
) -> None:
    compiled = torch.compile(
        lambda offsets: grouped_experts(inputs.x, offsets, inputs.weights, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )

    for values in ((2, 3), (0, -1, 3), (0, 4, 3), (0, TOKENS + 1)):
        with pytest.raises(ValueError, match="offsets must ascend from 0"):
            compiled(_offsets(inputs, *values))


@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_rows_sorted_by_their_caller_have_the_bits_of_experts(
    inputs: Inputs, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = _offsets(inputs, 0, 2, 2, TOKENS - 1)
    ids = torch.searchsorted(offsets[1:], torch.arange(TOKENS), right=True)[:, None]
    probs = inputs.routing.topk_probs[:, :1]
    expected = experts(inputs.x, Routing(ids, probs), inputs.weights, backend=backend)
    if backend == "grouped":
        monkeypatch.setattr(Permutation, "of", None)

    out = grouped_experts(inputs.x, offsets, inputs.weights, row_probs=probs[:, 0], backend=backend)

    assert_bitwise_equal(out, expected)


def test_sorted_rows_need_no_values_where_tensors_are_fake(inputs: Inputs) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rows, offsets = map(mode.from_tensor, (inputs.x, _offsets(inputs, 0, TOKENS)))

        out = grouped_experts(rows, offsets, inputs.weights)

    assert out.shape == inputs.x.shape
    assert out.dtype == inputs.x.dtype


def test_grouped_experts_says_what_has_the_wrong_type_or_device(inputs: Inputs) -> None:
    offsets = _offsets(inputs, 0, TOKENS)
    arguments = {"rows": inputs.x, "offsets": offsets, "weights": inputs.weights}
    for name in arguments:
        with pytest.raises(TypeError, match=f"{name} must be a"):
            grouped_experts(**{**arguments, name: [1.0]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="row_probs must be a Tensor"):
        grouped_experts(**arguments, row_probs=[1.0] * TOKENS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offsets must be on the device of rows"):
        grouped_experts(inputs.x, offsets.to("meta"), inputs.weights)
    probs = torch.ones(TOKENS, device="meta")
    with pytest.raises(ValueError, match="row_probs must be on the device of rows"):
        grouped_experts(inputs.x, offsets, inputs.weights, row_probs=probs)


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_forward_mode_is_refused_not_cut(inputs: Inputs, backend: str) -> None:
    def layer(x: Tensor) -> Tensor:
        return _call(inputs, x, backend=backend)

    with pytest.raises(UnsupportedError, match="no forward-mode derivatives"):
        torch.func.jvp(layer, (inputs.x,), (inputs.x,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(UnsupportedError, match="no forward-mode derivatives"),
    ):
        layer(torch.autograd.forward_ad.make_dual(inputs.x, inputs.x))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_gradients_of_torch_func_are_refused_with_a_hint(
    inputs: Inputs, transform: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.func.*\n?hint: torch\.autograd\.grad"):
        transform(lambda x: _call(inputs, x).sum())(inputs.x)


def test_vmap_without_gradients_is_a_loop(inputs: Inputs) -> None:
    batch = torch.stack([inputs.x, inputs.x.flip(0)])

    out = torch.func.vmap(lambda x: _call(inputs, x))(batch)

    assert_bitwise_equal(out, torch.stack([_call(inputs, x) for x in batch]))


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_probs", "down", "num_valid_tokens"])
def test_inputs_changed_before_the_backward_are_noticed(inputs: Inputs, name: str) -> None:
    number = torch.tensor([TOKENS], dtype=torch.int32)
    x = inputs.x.clone()
    weights = inputs.weights.map(lambda t: t.clone().requires_grad_())
    out = experts(x, inputs.routing, weights, num_valid_tokens=number)
    changed = {
        "x": x,
        "topk_ids": inputs.routing.topk_ids,
        "topk_probs": inputs.routing.topk_probs,
        "down": weights.down,
        "num_valid_tokens": number,
    }
    with torch.no_grad():
        changed[name].zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_parts_of_weights_have_their_types(inputs: Inputs) -> None:
    weights = inputs.weights
    with pytest.raises(TypeError, match="layout must be a Layout"):
        replace(weights, layout="halves")  # type: ignore[arg-type]
    scale = weights.down.new_ones(weights.down.shape[1])
    with pytest.raises(TypeError, match="norm must be a PostExpertNorm"):
        replace(weights, norm=1e-6, norm_scale=scale)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown orientation"):
        weights.to_storage("out-in")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["halves=", "halves=,up_first", "interleave=1,", "interleave=01"])
def test_a_layout_key_has_one_spelling(key: str) -> None:
    with pytest.raises(ValueError, match="layout key must look like"):
        Layout.parse(key)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_an_odd_size_has_no_gate_and_up(size: int) -> None:
    with pytest.raises(ValueError, match="z must have 2F entries"):
        split_gate_up(torch.zeros(3, size), Layout())


def test_a_routing_is_made_of_tensors_of_one_device() -> None:
    logits, rule = torch.zeros(3, 4), RoutingRule(topk=2)
    bias = torch.zeros(4, device="meta")
    ids = torch.zeros(3, 2, dtype=torch.int64, device="meta")

    with pytest.raises(ValueError, match="selection_bias must be on the device of logits"):
        Routing.from_logits(logits, rule, selection_bias=bias)
    with pytest.raises(ValueError, match="topk_ids must be on the device of logits"):
        Routing.from_logits(logits, rule, topk_ids=ids)
    with pytest.raises(TypeError, match="logits must be a float tensor"):
        Routing.from_logits(logits.long(), rule)
    with pytest.raises(TypeError, match="rule must be a RoutingRule"):
        Routing.from_logits(logits, None)  # type: ignore[arg-type]


def test_values_with_a_graph_can_be_judged() -> None:
    value = torch.ones(2, 3, dtype=DTYPES["fp32"], requires_grad=True)

    assert judge(value, value, value, torch.float32).passed
    assert relative_error(value, value) == 0
