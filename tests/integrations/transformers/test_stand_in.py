import pytest
import torch
from transformers.integrations import sonicmoe

from samebits.checks.models.experts import judge_case
from samebits.errors import UnsupportedError
from samebits.integrations.transformers import tiny, zoo
from samebits.integrations.transformers.experts_case import TinyExperts
from samebits.integrations.transformers.provider import Transformers
from samebits.integrations.transformers.stand_in import sonicmoe_stand_in

pytestmark = pytest.mark.reference

BY_NAME = {c.name: c for c in zoo.discover() if isinstance(c, zoo.ExpertsClass)}
# Their gates need more than the arguments can say.
WRONG = (
    "gpt_oss.GptOssExperts",
    "deepseek_v4.DeepseekV4Experts",
    "minimax_m3_vl.MiniMaxM3VLExperts",
    "gemma4.Gemma4TextExperts",
)
RIGHT = ("qwen3_moe.Qwen3MoeExperts", "mixtral.MixtralExperts")


def judge(name):
    case = TinyExperts(BY_NAME[name], tiny.DEFAULT_SIZES)
    return [
        finding
        for finding in judge_case(case, Transformers(), ["sonicmoe"], torch.float32)
        if finding.case == "default"
    ]


@pytest.mark.parametrize("name", WRONG)
def test_an_option_that_the_arguments_drop_fails(name):
    findings = {f.quantity: f for f in judge(name)}
    assert findings["out"].verdict == "fail"
    assert findings["out"].measured > 100 * findings["out"].allowed
    assert {f.evidence for f in findings.values()} == {"arguments"}


@pytest.mark.parametrize("name", RIGHT)
def test_plain_experts_pass(name):
    findings = judge(name)
    assert {f.verdict for f in findings} == {"pass"}
    assert {f.evidence for f in findings} == {"arguments"}


def test_what_the_adapter_refuses_itself_is_unsupported():
    (finding,) = judge("nemotron_h.NemotronHExperts")
    assert finding.verdict == "unsupported"
    assert "gated" in finding.note


def test_the_adapter_is_as_before_afterwards():
    names = ("_SONICMOE", "_load_sonicmoe_kernel", "load_sonicmoe_kernel")
    before = [getattr(sonicmoe, name) for name in names]
    with sonicmoe_stand_in():
        assert getattr(sonicmoe, names[0]) is not before[0]
    assert [getattr(sonicmoe, name) for name in names] == before


def test_another_adapter_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(sonicmoe, "load_sonicmoe_kernel")
    with pytest.raises(UnsupportedError, match="load_sonicmoe_kernel"), sonicmoe_stand_in():
        pass
