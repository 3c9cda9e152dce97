"""Every configuration of transformers that speaks of experts: read, or refused with a reason."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from samebits import UnsupportedError, from_hf_config
from samebits.integrations.configs.families import FAMILIES, MODEL_TYPES, REFUSED

pytestmark = pytest.mark.reference

# Where a class has no default for what a layer of its own has.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "unlimited_ocr_text": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
    | {"moe_intermediate_size": 16},
}
# Mean nothing for the experts of a class, or are words of another part.
OPTION = re.compile(r"swiglu|limit|softcap|situ|alpha|tanh|on_input|interleave")
STRANGE = [
    "routed_swiglu_alpha",
    "gate_clamp_limit",
    "up_softcap",
    "situ_linear_beta",
    "expert_tanh_cap",
    "apply_probs_on_input",
    "glu_interleave",
]


def _parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every configuration, and every one inside another, by its model type."""
    for name in sorted(CONFIG_MAPPING):
        try:
            values = CONFIG_MAPPING[name]().to_dict()
        except (StrictDataclassClassValidationError, ValueError):
            continue  # it has no defaults; none such holds experts
        yield name, values
        for inner in values.values():
            if isinstance(inner, dict) and inner.get("model_type"):
                yield inner["model_type"], inner


PARTS = {
    name: values
    for name, values in _parts()
    if any("expert" in field for field in values) or name in MODEL_TYPES
}


def _values(name: str) -> dict[str, Any]:
    return PARTS[name] | NEEDED.get(name, {})


KNOWN = sorted(name for name in PARTS if name in MODEL_TYPES)


def test_every_model_with_experts_is_known_or_refused_with_a_reason() -> None:
    assert set(PARTS) - set(MODEL_TYPES) <= set(REFUSED)
    assert set(MODEL_TYPES.values()) == set(FAMILIES)
    for name in set(PARTS) & set(REFUSED):
        with pytest.raises(UnsupportedError, match=re.escape(REFUSED[name])):
            from_hf_config(_values(name))


@pytest.mark.parametrize("name", KNOWN)
def test_its_defaults_are_read(name: str) -> None:
    specs = from_hf_config(_values(name))

    assert specs
    for spec in specs.values():
        spec.rule.check(spec.num_experts + spec.identity_experts)


@pytest.mark.parametrize("name", KNOWN)
def test_an_option_that_it_does_not_know_is_named(name: str) -> None:
    for field in STRANGE:
        with pytest.raises(UnsupportedError, match=f"does not read: {field} = 1.5"):
            from_hf_config(_values(name) | {field: 1.5})


def test_every_option_of_a_known_model_changes_something_or_is_of_another_part() -> None:
    deaf = set()
    for name in KNOWN:
        values = _values(name)
        before = from_hf_config(values)
        elsewhere = FAMILIES[MODEL_TYPES[name]].elsewhere
        for field, value in values.items():
            if not OPTION.search(field) or field in elsewhere or isinstance(value, dict):
                continue
            other = [3.5] * 200 if isinstance(value, list) else True if value is False else 3.5
            try:
                after = from_hf_config(values | {field: other})
            except (UnsupportedError, ValueError, TypeError):
                continue
            if after == before:
                deaf.add(f"{name}.{field}")
    # How often a layer has experts is no option of them.
    assert deaf <= {"llama4_text.interleave_moe_layer_step"}, deaf
