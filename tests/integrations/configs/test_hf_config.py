"""What ``from_hf_config`` reads, held to the code of transformers, and what it refuses."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.step3p7.modeling_step3p7 import Step3p7SparseMoeBlock

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    ProbPlacement,
    RoutingRule,
    UnsupportedError,
    from_hf_config,
)
from samebits.integrations.configs import LayerSpec
from samebits.integrations.configs.families import FAMILIES
from samebits.integrations.transformers.configuration import problems_of_config
from samebits.testing.numerics import relative_error

pytestmark = pytest.mark.reference

# One unit of the eighth digit fewer than fp32: the order of sums and their rounding differ.
CLOSE = 2.0**-18
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
# Model type -> what its tiny configuration sets; the last layer has experts in each.
TINY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    "qwen3_moe": {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0], **MOE},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE},
    "qwen3_next": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE},
    "qwen3_5_moe_text": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}
    | GROUPED
    | MOE,
    "deepseek_v3": {"routed_scaling_factor": 2.5, "n_shared_experts": 2, **GROUPED, **MOE},
    "glm4_moe": {"n_shared_experts": 2, **GROUPED, **MOE},
    "bailing_hybrid": {"num_experts": 8, "num_expert_group": 4, "topk_group": 2}
    | {"num_experts_per_token": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    "hy_v3": {"num_experts": 6, "num_shared_experts": 2, **MOE},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    "minimax_m3_vl_text": {"num_local_experts": 6, "num_experts_per_tok": 3}
    | {"intermediate_size": 24, "shared_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    "deepseek_v4": {"n_routed_experts": 6, "mlp_layer_types": ["hash_moe", "moe"], **MOE},
    "step3p5": {"n_routed_experts": 6, "swiglu_limits": [0.0, 0.5], "share_expert_dim": 40}
    | {"swiglu_limits_shared": [None, 0.75], "moe_layers_enum": "1", **MOE}
    | {"moe_router_scaling_factor": 3.0},
    "llama4_text": {"num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 24}
    | {"intermediate_size_mlp": 40, "interleave_moe_layer_step": 2},
    "longcat_flash": {"n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 3}
    | {"expert_ffn_hidden_size": 24, "num_layers": 2, "ffn_hidden_size": 40},
    "afmoe": {"num_experts": 6, "num_shared_experts": 2, "num_dense_layers": 1, **MOE}
    | {"route_scale": 1.5, "layer_types": ["sliding_attention", "full_attention"]},
    "beam": {"num_experts": 8, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse"] * 2}
    | {"routed_scaling_factor": 2.5, **MOE},
    "cohere2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
    | {"expert_selection_fn": "sigmoid", "num_shared_experts": 2}
    | {"shared_expert_combination_strategy": "sum", "mlp_layer_types": ["sparse"] * 2},
    "dots3_note_text": {"n_shared_experts": 2, "shared_experts_intermediate_size": 20}
    | {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4, **GROUPED, **MOE},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24}
    | {"moe_layer_end_index": 1},
    "flint": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE}
    | {"mlp_only_layers": [0]},
    "glm5_next_text": {"n_shared_experts": 2, "swiglu_limit": 0.5, **GROUPED, **MOE}
    | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2}
    | {"indexer_types": ["full"] * 2, "num_key_value_heads": 4},
    "hy_v4": {"n_shared_experts": 2, "swiglu_limit": 0.5, **GROUPED, **MOE}
    | {"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full"] * 2},
    "mistral4": {"n_shared_experts": 2, "routed_scaling_factor": 1.5, **GROUPED, **MOE},
    "mistral_large4_text": {"n_shared_experts": 2, "mlp_layer_types": ["dense", "sparse"]}
    | {"routed_scaling_factor": 1.5, "indexer_types": ["full"] * 2, **GROUPED, **MOE},
    "granitemoeshared": {"num_local_experts": 6, "num_experts_per_tok": 3}
    | {"intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 3, "intermediate_size": 24},
    "inkling2_text": {"n_routed_experts": 6, "mlp_gate_softcap": 1.0, "mlp_up_softcap": 2.0} | MOE,
    "jamba": {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
    | {"use_mamba_kernels": False, "attn_layer_period": 1, "attn_layer_offset": 0},
    "kolibri1": {"num_local_experts": 6, "shared_expert_intermediate_size": 40, **MOE}
    | {"norm_topk_prob": True},
    "laguna": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE}
    | {"moe_router_logit_softcapping": 0.5, "moe_routed_scaling_factor": 1.5}
    | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2}
    | {"num_attention_heads_per_layer": [4, 4]},
    "lara_mini": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE},
    "lfm2_moe": {"num_experts": 6, "num_dense_layers": 1, "routed_scaling_factor": 1.5, **MOE}
    | {"layer_types": ["full_attention"] * 2},
    "mellum": {"num_local_experts": 6, "mlp_layer_types": ["sparse"] * 2, **MOE},
    "minimax": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 40, "moe_latent_size": 20}
    | {"layers_block_type": ["full_attention", "moe"], **GROUPED, **MOE},
    "openai_privacy_filter": {"num_local_experts": 6, "num_experts_per_tok": 3}
    | {"intermediate_size": 24},
    "aria_text": {"moe_num_experts": 6, "moe_topk": 3, "intermediate_size": 24},
    "dots1": {"n_shared_experts": 2, "norm_topk_prob": True, **GROUPED, **MOE},
    "exaone_moe": {"num_experts": 8, "num_shared_experts": 2, "n_group": 4, "topk_group": 2}
    | {"mlp_layer_types": ["dense", "sparse"], **MOE},
    "kimi_linear": {"num_experts": 8, "num_shared_experts": 2, "num_expert_group": 4}
    | {"topk_group": 2, "num_experts_per_token": 3, "moe_intermediate_size": 24}
    | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2},
    "mimo_v2_flash": {"mlp_layer_types": ["dense", "sparse"], **GROUPED, **MOE},
    "qwen4_exp_text": {"num_experts": 6, "shared_expert_intermediate_size": 40, **MOE}
    | {"layer_types": ["full_attention"] * 2, "indexer_budget": 16, "indexer_compress_ratio": 4}
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
}
# Their layers do more than a LayerSpec says, or are held to their code elsewhere (DBRX).
WITHOUT_A_LAYER = {
    "gemma4_text",
    "diffusion_gemma_text",
    "axk1",
    "jetmoe",
    "muse_spark_text",
    "phimoe",
    "dbrx",
}


def _config(name: str, **options: Any) -> Any:
    return AutoConfig.for_model(name, **(SIZES | TINY[name] | options))


def _block(config: Any) -> nn.Module:
    """The last module that holds experts, with random parameters and selection bias."""
    if config.model_type == "step3p5":  # a text part that no AutoModel builds
        block: nn.Module = Step3p7SparseMoeBlock(config, 1)
    else:
        modules = AutoModel.from_config(config).modules()
        block = [m for m in modules if "experts" in dict(m.named_children())][-1]
    return _randomised(block)


def _randomised(block: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
        for buffer in block.buffers():
            if buffer.is_floating_point():
                buffer.normal_(std=0.3)
    return block


def _named(block: nn.Module, *ends: str) -> list[Tensor]:
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())
    return [t for name, t in tensors.items() if name.endswith(ends)]


def _load(spec: LayerSpec, block: nn.Module) -> nn.Module:
    """This library's layer, with the parameters of transformers' block."""
    layer = spec.moe(dtype=torch.float32)
    own: Any = block.experts
    gate_up = own.gate_up_proj if spec.activation.gated else own.up_proj
    gate_up = gate_up[: spec.num_experts]
    layer.experts.load_weights(
        ExpertWeights.from_storage(
            gate_up,
            own.down_proj,
            orientation=spec.orientation,
            gate_up_bias=own.gate_up_proj_bias if spec.biased else None,
            down_bias=own.down_proj_bias if spec.biased else None,
            layout=spec.layout,
        )
    )
    with torch.no_grad():
        routers = _named(block, "gate.weight", "router.weight", "classifier.weight", "wg.weight")
        (router,) = [t for t in routers if t.shape == layer.router.weight.shape]
        layer.router.weight.copy_(router)
        if spec.router_bias:
            layer.router.bias.copy_(*_named(block, "router.bias"))
        if spec.selection_bias:
            (bias,) = _named(block, "correction_bias", "expert_bias")
            layer.router.selection_bias.copy_(bias.squeeze())
        if spec.shared is not None:
            _load_shared(layer, block)
        if spec.latent_size is not None:
            layer.latent_down.weight.copy_(*_named(block, "fc1_latent_proj.weight"))
            layer.latent_up.weight.copy_(*_named(block, "fc2_latent_proj.weight"))
    return layer


def _load_shared(layer: Any, block: nn.Module) -> None:
    shared = [m for name, m in block.named_children() if name.startswith("shared_")]
    halves = _named(shared[0], "gate_proj.weight") + _named(shared[0], "up_proj.weight")
    layer.shared.gate_up.copy_(torch.cat(halves)[None])
    layer.shared.down.copy_(_named(shared[0], "down_proj.weight")[0][None])
    if layer.shared_gate is not None:
        layer.shared_gate.weight.copy_(*_named(block, "shared_expert_gate.weight"))


@pytest.mark.parametrize("name", TINY)
def test_a_layer_computes_what_the_model_computes(name: str) -> None:
    config = _config(name)
    block = _block(config).eval()
    specs = from_hf_config(config)
    layer = _load(specs[max(specs)], block)
    x = torch.randn(2, 9, 32)

    with torch.no_grad():
        theirs = block(x)
        ours = layer(x)

    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert relative_error(ours, theirs.reshape(x.shape)) < CLOSE


@pytest.mark.parametrize("name", sorted(set(TINY) - {"step3p5", "llama4_text", "longcat_flash"}))
def test_the_activation_is_what_the_code_computes(name: str) -> None:
    config = _config(name)

    problems = list(problems_of_config(config).values())
    specs = from_hf_config(config)

    last = specs[max(specs)]
    hidden = last.latent_size or last.hidden_size
    sizes = {(p.H, p.F, p.E, p.K) for p in problems}
    assert sizes == {(hidden, 24, last.num_experts, last.rule.topk)}
    assert {p.activation for p in problems} == {last.activation}
    assert {p.layout for p in problems} == {last.layout}


@pytest.mark.parametrize("norm", [None, 1.0])
def test_dbrx_computes_what_its_layer_computes(norm: float | None) -> None:
    options = {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3}
    ffn = options | {"hidden_size": 32, "moe_normalize_expert_weights": norm}
    config = AutoConfig.for_model("dbrx", d_model=32, n_layers=2, ffn_config=ffn)
    block = _randomised(DbrxFFN(config))
    spec = from_hf_config(config)[1]
    layer = spec.moe(dtype=torch.float32)
    gate, up, down = (
        m.view(6, 24, 32)
        for m in (block.experts.mlp.w1, block.experts.mlp.v1, block.experts.mlp.w2)
    )
    layer.experts.load_weights(
        ExpertWeights(gate_up=torch.cat([gate, up], 1).detach(), down=down.mT.detach())
    )
    x = torch.randn(2, 9, 32)

    with torch.no_grad():
        layer.router.weight.copy_(block.router.layer.weight)
        assert relative_error(layer(x), block(x)) < CLOSE


def test_granites_shared_expert_is_beside_its_layer() -> None:
    spec = from_hf_config(_config("granitemoeshared", shared_intermediate_size=40))[1]

    assert spec.shared is not None
    assert (spec.shared.intermediate_size, spec.shared.gate) == (40, False)
    assert from_hf_config(_config("granitemoeshared", num_local_experts=0)) == {}


def test_lists_of_one_number_are_that_number() -> None:
    config = _config("hunyuan_v1_moe").to_dict()

    assert from_hf_config(config | {"moe_topk": [3, 3]}) == from_hf_config(config)
    with pytest.raises(UnsupportedError, match=r"moe_topk.* must be the same in every layer"):
        from_hf_config(config | {"moe_topk": [3, 2]})


def test_every_family_is_held_to_its_code() -> None:
    assert set(FAMILIES) - set(TINY) == WITHOUT_A_LAYER


def test_a_config_json_is_read_as_its_object() -> None:
    config = _config("deepseek_v3")

    assert from_hf_config(config.to_dict()) == from_hf_config(config)


def test_layers_of_a_model_differ() -> None:
    specs = from_hf_config(_config("step3p5", num_hidden_layers=2, moe_layers_enum=[0, 1]))

    assert [specs[i].activation.key for i in (0, 1)] == [
        "silu",
        "silu(limit=0.5,limit_position=post)",
    ]
    assert [specs[i].shared.activation.limit for i in (0, 1)] == [None, 0.75]


def test_dense_layers_are_absent() -> None:
    assert list(from_hf_config(_config("qwen3_moe"))) == [1]
    assert list(from_hf_config(_config("llama4_text", num_hidden_layers=4))) == [1, 3]


def test_what_gpt_oss_has_no_field_for() -> None:
    config = _config("gpt_oss").to_dict()
    del config["swiglu_alpha"]

    spec = from_hf_config(config)[0]

    assert spec.activation == Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
    assert spec.layout == Layout(interleave=1)
    assert spec.placement is ProbPlacement.FC2_OUTPUT


def test_limits_that_transformers_ignores_are_read() -> None:
    limits = {"expert_swiglu_limit_list": [0, 4], "share_expert_swiglu_limit_list": [5, 7]}

    spec = from_hf_config(_config("bailing_hybrid", **limits))[1]

    assert spec.activation == Activation(limit=4.0, limit_position="post")
    assert spec.shared.activation == Activation(limit=7.0, limit_position="post")


def test_gemma_names_its_function_otherwise() -> None:
    sizes = {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
    config = AutoConfig.for_model("gemma4_text", enable_moe_block=True, **(SIZES | sizes))

    spec = from_hf_config(config)[0]

    assert spec.activation == Activation(kind="gelu_tanh")
    assert spec.rule == RoutingRule(topk=2, renormalize=True)
    with pytest.raises(UnsupportedError, match="its router normalises its input"):
        spec.moe()


def test_a_table_of_token_ids_is_no_rule() -> None:
    specs = from_hf_config(_config("deepseek_v4"))

    with pytest.raises(UnsupportedError, match="hash routing"):
        specs[0].moe()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("swiglu_limit", 7.0),
        ("swiglu_limit", 0.0),
        ("SwiGLU_Limit", 7.0),
        ("expert_softcap", 4.0),
        ("situ_beta", 4.0),
        ("mlp_alpha", 1.5),
        ("gate_tanh_cap", 25.0),
        ("moe_apply_router_weight_on_input", True),
        ("glu_interleave_size", 32),
        ("swiglu_limits", [None, 7.0]),
    ],
)
def test_an_option_that_nobody_reads_is_named(field: str, value: object) -> None:
    config = _config("qwen3_moe").to_dict() | {field: value}

    with pytest.raises(UnsupportedError, match=f"does not read: {field} = "):
        from_hf_config(config)


@pytest.mark.parametrize("value", [None, False, []])
def test_an_option_that_is_off_is_no_option(value: object) -> None:
    config = _config("qwen3_moe").to_dict() | {"swiglu_limit": value}

    assert from_hf_config(config) == from_hf_config(_config("qwen3_moe"))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("qwen3_moe", {"hidden_size": None}, ValueError, "must hold hidden_size"),
        ("qwen3_moe", {"num_experts": 7}, ValueError, "num_experts must be num_local_experts = 6"),
        (
            "qwen3_moe",
            {"hidden_act": "mish"},
            UnsupportedError,
            "unknown function of the gate 'mish'",
        ),
        (
            "gpt_oss",
            {"hidden_act": "gelu"},
            UnsupportedError,
            "hidden_act must be silu or swigluoai",
        ),
        ("step3p5", {"swiglu_limits": [7.0]}, ValueError, "one number for each of 2 layers"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob = True"),
        ("deepseek_v2", {"topk_method": "noaux"}, UnsupportedError, "topk_method must be greedy"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            UnsupportedError,
            "scoring_func must be sigmoid",
        ),
        ("deepseek_v4", {"scoring_func": "tanh"}, UnsupportedError, "scoring_func must be one of"),
        ("deepseek_v4", {"swiglu_limit": -7.0}, ValueError, "limit must be finite and > 0"),
        ("deepseek_v4", {"swiglu_limit": 0.0}, ValueError, "limit must be finite and > 0"),
    ],
)
def test_what_a_configuration_must_say(
    name: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = _config(name).to_dict() | change

    with pytest.raises(error, match=message):
        from_hf_config(config)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown model type 'llama'"):
        from_hf_config({"model_type": "llama"})
    with pytest.raises(TypeError, match="config must be a configuration or a dict, got str"):
        from_hf_config("gpt_oss")
