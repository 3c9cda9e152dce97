import pytest
import torch
from planted import clamp_dropped, gate_and_up_swapped, last_expert_skipped, registered, right

from samebits.checks.models.language import ABLATION, judge_language
from samebits.checks.models.protocol import UnbuildableError
from samebits.integrations.transformers import language_models
from samebits.integrations.transformers.provider import Transformers
from samebits.integrations.transformers.replay import experts_modules, recorded, replayed

pytestmark = pytest.mark.reference

PROVIDER = Transformers()
BUILDERS = {b.model: b for b in language_models.builders(full=False)}
PLAIN, CLAMPED = "qwen3_moe", "gpt_oss"


@pytest.fixture(scope="module")
def cases():
    return {model: BUILDERS[model].build() for model in (PLAIN, CLAMPED)}


def judge(model, implementation, dtype=torch.bfloat16):
    with registered("planted", implementation):
        found = judge_language(BUILDERS[model], PROVIDER, ["planted"], [dtype])
        return {f.case: f for f in found}


def test_six_families_build_and_full_adds_more():
    assert list(BUILDERS) == [f for f in language_models.FAMILIES if f in BUILDERS]
    assert len(BUILDERS) == len(language_models.FAMILIES)
    assert len(language_models.builders(full=True)) > 30


@pytest.mark.parametrize("model", BUILDERS)
def test_experts_decide_at_least_half_a_nat(model):
    assert BUILDERS[model].build().ablation >= ABLATION


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_what_is_right_passes_and_so_does_its_control(dtype):
    found = judge(PLAIN, right, dtype)
    assert {case: f.verdict for case, f in found.items()} == {
        "language_model": "pass",
        "control": "pass",
    }
    figures = found["language_model"].figures
    assert 0 < figures["mean"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert figures["outside_share"] == 0
    assert figures["choices"] == 2 * 2 * 32


FAULTS = {
    "clamp dropped": (CLAMPED, clamp_dropped),
    "gate and up swapped": (PLAIN, gate_and_up_swapped),
    "last expert skipped": (PLAIN, last_expert_skipped),
}


@pytest.mark.parametrize(("model", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_costs_nats(model, fault):
    found = judge(model, fault)["language_model"]
    assert found.verdict == "fail"
    assert found.figures["mean"] > 0.05
    assert found.figures["outside_share"] > 0.1


def test_the_oracle_is_the_same_each_time(cases):
    again = BUILDERS[PLAIN].build()
    assert torch.equal(cases[PLAIN].exact(torch.bfloat16), again.exact(torch.bfloat16))


def test_replaying_a_routing_overrules_the_router(cases):
    case = cases[PLAIN]
    model = case._copy(torch.float32, torch.float32)
    tokens = case._tokens
    with torch.no_grad():
        with recorded(model) as routings:
            own = model(input_ids=tokens).logits
        with replayed(model, routings, slice(None)):
            same = model(input_ids=tokens).logits
        turned = [
            [(ids.roll(1, 0), probs.roll(1, 0)) for ids, probs in calls] for calls in routings
        ]
        with replayed(model, turned, slice(None)):
            other = model(input_ids=tokens).logits
        after = model(input_ids=tokens).logits
    assert len(experts_modules(model)) == len(routings) == 2
    assert torch.equal(own, same)
    assert not torch.equal(own, other)
    assert torch.equal(own, after)


def test_a_model_that_the_rules_do_not_fit_says_so():
    reasons = {}
    for builder in language_models.builders(full=True):
        if builder.model in ("muse_spark", "flint"):
            with pytest.raises(UnbuildableError) as error:
                builder.build()
            reasons[builder.model] = str(error.value)
    assert all(reasons.values())
