"""Routing rules, replay, and the permutation of slots."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits import Permutation, Routing, RoutingRule
from samebits.rule import SCORES, Score, probabilities, score
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = pytest.mark.reference

RULES = [
    RoutingRule(topk=3),
    RoutingRule(topk=3, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5),
    RoutingRule(topk=3, score="sigmoid", groups=4, topk_groups=2, renormalize=True),
    RoutingRule(topk=3, score="sqrt_softplus", softcap=2.0, scaling_factor=1.5),
    RoutingRule(topk=3, topk_first=True),
    RoutingRule(topk=3, topk_first=True, score="sigmoid", softcap=30.0),
    RoutingRule(topk=3, groups=4, topk_groups=3, group_topk=1),
]
EXPERTS = 8


def _logits(tokens: int = 19, dtype: torch.dtype = torch.float32, experts: int = EXPERTS) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return (torch.randn(tokens, experts, generator=generator) * 3).to(dtype)


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_key_round_trip(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 4))
    first = groups == 1 and data.draw(st.booleans())
    renormalize = data.draw(st.booleans())
    rule = RoutingRule(
        topk=data.draw(st.integers(1, 9)),
        score=data.draw(st.sampled_from(SCORES)),
        softcap=data.draw(st.none() | st.floats(0.1, 100)),
        topk_first=first,
        groups=groups,
        topk_groups=data.draw(st.integers(1, groups)),
        group_topk=data.draw(st.integers(1, 3)) if groups > 1 else 2,
        renormalize=renormalize,
        renormalize_eps=data.draw(st.floats(0, 1)) if renormalize else 0.0,
        scaling_factor=data.draw(st.floats(0.1, 10)),
    )

    assert RoutingRule.parse(rule.key) == rule
    assert RoutingRule.parse(rule.key).key == rule.key


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"topk": 0}, ValueError, "topk must be >= 1, got 0"),
    ({"topk": True}, TypeError, "topk must be an int, got True"),
    ({"score": "tanh"}, ValueError, "unknown score 'tanh'; expected one of 'sigmoid', 'softmax'"),
    ({"topk_groups": 2}, ValueError, "topk_groups must be <= groups = 1, got 2"),
    ({"topk_first": True, "groups": 2}, ValueError, "groups must be 1 with topk_first, got 2"),
    (
        {"group_topk": 1},
        ValueError,
        "group_topk must be 2 without groups, which alone use it, got 1",
    ),
    ({"renormalize_eps": 1e-20}, ValueError, "renormalize_eps must be 0 without renormalize"),
    (
        {"renormalize": True, "renormalize_eps": -1.0},
        ValueError,
        "renormalize_eps must be finite and >= 0",
    ),
    ({"scaling_factor": 0.0}, ValueError, "scaling_factor must be finite and > 0, got 0.0"),
    (
        {"scaling_factor": float("nan")},
        ValueError,
        "scaling_factor must be finite and > 0, got nan",
    ),
    (
        {"scaling_factor": torch.tensor(2.0)},
        TypeError,
        "scaling_factor must be a plain Python number",
    ),
    ({"softcap": 0.0}, ValueError, "softcap must be finite and > 0, got 0.0"),
    ({"renormalize": 1}, TypeError, "renormalize must be a bool, got 1"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_a_rule_out_of_range_or_without_effect_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        RoutingRule(**({"topk": 2} | options))


@pytest.mark.parametrize("key", ["score=softmax", "topk=2,speed=3"])
def test_a_key_of_the_wrong_form_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"key must hold topk|unknown routing option 'speed'"):
        RoutingRule.parse(key)


@pytest.mark.parametrize(
    ("rule", "experts", "message"),
    [
        (RoutingRule(topk=9), 8, "topk must be <= 8, the experts to choose from, got 9"),
        (
            RoutingRule(topk=5, groups=4, topk_groups=2),
            8,
            "topk must be <= 4, the experts to choose from",
        ),
        (RoutingRule(topk=2, groups=3), 8, "groups must divide N = 8, got 3"),
        (RoutingRule(topk=1, groups=8), 8, "group_topk must be <= experts per group = 1, got 2"),
    ],
)
def test_a_rule_that_asks_for_too_much_is_refused(
    rule: RoutingRule, experts: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Routing.from_logits(torch.randn(4, experts), rule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection_bias": torch.zeros(3)}, "selection_bias must have shape (8,), got (3,)"),
        (
            {"topk_ids": torch.zeros(19, 2, dtype=torch.int64)},
            "topk_ids must have shape (T, K) = (19, 3)",
        ),
        (
            {"topk_ids": torch.zeros(19, 3, dtype=torch.int64), "selection_bias": torch.zeros(8)},
            "selection_bias must be None with topk_ids, got a tensor",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Routing.from_logits(_logits(), RULES[0], **options)


def _decide(logits: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """The rule for one token, once more, in plain Python."""
    if rule.softcap is not None:
        logits = [rule.softcap * math.tanh(v / rule.softcap) for v in logits]

    def score(values: list[float]) -> list[float]:
        if rule.score == "softmax":
            total = sum(math.exp(v) for v in values)
            return [math.exp(v) / total for v in values]
        if rule.score == "sigmoid":
            return [1 / (1 + math.exp(-v)) for v in values]
        return [math.sqrt(math.log1p(math.exp(v))) for v in values]

    scores = logits if rule.topk_first else score(logits)
    allowed = set(range(len(logits)))
    if rule.groups > 1:
        size = len(logits) // rule.groups
        groups = [range(g * size, (g + 1) * size) for g in range(rule.groups)]
        rank = [
            sum(sorted((scores[e] for e in g), reverse=True)[: rule.group_topk]) for g in groups
        ]
        best = sorted(range(rule.groups), key=lambda g: (-rank[g], g))[: rule.topk_groups]
        allowed = {e for g in best for e in groups[g]}
    ids = sorted(allowed, key=lambda e: (-scores[e], e))[: rule.topk]
    probs = [scores[e] for e in ids]
    if rule.topk_first:
        probs = score(probs)
    if rule.renormalize:
        probs = [p / (sum(probs) + rule.renormalize_eps) for p in probs]
    return ids, [p * rule.scaling_factor for p in probs]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ids_and_probabilities_equal_the_rule_token_by_token(rule: RoutingRule) -> None:
    logits = _logits(dtype=torch.float64)
    expected = [_decide(row, rule) for row in logits.tolist()]

    routing = Routing.from_logits(logits, rule)

    assert routing.topk_ids.tolist() == [ids for ids, _ in expected]
    probs = torch.tensor([probs for _, probs in expected], dtype=torch.float64)
    assert_within_budget(routing.topk_probs, probs, probs, torch.float64)


def test_softmax_before_and_after_the_choice_are_different_rules() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)

    before, after, again = (
        Routing.from_logits(logits, rule).topk_probs
        for rule in (
            RoutingRule(topk=2),
            RoutingRule(topk=2, topk_first=True),
            RoutingRule(topk=2, renormalize=True),
        )
    )

    assert [f"{p:.3f}" for p in before[0].tolist()] == ["0.665", "0.245"]
    assert [f"{p:.3f}" for p in after[0].tolist()] == ["0.731", "0.269"]
    assert_within_budget(again, after, after, torch.float64)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ties_go_to_the_lowest_id(rule: RoutingRule) -> None:
    assert Routing.from_logits(torch.zeros(2, EXPERTS), rule).topk_ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_selection_bias_moves_the_choice_and_never_the_probability(rule: RoutingRule) -> None:
    logits = _logits()
    bias = torch.zeros(EXPERTS)
    bias[5] = 100.0

    routing = Routing.from_logits(logits, rule, selection_bias=bias)

    assert (routing.topk_ids[:, 0] == 5).all()
    replayed = Routing.from_logits(logits, rule, topk_ids=routing.topk_ids)
    assert_bitwise_equal(routing.topk_probs, replayed.topk_probs)
    assert routing.topk_probs.max() <= rule.scaling_factor * max(10.0, float(logits.max()))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("experts", [8, 36, 68])
def test_a_row_has_the_same_bits_alone_and_among_others(
    rule: RoutingRule, dtype: torch.dtype, experts: int
) -> None:
    logits = _logits(257, dtype, experts)
    whole = Routing.from_logits(logits, rule)

    for tokens in (1, 2, 7, 16, 17, 63, 64, 65, 128):
        for start in (0, 100):
            part = Routing.from_logits(logits[start : start + tokens].clone(), rule)
            span = slice(start, start + tokens)
            assert_bitwise_equal(part.topk_ids, whole.topk_ids[span])
            assert_bitwise_equal(part.topk_probs, whole.topk_probs[span])


@pytest.mark.parametrize("kind", SCORES)
def test_scores_and_their_slopes_are_right_far_out(kind: Score) -> None:
    logits = torch.tensor([[-800.0, -95.0, -20.0, -1.0, 0.0, 1.0, 20.0, 95.0]], dtype=torch.float64)
    narrow = logits.float().requires_grad_()
    scores = score(narrow, kind)
    torch_scores = {
        "softmax": lambda v: torch.softmax(v, -1),
        "sigmoid": torch.sigmoid,
        "sqrt_softplus": lambda v: torch.nn.functional.softplus(v).sqrt(),
    }[kind]

    exact, plain = torch_scores(logits), torch_scores(logits.float())
    assert_within_budget(scores.detach(), plain, exact, torch.float32)
    (slopes,) = torch.autograd.grad(scores.sum(), narrow)
    assert slopes.isfinite().all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_nan_stays_in_its_row(rule: RoutingRule) -> None:
    logits = _logits()
    clean = Routing.from_logits(logits, rule)
    logits[3] = float("nan")

    routing = Routing.from_logits(logits, rule)

    others = torch.arange(len(logits)) != 3
    assert_bitwise_equal(routing.topk_ids[others], clean.topk_ids[others])
    assert_bitwise_equal(routing.topk_probs[others], clean.topk_probs[others])
    assert routing.topk_probs[3].isnan().all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradient_of_the_logits_is_autograds(rule: RoutingRule) -> None:
    logits = _logits().requires_grad_()
    routing = Routing.from_logits(logits, rule)
    flow = torch.randn(routing.topk_probs.shape, generator=torch.Generator().manual_seed(1))

    (grad,) = torch.autograd.grad(routing.topk_probs, logits, flow)

    plain = probabilities(logits, routing.topk_ids, rule)
    assert_bitwise_equal(grad, torch.autograd.grad(plain, logits, flow)[0])
    assert (grad != 0).any()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_replay_of_a_choice_has_the_bits_and_gradients_of_choosing(rule: RoutingRule) -> None:
    logits = _logits().requires_grad_()
    chosen = Routing.from_logits(logits, rule)

    replayed = Routing.from_logits(logits, rule, topk_ids=chosen.topk_ids.int())

    assert replayed.topk_ids.dtype == torch.int32
    assert_bitwise_equal(replayed.topk_probs, chosen.topk_probs)
    grads = [
        torch.autograd.grad(r.topk_probs.square().sum(), logits)[0] for r in (chosen, replayed)
    ]
    assert_bitwise_equal(*grads)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dropped_slots_of_a_replay_take_no_part(rule: RoutingRule) -> None:
    logits = _logits(dtype=torch.float64).requires_grad_()
    ids = Routing.from_logits(logits, rule).topk_ids.clone()
    ids[4, 1], ids[5] = -1, EXPERTS

    probs = Routing.from_logits(logits, rule, topk_ids=ids).topk_probs

    assert probs[4, 1] == 0
    assert probs[5].tolist() == [0.0] * 3
    kept = replace(rule, topk=2)
    expected = Routing.from_logits(logits[4:5], kept, topk_ids=ids[4:5, ::2]).topk_probs
    assert_bitwise_equal(probs[4:5, ::2].contiguous(), expected)
    (grad,) = torch.autograd.grad(probs.square().sum(), logits)
    assert grad.isfinite().all()
    assert (grad[5] == 0).all()


def test_no_tokens() -> None:
    logits = torch.zeros(0, EXPERTS, requires_grad=True)

    routing = Routing.from_logits(logits, RULES[2])

    assert routing.topk_ids.shape == routing.topk_probs.shape == (0, 3)
    assert torch.autograd.grad(routing.topk_probs.sum(), logits)[0].shape == (0, EXPERTS)


@pytest.mark.parametrize(
    ("ids", "probs", "error", "message"),
    [
        ([1], torch.ones(1, 1), TypeError, "topk_ids must be a tensor, got list"),
        (
            torch.ones(3, dtype=torch.int64),
            torch.ones(3),
            ValueError,
            "topk_ids must have shape (T, K), got",
        ),
        (
            torch.ones(3, 2),
            torch.ones(3, 2),
            TypeError,
            "topk_ids must be int32 or int64, got torch.float32",
        ),
        (
            torch.ones(3, 2, dtype=torch.int32),
            torch.ones(3, 2, dtype=torch.int64),
            TypeError,
            "topk_probs must be a float tensor, got torch.int64",
        ),
        (
            torch.ones(3, 2, dtype=torch.int32),
            torch.ones(2, 3),
            ValueError,
            "topk_probs must have the shape of topk_ids (3, 2), got (2, 3)",
        ),
        (
            torch.ones(3, 2, dtype=torch.int32),
            torch.ones(3, 2, device="meta"),
            ValueError,
            "topk_probs must be on the device of topk_ids (cpu), got meta",
        ),
    ],
)
def test_a_routing_that_cannot_be_is_refused(
    ids: Any, probs: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Routing(ids, probs)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int, int, int | None]:
    """Ids (beyond any range), experts held here, the first of them, and a count of tokens."""
    tokens, topk, local = (draw(st.integers(low, high)) for low, high in ((0, 9), (1, 4), (1, 7)))
    start = draw(st.integers(0, 4))
    wild = st.sampled_from([-(2**40), -1, start + local, 2**32 + start])
    held = st.integers(0, start + local)
    flat = draw(st.lists(wild | held, min_size=tokens * topk, max_size=tokens * topk))
    ids = torch.tensor(flat, dtype=torch.int64).reshape(tokens, topk)
    return ids, local, start, draw(st.none() | st.integers(0, tokens + 2))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(choices())
def test_permutation(choice: tuple[Tensor, int, int, int | None]) -> None:
    ids, local, start, valid = choice
    total = ids.numel()
    count = None if valid is None else torch.tensor([valid], dtype=torch.int32)
    last = total if valid is None else valid * ids.shape[1]
    kept = {
        slot: expert - start
        for slot, expert in enumerate(ids.reshape(-1).tolist())
        if 0 <= expert - start < local and slot < last
    }

    slots, offsets, inverse = Permutation.of(ids, local, expert_start=start, num_valid_tokens=count)

    order = sorted(kept, key=lambda slot: (kept[slot], slot))
    assert slots.tolist() == order + [total] * (total - len(order))
    assert offsets.tolist() == [sum(e < bound for e in kept.values()) for bound in range(local + 1)]
    rows = {slot: row for row, slot in enumerate(order)}
    assert inverse.tolist() == [rows.get(slot, total) for slot in range(total)]
    assert {t.dtype for t in (slots, offsets, inverse)} == {torch.int64}


def test_the_worked_example_of_the_module() -> None:
    slots, offsets, inverse = Permutation.of(torch.tensor([[2, 0], [0, -1], [2, 1]]), 3)

    assert slots.tolist() == [1, 2, 5, 0, 4, 6]
    assert offsets.tolist() == [0, 2, 3, 5]
    assert inverse.tolist() == [3, 0, 1, 6, 4, 2]
