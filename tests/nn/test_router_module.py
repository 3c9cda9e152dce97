"""``Router``, ``RowLinear`` and the losses: one token, one answer, whatever is around it."""

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from layers import HIDDEN, tokens
from samebits import Routing, RoutingRule
from samebits.nn import Router, RowLinear, expert_counts, load_balancing_loss, router_z_loss
from samebits.nn.linear import project
from samebits.testing.numerics import (
    assert_bitwise_equal,
    assert_within_budget,
    bitwise_equal,
)

pytestmark = pytest.mark.reference

COUNTS = (1, 2, 7, 16, 17, 63, 64, 65, 128, 257)
RULE = RoutingRule(topk=3, score="sigmoid", renormalize=True)
SHAPES = [(48, 5), (63, 7), (2048, 128), (2048, 64), (2880, 32), (4096, 1)]


def make_router(**options: Any) -> Router:
    return Router(**({"hidden_size": HIDDEN, "num_experts": 6, "rule": RULE} | options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("hidden", "columns"), SHAPES)
def test_rows_of_a_projection_and_of_its_gradient_do_not_depend_on_the_others(
    hidden: int, columns: int, dtype: torch.dtype
) -> None:
    x = torch.randn(max(COUNTS), hidden).to(dtype)
    weight, bias = torch.randn(columns, hidden).to(dtype), torch.randn(columns).to(dtype)
    flow = torch.randn(max(COUNTS), columns).to(dtype)

    def rows(start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x[start : start + count].clone().requires_grad_()
        out = project(leaf, weight, bias)
        return out.detach(), torch.autograd.grad(out, leaf, flow[start : start + count])[0]

    whole = rows(0, max(COUNTS))
    for count in COUNTS:
        for start in {0, 3, max(COUNTS) - count} & set(range(max(COUNTS) - count + 1)):
            for part, expected in zip(rows(start, count), whole, strict=True):
                assert_bitwise_equal(part, expected[start : start + count], f"{count} from {start}")


def test_a_plain_linear_layer_has_rows_that_depend_on_their_number() -> None:
    # What the test above would report if blocks were not needed.
    x, weight = torch.randn(257, 2048), torch.randn(128, 2048)
    whole = linear(x, weight)

    assert not all(bitwise_equal(linear(x[:n], weight), whole[:n]) for n in COUNTS)


def test_nan_in_one_row_stays_there() -> None:
    x, weight = torch.randn(21, 48), torch.randn(5, 48)
    clean = project(x, weight)
    x[17] = float("nan")

    out = project(x, weight)

    others = torch.arange(21) != 17
    assert_bitwise_equal(out[others], clean[others])
    assert out[17].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_row_linear_is_a_linear_layer(dtype: torch.dtype, bias: bool) -> None:
    layer = RowLinear(48, 5, bias=bias, dtype=dtype)
    x = tokens(21, dtype).requires_grad_()
    flow = torch.randn(21, 5).to(dtype)
    tensors = [x, *layer.parameters()]

    def run(dtype: torch.dtype, function: Any) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, flow.to(dtype))]

    results = run(dtype, project)
    plain, exact = run(dtype, linear), run(torch.float64, linear)
    for value, other, truth in zip(results, plain, exact, strict=True):
        assert_within_budget(value, other, truth, dtype)
    assert_bitwise_equal(layer(x).detach(), results[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.randn(3, 4), torch.randn(5, 6)),
            "x must have shape (T, H) with H = weight.shape[1] = 6",
        ),
        (
            (torch.randn(3, 6).half(), torch.randn(5, 6)),
            "weight must have the dtype of x (torch.float16)",
        ),
        (
            (torch.randn(3, 6), torch.randn(5, 6), torch.randn(5).half()),
            "bias must have the dtype of x (torch.float32), got torch.float16",
        ),
    ],
)
def test_a_projection_that_cannot_be_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        project(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_fp32_in_any_dtype_and_under_autocast(dtype: torch.dtype) -> None:
    router = make_router(bias=True, dtype=dtype)
    x = tokens(21, dtype)
    routing, logits = router(x)

    with torch.autocast("cpu", torch.bfloat16):
        cast_routing, cast_logits = router(x)

    assert logits.dtype == routing.topk_probs.dtype == torch.float32
    assert_bitwise_equal(cast_logits, logits)
    assert_bitwise_equal(cast_routing.topk_probs, routing.topk_probs)
    assert router.bias is not None
    wide = [t.detach().double() for t in (x, router.weight, router.bias)]
    plain = linear(x.float(), router.weight.float(), router.bias.float()).detach()
    assert_within_budget(logits.detach(), plain, linear(*wide), torch.float32)


def test_every_part_of_a_router_gets_its_gradient() -> None:
    router = make_router(bias=True)
    x = tokens(21).requires_grad_()

    router(x).routing.topk_probs.square().sum().backward()

    for tensor in (x, router.weight, router.bias):
        assert tensor.grad is not None
        assert (tensor.grad != 0).any()


@pytest.mark.parametrize("rule", [RULE, RoutingRule(topk=3, softcap=5.0), RoutingRule(topk=3)])
def test_a_token_is_routed_alike_alone_and_among_others(rule: RoutingRule) -> None:
    router = make_router(rule=rule, selection_bias=True)
    x = tokens(257)
    whole, logits = router(x)

    for count in COUNTS:
        routing, part = router(x[257 - count :])
        assert_bitwise_equal(part, logits[257 - count :])
        assert_bitwise_equal(routing.topk_ids, whole.topk_ids[257 - count :])
        assert_bitwise_equal(routing.topk_probs, whole.topk_probs[257 - count :])


def test_replay_computes_the_probabilities_of_a_recorded_choice() -> None:
    router = make_router(selection_bias=True)
    router.update_selection_bias(torch.tensor([9, 0, 0, 0, 0, 9]), 0.5)
    x = tokens(21)
    recorded = router(x).routing

    moved = copy.deepcopy(router)
    moved.update_selection_bias(torch.tensor([0, 9, 9, 9, 9, 0]), 10.0)

    assert not bitwise_equal(moved(x).routing.topk_ids, recorded.topk_ids)
    replayed = moved(x, recorded.topk_ids).routing
    assert_bitwise_equal(replayed.topk_ids, recorded.topk_ids)
    assert_bitwise_equal(replayed.topk_probs, recorded.topk_probs)


def test_selection_bias_moves_by_the_sign_of_the_imbalance() -> None:
    router = make_router(selection_bias=True)
    assert router.selection_bias is not None

    router.update_selection_bias(torch.tensor([7, 1, 4, 4, 2, 6]), 0.25)

    assert router.selection_bias.tolist() == [-0.25, 0.25, 0.0, 0.0, 0.25, -0.25]
    assert "selection_bias" in router.state_dict()
    assert "selection_bias" not in dict(router.named_parameters())


def test_selection_bias_balances_without_a_loss() -> None:
    router = make_router(selection_bias=True)
    x = tokens(512) + 0.5

    def spread() -> int:
        counts = expert_counts(router(x).routing.topk_ids, 6)
        router.update_selection_bias(counts, 0.01)
        return int(counts.max() - counts.min())

    before = spread()
    for _ in range(100):
        after = spread()

    assert after < before / 4


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.to("meta").to(torch.half)])
def test_selection_bias_stays_fp32_where_the_module_is_narrowed(cast: Any) -> None:
    router = make_router(selection_bias=True)
    router.update_selection_bias(torch.tensor([9, 1, 1, 1, 1, 1]), 1.0)
    assert router.selection_bias is not None
    before = router.selection_bias.clone()

    router = cast(router)

    assert router.selection_bias is not None
    assert router.weight.dtype.itemsize == 2
    assert router.selection_bias.dtype == torch.float32
    if not router.selection_bias.is_meta:
        router.update_selection_bias(torch.tensor([9, 1, 1, 1, 1, 1]), 1e-3)
        assert (router.selection_bias != before).all()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal(copier: Any) -> None:
    router = make_router(bias=True, selection_bias=True, rule=RoutingRule(topk=2, softcap=3.0))

    twin = copier(router)

    assert repr(twin) == repr(router)
    assert_bitwise_equal(twin(tokens()).logits, router(tokens()).logits)


