"""The noun for a call: spelling and parsing, and what bad arguments of ``experts`` get."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    Problem,
    ProbPlacement,
    Routing,
    UnsupportedError,
    experts,
    grouped_experts,
)
from samebits.backends import BACKENDS, choose, explain
from samebits.problem import DTYPES
from samebits.testing.cases import CASES

pytestmark = pytest.mark.reference

NAMES = st.sampled_from(sorted(DTYPES))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count, start, local = (draw(st.integers(low, 9)) for low in (0, 0, 1))
    dtype = draw(NAMES)
    activation = draw(
        st.sampled_from(
            [Activation(), Activation(alpha=1.702, limit=7.0), Activation(kind="relu2")]
        )
    )
    return Problem(
        H=draw(st.integers(1, 9)),
        F=draw(st.sampled_from([2, 4, 8])),
        E=local,
        K=draw(st.integers(1, 9)),
        N=start + local + count,
        expert_start=start,
        dtype=dtype,
        activation=activation,
        placement=draw(st.sampled_from(ProbPlacement)),
        layout=Layout(interleave=draw(st.sampled_from([None, 1, 2])), up_first=draw(st.booleans())),
        gate_up_bias=draw(st.none() | NAMES),
        down_bias=draw(st.none() | NAMES),
        probs=draw(NAMES),
        norm_eps=draw(st.none() | st.floats(1e-9, 1.0)),
        out_dtype=draw(st.sampled_from([None, dtype, "fp32"])),
        counted=draw(st.booleans()),
        grad=draw(st.booleans()),
        device=draw(st.sampled_from(["cpu", "sm_90"])),
    )


@settings(derandomize=True, deadline=None)
@given(problems())
def test_text_round_trip(problem: Problem) -> None:
    assert Problem.parse(str(problem)) == problem


@settings(derandomize=True, deadline=None)
@given(problems(), problems())
def test_one_problem_one_text(first: Problem, second: Problem) -> None:
    assert (first == second) == (str(first) == str(second))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"H": 0}, "H must be >= 1, got 0"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; expected one of 'bf16', 'fp16', 'fp32', 'fp64'"),
        ({"dtype": "bf16", "out_dtype": "fp16"}, "out_dtype must be bf16 or fp32, got fp16"),
        ({"layout": Layout(interleave=3)}, "interleave must divide F = 8"),
        ({"dtype": None}, "dtype must be a str, got None"),
        ({"probs": None}, "probs must be a str, got None"),
        ({"dtype": ["fp32"]}, "dtype must be a str, got ['fp32']"),
        ({"H": 4.0}, "H must be an int, got 4.0"),
        ({"K": True}, "K must be an int, got True"),
        ({"E": "4"}, "E must be an int, got '4'"),
        ({"activation": "silu"}, "activation must be an Activation, got str"),
        ({"placement": "fc1_input"}, "placement must be a ProbPlacement, got str"),
        ({"layout": "halves"}, "layout must be a Layout, got str"),
        ({"norm_eps": 0.0}, "norm_eps must be finite and > 0, got 0.0"),
        ({"norm_eps": "1e-5"}, "norm_eps must be a plain Python number, got '1e-5'"),
        ({"grad": 1}, "grad must be a bool, got 1"),
        ({"counted": None}, "counted must be a bool, got None"),
        ({"device": "zzz"}, "such as 'sm_90', or a device type of torch, got 'zzz'"),
        ({"device": "cuda"}, "such as 'sm_90', or a device type of torch, got 'cuda'"),
        ({"device": "sm_9x"}, "such as 'sm_90', or a device type of torch, got 'sm_9x'"),
        ({"device": "cpu:0"}, "such as 'sm_90', or a device type of torch, got 'cpu:0'"),
        ({"device": []}, "device must be a str, got list"),
        (
            {"N": 5, "expert_start": 2},
            "expert_start must keep expert_start + E = 2 + 4 within N = 5, got 2",
        ),
    ],
)
def test_a_problem_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Problem(**({"H": 4, "F": 8, "E": 4, "K": 2, "dtype": "fp32"} | options))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T=512 H=4", "unknown problem field 'T'"),
        ("H=4 F=8 E=4 K=x dtype=fp32", "K must be an int, got 'x'"),
        ("H=4 F=8 E=4 K=2 dtype=fp32 H=5", "H must be given once, got twice"),
        ("H=4 F=8 E=4 K=2 dtype=fp32 grad=yes", "grad must be True or False, got 'yes'"),
        ("H=4 F=8 E=4 K=2 dtype=fp32 norm_eps=tiny", "norm_eps must be a number, got 'tiny'"),
        ("H=4 F=8 E=4 K=2 dtype=fp32 placement=input", "unknown placement 'input'"),
        ("H=4 F=8 E=4", "the problem must state K, dtype, got 'H=4 F=8 E=4'"),
        ("", "the problem must state H, F, E, K, dtype, got ''"),
    ],
)
def test_text_that_spells_no_problem_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Problem.parse(text)


@pytest.mark.parametrize("device", ["cpu", "sm_80", "sm_100", "mps", "xpu", "meta"])
def test_any_device_of_torch_may_be_asked_about(device: str) -> None:
    problem = replace(CASES["swiglu"], device=device)

    assert Problem.parse(str(problem)) == problem
    assert explain(problem)["reference"] is None


@pytest.mark.parametrize("name", sorted(CASES))
def test_explain_gives_a_phrase_or_none_for_every_backend(name: str) -> None:
    reasons = explain(CASES[name])

    assert reasons.keys() == BACKENDS.keys()
    assert reasons["reference"] is None
    assert all(reason is None or reason.startswith("it ") for reason in reasons.values())


def test_a_named_backend_is_strict_and_says_why() -> None:
    problem = replace(CASES["norm"], dtype="fp64", device="sm_90")

    with pytest.raises(
        UnsupportedError, match=r"backend 'grouped' cannot run Problem\(H=48 .*because it"
    ):
        choose("grouped", problem)


# Arguments of one good call; each refusal below changes one of them.
T, K, E, H, F = 7, 3, 5, 48, 80


def _arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(T * K).reshape(T, K) % E
    return {
        "x": torch.randn(T, H, generator=generator),
        "routing": Routing(ids, torch.rand(T, K, generator=generator), E),
        "weights": ExpertWeights(
            gate_up=torch.randn(E, 2 * F, H, generator=generator),
            down=torch.randn(E, H, F, generator=generator),
        ),
    }


def _ids(value: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(call: dict[str, Any]) -> dict[str, Any]:
        ids = call["routing"].topk_ids.clone()
        ids[4, 1] = value
        return {"routing": Routing(ids, call["routing"].topk_probs, E)}

    return change


def _short(call: dict[str, Any]) -> dict[str, Any]:
    routing = call["routing"]
    return {"routing": Routing(routing.topk_ids[:-1], routing.topk_probs[:-1], E)}


def _probs(dtype: torch.dtype) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(call: dict[str, Any]) -> dict[str, Any]:
        return {
            "routing": Routing(call["routing"].topk_ids, call["routing"].topk_probs.to(dtype), E)
        }

    return change


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (_short, ValueError, "topk_ids must have shape (T, K) with T = x.shape[0] = 7, got (6, 3)"),
    (
        _ids(-2),
        ValueError,
        "topk_ids must be in [0, N) with N = 5, or -1 or N for a dropped slot, got -2",
    ),
    (_ids(6), ValueError, "or -1 or N for a dropped slot, got 6"),
    (_ids(2**32 + 3), ValueError, "or -1 or N for a dropped slot, got 4294967299"),
    (
        _probs(torch.float16),
        ValueError,
        "topk_probs must be float32 or the dtype of x (torch.float32)",
    ),
    (lambda _: {"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
    (lambda _: {"x": torch.randn(T, H, 1)}, ValueError, "x must have shape (T, H), got (7, 48, 1)"),
    (
        lambda _: {"x": torch.randn(T, H + 1)},
        ValueError,
        "x must have shape (T, H) with H = down.shape[1] = 48, got (7, 49)",
    ),
    (
        lambda c: {"x": c["x"].half()},
        ValueError,
        "x must have the dtype of the weights (torch.float32), got",
    ),
    (lambda _: {"activation": "silu"}, TypeError, "activation must be an Activation, got str"),
    (
        lambda _: {"activation": Activation(kind="relu2", gated=False)},
        ValueError,
        "gate_up must have 1 * F = 80 rows for activation relu2(gated=False), got 160",
    ),
    (
        lambda _: {"backend": "fussed"},
        ValueError,
        "unknown backend 'fussed'; expected one of 'auto'",
    ),
    (
        lambda _: {"placement": "output"},
        ValueError,
        "unknown placement 'output'; expected one of 'fc1_input', 'fc2_input', 'fc2_output'",
    ),
    (lambda _: {"placement": None}, TypeError, "placement must be a str, got None"),
    (lambda _: {"backend": []}, TypeError, "backend must be a str, got []"),
    (lambda _: {"routing": None}, TypeError, "routing must be a Routing, got NoneType"),
    (lambda _: {"weights": {}}, TypeError, "weights must be an ExpertWeights, got dict"),
    (lambda _: {"expert_start": 0.0}, TypeError, "expert_start must be an int, got 0.0"),
    (lambda _: {"expert_start": False}, TypeError, "expert_start must be an int, got False"),
    (
        lambda _: {"expert_start": 1},
        ValueError,
        "expert_start must keep expert_start + E within N = 5",
    ),
    (
        lambda _: {"expert_start": -1},
        ValueError,
        "expert_start must keep expert_start + E within N = 5",
    ),
    (
        lambda _: {"out_dtype": torch.float16},
        ValueError,
        "out_dtype must be None, torch.float32 or torch.float32, got torch.float16",
    ),
    (
        lambda _: {"num_valid_tokens": 3},
        TypeError,
        "num_valid_tokens must be an int32 tensor, got int",
    ),
    (
        lambda _: {"num_valid_tokens": torch.tensor([3])},
        TypeError,
        "num_valid_tokens must be an int32 tensor, got torch.int64",
    ),
    (
        lambda _: {"num_valid_tokens": torch.tensor(3, dtype=torch.int32)},
        ValueError,
        "num_valid_tokens must have shape (1,), got ()",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_a_bad_argument_is_named_with_the_rule_and_its_value(
    change: Callable[[dict[str, Any]], dict[str, Any]], error: type[Exception], message: str
) -> None:
    call = _arguments()
    before = {name: tensor.clone() for name, tensor in call["weights"].named_tensors().items()}

    with pytest.raises(error, match=re.escape(message)):
        experts(**(call | change(call)))

    for name, tensor in call["weights"].named_tensors().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": torch.randn(4)}, ValueError, "rows must have shape (R, H), got (4,)"),
        (
            {"offsets": torch.tensor([0, 4])},
            ValueError,
            "offsets must have shape (E + 1,) = (6,), got (2,)",
        ),
        (
            {"offsets": torch.zeros(6)},
            TypeError,
            "offsets must be int32 or int64, got torch.float32",
        ),
        ({"row_probs": torch.ones(3)}, ValueError, "row_probs must have shape (7,), got (3,)"),
    ],
)
def test_a_bad_argument_of_grouped_experts_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = _arguments()
    good = {
        "rows": call["x"],
        "offsets": torch.tensor([0, 1, 3, 3, 6, 7]),
        "weights": call["weights"],
    }

    with pytest.raises(error, match=re.escape(message)):
        grouped_experts(**(good | change))
