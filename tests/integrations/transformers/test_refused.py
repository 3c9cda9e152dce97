"""docs/refused.md says what attach() does, and what attach() refuses is in docs/refused.md."""

import re
from pathlib import Path

import pytest
import transformers
from fp8_modules import build
from refusals import documented
from torch import nn
from transformers import MixtralConfig
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from samebits.errors import UnsupportedError
from samebits.integrations.transformers import attach
from samebits.integrations.transformers.reach import looks_like_experts

pytestmark = pytest.mark.reference

ROOT = Path(transformers.__file__).parent
_CLASS = re.compile(r"^class (\w+)\((?:torch\.)?(?:nn\.)?Module\w*\)", re.MULTILINE)


REFUSALS = documented()
UNREACHED = [r for r in REFUSALS if r.reason == "does not reach this class"]


def undecorated_classes():
    """Return the names of experts classes in files that do not use the decorator."""
    names = set()
    for path in ROOT.rglob("*.py"):
        if path.name.startswith("modular_"):
            continue
        text = path.read_text()
        if "@use_experts_implementation" not in text:
            names |= {name for name in _CLASS.findall(text) if looks_like_experts(name)}
    return names


def test_every_undecorated_experts_class_is_documented():
    assert undecorated_classes() - {"FP8Experts"} <= {refusal.cls for refusal in UNREACHED}


@pytest.mark.parametrize("refusal", UNREACHED, ids=lambda refusal: refusal.cls)
def test_an_unreached_class_is_refused(refusal):
    # attach() knows such a class by its name alone, so a stand-in of the name is enough.
    block = type(refusal.cls, (nn.Module,), {})()
    with pytest.raises(UnsupportedError, match=f"{refusal.cls}: .*{refusal.reason}"):
        attach(nn.Sequential(nn.Linear(2, 2), block))


def test_llama4_is_refused_although_it_accepts_the_name():
    config = transformers.Llama4TextConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        intermediate_size_mlp=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
    )
    model = transformers.Llama4ForCausalLM(config)
    before = model.config._experts_implementation
    with pytest.raises(UnsupportedError, match=r"Llama4TextMoe: .*does not reach.*feed_forward"):
        attach(model)
    assert model.config._experts_implementation == before


def act_options():
    return [r.option for r in REFUSALS if r.cls == "MixtralExperts"]


@pytest.mark.parametrize("act", sorted(ACT2FN))
def test_activation_functions_are_translated_or_documented(act):
    module = MixtralExperts(
        MixtralConfig(num_local_experts=3, hidden_size=8, intermediate_size=4, hidden_act=act)
    )
    (reason,) = [r.reason for r in REFUSALS if r.option == act] or [None]
    if reason is None:
        assert attach(module)[0].activation
        return
    with pytest.raises(UnsupportedError, match=reason):
        attach(module)


def test_documented_activation_functions_exist():
    assert set(act_options()) <= set(ACT2FN)


FP8_OPTIONS = {
    "static activation scales": {"activation_scheme": "static"},
    "FP4 with fp32 scales": {"expert_dtype": "fp4"},
    "F no multiple of a block's rows": {"columns": 80},
}


@pytest.mark.parametrize("refusal", [r for r in REFUSALS if r.cls == "FP8Experts"], ids=str)
def test_options_of_fp8_experts_are_refused(refusal):
    with pytest.raises(UnsupportedError, match=refusal.reason):
        attach(build(**FP8_OPTIONS[refusal.option]))


def test_every_option_of_fp8_experts_that_is_refused_has_a_row():
    assert {r.option for r in REFUSALS if r.cls == "FP8Experts"} == set(FP8_OPTIONS)