def test_representation() -> None:
    router = make_router(bias=True, selection_bias=True)

    assert repr(router) == (
        "Router(hidden_size=48, num_experts=6, rule=(topk=3,score=sigmoid,renormalize=True), "
        "bias=True, selection_bias=True)"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "softmax"}, TypeError, "rule must be a RoutingRule, got str"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be >= 1, got 0"),
        ({"hidden_size": 3.0}, TypeError, "hidden_size must be an int, got 3.0"),
        ({"num_experts": True}, TypeError, "num_experts must be an int, got True"),
        ({"num_experts": "3"}, TypeError, "num_experts must be an int, got '3'"),
        ({"bias": 1}, TypeError, "bias must be a bool, got 1"),
        ({"selection_bias": "yes"}, TypeError, "selection_bias must be a bool, got 'yes'"),
        (
            {"rule": RoutingRule(topk=7)},
            ValueError,
            "topk must be <= 6, the experts to choose from",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_router(**options)


def test_an_update_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="selection_bias must be True in the constructor to be"):
        make_router().update_selection_bias(torch.zeros(6), 1e-3)
    with pytest.raises(ValueError, match=r"counts must have shape \(6,\), got \(5,\)"):
        make_router(selection_bias=True).update_selection_bias(torch.zeros(5), 1e-3)


