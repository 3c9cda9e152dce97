"""Each planted fault is caught, by the verdict that it deserves; what is right passes."""

import pytest
import torch
from planted import (
    StaleLimit,
    clamp_dropped,
    forward_only,
    gate_and_up_swapped,
    last_expert_skipped,
    one_row_wrong,
    probability_twice,
    registered,
    right,
    unused_experts_get_a_gradient,
    write_model,
)

from samebits.checks.models.experts import judge_case, judge_class
from samebits.checks.models.finding import worst
from samebits.integrations.transformers import tiny, zoo
from samebits.integrations.transformers.experts_case import TinyExperts
from samebits.integrations.transformers.provider import Transformers

pytestmark = pytest.mark.reference

CLASSES = {c.name: c for c in zoo.discover() if isinstance(c, zoo.ExpertsClass)}
PROVIDER = Transformers()
PLAIN, CLAMPED = "qwen3_moe.Qwen3MoeExperts", "gpt_oss.GptOssExperts"


def findings(model, implementation, dtype=torch.bfloat16):
    case = TinyExperts(CLASSES[model], tiny.DEFAULT_SIZES)
    with registered("planted", implementation):
        return list(judge_case(case, PROVIDER, ["planted"], dtype))


def verdicts(model, implementation, case, dtype=torch.bfloat16):
    return {f.quantity: f.verdict for f in findings(model, implementation, dtype) if f.case == case}


FAULTS = {
    "clamp dropped": (CLAMPED, clamp_dropped, "out"),
    "gate and up swapped": (PLAIN, gate_and_up_swapped, "out"),
    "probability twice": (PLAIN, probability_twice, "out"),
    "last expert skipped": (PLAIN, last_expert_skipped, "out"),
    "last expert skipped, its gradient": (PLAIN, last_expert_skipped, "d_gate_up_proj"),
    "one row wrong by an eighth": (PLAIN, one_row_wrong, "out"),
    "unused experts get a gradient": (PLAIN, unused_experts_get_a_gradient, "d_down_proj"),
    "no gradient to the router": (PLAIN, forward_only, "d_topk_probs"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("model", "fault", "quantity"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_fails(model, fault, quantity, dtype):
    assert verdicts(model, fault, "default", dtype)[quantity] == "fail"


@pytest.mark.parametrize("model", [PLAIN, CLAMPED])
def test_what_is_right_passes(model):
    assert set(verdicts(model, right, "default").values()) == {"pass"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_stale_scalar_passes_as_built_and_fails_after_the_change(dtype):
    found = findings(CLAMPED, StaleLimit(), dtype)
    by_case = {
        case: worst([f for f in found if f.case == case]) for case in {f.case for f in found}
    }
    assert by_case["default"].verdict == "pass"
    assert by_case["sensitivity:limit"].verdict == "fail"
    assert "limit 7 -> 3.5" in by_case["sensitivity:limit"].note


def failing(error):
    def raises(module, x, ids, probs):
        raise error

    return raises


def crashing(module, x, ids, probs):
    return x @ probs


ERRORS = {
    "not installed": (failing(ImportError("no kernels")), "not_run"),
    "a refusal": (failing(NotImplementedError("no norm")), "unsupported"),
    "a ValueError that it raises itself": (failing(ValueError("no norm")), "unsupported"),
    "an error of any other type": (failing(KeyError("norm")), "fail"),
    "an error of torch": (crashing, "fail"),
}


@pytest.mark.parametrize(("implementation", "verdict"), ERRORS.values(), ids=ERRORS)
def test_an_error_becomes_the_verdict_that_it_deserves(implementation, verdict):
    assert verdicts(PLAIN, implementation, "default") == {"all": verdict}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a function that writes, imports and builds a class of our own."""

    def make(own=""):
        write_model(tmp_path, "made", own=own)
        monkeypatch.syspath_prepend(str(tmp_path / "made"))
        monkeypatch.delitem(__import__("sys").modules, "modeling_made", raising=False)
        module = __import__("modeling_made")
        found = zoo.ExpertsClass("made.BrandNewExperts", module.BrandNewExperts, module)
        return TinyExperts(found, tiny.DEFAULT_SIZES)

    return make


def test_sensitivity_to_a_field_that_nothing_reads_is_no_pass(made):
    found = [
        f
        for f in judge_case(made(), PROVIDER, ["batched_mm"], torch.float32)
        if f.case == "sensitivity:never_read"
    ]
    assert [f.verdict for f in found] == ["not_run"]
    assert "tests nothing" in found[0].note


def test_a_class_whose_two_forms_agree_passes(made):
    assert {f.verdict for f in judge_class(made(), torch.float32)} == {"pass"}


def test_a_class_whose_own_loop_is_another_function_fails_itself(made):
    case = made(own="* 1.0001")
    found = {f.quantity: f for f in judge_class(case, torch.float32)}
    assert found["out"].verdict == "fail"
    assert found["out"].implementation == "class"
    # Its own loop is what the model says: that passes, and the batched form does not.
    judged = list(judge_case(case, PROVIDER, ["eager", "batched_mm"], torch.float32))
    default = {(f.implementation, f.quantity): f for f in judged if f.case == "default"}
    assert default["eager", "out"].verdict == "pass"
    assert default["batched_mm", "out"].verdict == "fail"
    assert "the class's own loop" in default["eager", "out"].note
