"""Every configuration of transformers that speaks of experts: read, or refused with a reason."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModel
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


# Those that no test of `test_hf_config.py` holds to their code, and that AutoModel builds.
BY_LAYERS = [
    "axk1",
    "axk2",
    "flex_olmo",
    "gemma4_text",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "glm_moe_dsa",
    "granitemoe_swa",
    "granitemoehybrid",
    "hy_v4_vl_text",
    "inkling2_loop_text",
    "muse_spark_text",
    "phimoe",
    "qwen3_vl_moe_text",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
]


@pytest.mark.parametrize("name", BY_LAYERS)
def test_its_layers_are_those_that_the_model_has(name: str) -> None:
    """Which layers have experts, and how large, by the model on the meta device."""
    config = CONFIG_MAPPING[name](**NEEDED.get(name, {}))
    specs = from_hf_config(config)

    with torch.device("meta"):
        model = AutoModel.from_config(config)

    found = {}
    for path, module in model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", path)
        if layer and path.endswith(".experts"):
            found[int(layer[1])] = {size for p in module.parameters() for size in p.shape}
    assert set(found) == set(specs)
    for layer, spec in specs.items():
        hidden = spec.latent_size or spec.hidden_size
        rows = spec.intermediate_size * spec.activation.columns
        assert {spec.num_experts, hidden, rows, spec.intermediate_size} <= found[layer]


@pytest.mark.parametrize("name", ["deepseek_ocr2_text", "unlimited_ocr_text"])
def test_layers_by_their_types(name: str) -> None:
    types = ["dense", "sparse", "dense"]
    config = _values(name) | {"mlp_layer_types": types, "num_hidden_layers": 3}
    assert list(from_hf_config(config)) == [1]


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