@pytest.mark.parametrize(
    ("counts", "rate", "error", "message"),
    [
        (torch.zeros(6), float("nan"), ValueError, "rate must be finite and >= 0, got nan"),
        (torch.zeros(6), float("inf"), ValueError, "rate must be finite and >= 0, got inf"),
        (torch.zeros(6), -1e-3, ValueError, "rate must be finite and >= 0, got -0.001"),
        (torch.zeros(6), True, TypeError, "rate must be a plain Python number, got True"),
        (torch.zeros(6), torch.tensor(1e-3), TypeError, "rate must be a plain Python number"),
        ([1] * 6, 1e-3, TypeError, "counts must be a Tensor, got list"),
        (torch.full((6,), float("nan")), 1e-3, ValueError, r"counts must be finite, got \[nan"),
    ],
)
def test_an_update_by_no_number_leaves_the_bias_alone(
    counts: Any, rate: Any, error: type[Exception], message: str
) -> None:
    router = make_router(selection_bias=True)

    with pytest.raises(error, match=message):
        router.update_selection_bias(counts, rate)

    assert router.selection_bias is not None
    assert (router.selection_bias == 0).all()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (3, "x must be a float tensor, got int"),
        (None, "x must be a float tensor, got NoneType"),
        (torch.ones(2, 48, dtype=torch.int32), "x must be a float tensor, got torch.int32"),
    ],
)
def test_tokens_are_floats(x: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_router()(x)
    with pytest.raises(TypeError, match=message.replace("x must", "input must")):
        RowLinear(48, 3)(x)


@pytest.mark.parametrize(
    "rule", [RoutingRule(topk=1, renormalize=True), RoutingRule(topk=1, topk_first=True)]
)
def test_one_expert_with_a_constant_probability_warns(rule: RoutingRule) -> None:
    with pytest.warns(UserWarning, match="router gets no gradient from the output"):
        router = make_router(rule=rule)

    probs = router(tokens()).routing.topk_probs
    assert (probs == 1).all()
    (grad,) = torch.autograd.grad(probs.square().sum(), router.weight)
    assert grad.abs().max() <= 4 * torch.finfo(torch.float32).eps


def test_counts_of_experts() -> None:
    ids = torch.tensor([[0, 3], [3, -1], [4, 1], [2**32 + 3, -(2**40)]])

    assert expert_counts(ids, 4).tolist() == [1, 1, 0, 2]
    assert expert_counts(ids[:3].int(), 5).tolist() == [1, 1, 0, 2, 1]
    assert expert_counts(ids[:0], 3).tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match="topk_ids must be int32 or int64, got "):
        expert_counts(ids.float(), 4)


def test_balancing_loss_is_one_at_balance_and_n_at_collapse() -> None:
    shares = torch.full((8, 4), 0.25)
    collapsed = torch.zeros(8, 4)
    collapsed[:, 2] = 1.0

    assert load_balancing_loss(shares, torch.tensor([2, 2, 2, 2])) == 1.0
    assert load_balancing_loss(shares, torch.tensor([6, 6, 6, 6])) == 1.0
    assert load_balancing_loss(collapsed, torch.tensor([0, 0, 8, 0])) == 4.0


def test_balancing_loss_by_hand_and_its_gradient() -> None:
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, 0.0]], requires_grad=True)
    counts = torch.tensor([2, 1, 1])

    loss = load_balancing_loss(shares, counts)

    # 3 · (2/4 · 0.625 + 1/4 · 0.25 + 1/4 · 0.125)
    assert loss == 1.21875
    (grad,) = torch.autograd.grad(loss, shares)
    assert grad.tolist() == [[0.75, 0.375, 0.375]] * 2


def test_z_loss_by_hand() -> None:
    logits = torch.log(torch.tensor([[1.0, 2.0, 1.0], [0.5, 0.25, 0.25]], dtype=torch.float64))
    exact = torch.tensor([math.log(4.0) ** 2 / 2], dtype=torch.float64)

    assert_within_budget(router_z_loss(logits)[None], exact, exact, torch.float64)


@pytest.mark.parametrize(
    "loss", [router_z_loss, lambda s, v=None: load_balancing_loss(s, torch.ones(3), v)]
)
def test_losses_of_padded_tokens_are_those_of_the_others(loss: Any) -> None:
    values = torch.rand(4, 3).double()
    padded = torch.cat([values, torch.full((2, 3), float("nan")).double()]).requires_grad_()

    masked = loss(padded, torch.arange(6) < 4)

    exact = loss(values)[None]
    assert_within_budget(masked.detach()[None], exact, exact, torch.float64)
    assert loss(values[:0]) == 0
    assert loss(padded, torch.zeros(6, dtype=torch.bool)) == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_shares_add_up_to_one(score: Any) -> None:
    router = make_router(rule=RoutingRule(topk=2, score=score, softcap=4.0, scaling_factor=2.5))
    logits = router(tokens()).logits.double()

    shares = router.shares(logits)

    ones = torch.ones(len(logits), dtype=torch.float64)
    assert_within_budget(shares.sum(-1).detach(), ones, ones, torch.float64)
    chosen = Routing.from_logits(logits, RoutingRule(topk=6, score=score, softcap=4.0))
    assert (shares.gather(1, chosen.topk_ids).diff() <= 0).all()
