"""How the families of models in transformers spell their mixture-of-experts layers.

One row of ``FAMILIES`` for each way of spelling; ``MODEL_TYPES`` says which model types share it.
What a family's code fixes without a field (gpt-oss' offset of 1, a router that always
renormalises) stands in its row; everything that its configuration can change is read from it.
"""

from collections.abc import Mapping

from samebits.integrations.configs import readers, rules
from samebits.integrations.configs.family import Family
from samebits.integrations.configs.plain_families import PLAIN_FAMILIES
from samebits.problem import ProbPlacement
from samebits.weights import Layout

# Those with a function, a placement or a part of their own.
_OTHERS: Mapping[str, Family] = {
    "deepseek_v4": Family(
        rule=rules.scored_by_field,
        activation=readers.pre_clamped,
        shared=readers.counted_shared(readers.pre_clamped),
        selection_bias=True,
        beyond=readers.hash_routing,
    ),
    "bailing_hybrid": Family(
        rule=rules.grouped_sigmoid,
        activation=readers.post_clamped("expert_swiglu_limit_list"),
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.post_clamped("share_expert_swiglu_limit_list")),
        selection_bias=True,
    ),
    "minimax_m3_vl_text": Family(
        columns=("intermediate_size",),
        rule=rules.sigmoid,
        activation=readers.plain_with_offset,
        sparse=readers.typed(readers.every_layer),
        shared=readers.sized_shared(readers.plain_with_offset, "shared_intermediate_size"),
        routed_scaling=lambda fields: float(fields.get("routed_scaling_factor")),
        selection_bias=True,
    ),
    "gpt_oss": Family(
        columns=("intermediate_size",),
        rule=rules.chosen_softmax,
        activation=readers.plain_with_offset,
        layout=Layout(interleave=1),
        orientation="in_out",
        biased=True,
        router_bias=True,
    ),
    "step3p5": Family(
        rule=rules.sigmoid,
        activation=readers.post_clamped("swiglu_limits"),
        sparse=readers.typed(readers.listed),
        shared=readers.sized_shared(
            readers.post_clamped("swiglu_limits_shared"), "share_expert_dim"
        ),
        routed_scaling=lambda fields: float(fields.get("moe_router_scaling_factor", default=1.0)),
        selection_bias=True,
    ),
    "llama4_text": Family(
        columns=("intermediate_size",),
        rule=rules.chosen_sigmoid,
        sparse=readers.interleaved_layers,
        shared=readers.sized_shared(readers.plain, "intermediate_size"),
        placement=ProbPlacement.FC1_INPUT,
        orientation="in_out",
    ),
    "longcat_flash": Family(
        columns=("expert_ffn_hidden_size", "moe_intermediate_size"),
        rule=rules.scaled_softmax,
        identity_experts=lambda fields: int(fields.get("zero_expert_num", default=0)),
        selection_bias=True,
    ),
    "axk1": Family(
        rule=rules.grouped_sigmoid,
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.plain),
        selection_bias=True,
        beyond=readers.always("it normalises the sum of its experts"),
        elsewhere=("rope_interleave",),
    ),
    "cohere2_moe": Family(
        columns=("intermediate_size",),
        rule=rules.cohere,
        sparse=readers.typed(readers.every_layer),
        shared=readers.counted_shared(readers.plain, "intermediate_size"),
        beyond=readers.averaged_shared,
    ),
    "glm5_next_text": Family(
        rule=rules.grouped_sigmoid,
        activation=readers.pre_clamped,
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.pre_clamped),
        selection_bias=True,
        elsewhere=("rope_interleave", "indexer_rope_interleave"),
    ),
    "hy_v4": Family(
        rule=rules.grouped_sigmoid,
        activation=readers.pre_clamped,
        sparse=readers.typed(readers.behind_dense),
        # The limit is that of the routed experts alone.
        shared=readers.counted_shared(readers.plain),
        selection_bias=True,
        elsewhere=("rope_interleave", "indexer_rope_interleave"),
    ),
    "inkling2_text": Family(
        rule=rules.scaled_sigmoid("route_scale"),
        activation=readers.soft_capped,
        selection_bias=True,
        elsewhere=("final_logit_softcapping", "log_scaling_alpha"),
    ),
    "jetmoe": Family(
        columns=("intermediate_size",),
        rule=rules.chosen_softmax,
        activation=readers.named("activation_function"),
        beyond=readers.always("it adds one bias to the sum of its experts"),
    ),
    "lfm2_moe": Family(
        rule=rules.liquid,
        activation=readers.silu,
        sparse=readers.behind("num_dense_layers"),
        selection_bias=True,
    ),
    "muse_spark_text": Family(
        rule=rules.scaled_sigmoid("routed_scaling_factor", eps=1e-15),
        sparse=readers.typed(readers.every_layer),
        latent="moe_hidden_size",
        selection_bias=True,
        beyond=readers.always("it scales its logits, and normalises before and behind each expert"),
        elsewhere=("final_logit_softcapping",),
    ),
    "nemotron_h": Family(
        layers=readers.number_of_blocks,
        rule=rules.grouped_sigmoid,
        activation=readers.named("mlp_hidden_act", gated=False),
        sparse=readers.blocks,
        shared=readers.sized_shared(
            readers.named("mlp_hidden_act", gated=False), "moe_shared_expert_intermediate_size"
        ),
        latent="moe_latent_size",
        selection_bias=True,
        # Steps of the state space's clock.
        elsewhere=("time_step_limit",),
    ),
    "openai_privacy_filter": Family(
        columns=("intermediate_size",),
        rule=rules.split_softmax,
        activation=readers.plain_with_offset,
        orientation="in_out",
        biased=True,
        router_bias=True,
        routed_scaling=lambda fields: float(readers.topk_of(fields)),
    ),
    "phimoe": Family(
        columns=("intermediate_size",),
        rule=rules.scaled_softmax,
        beyond=readers.always("its router masks logits by their distance from the largest"),
    ),
    "dbrx": Family(
        columns=("ffn_hidden_size",),
        hidden="d_model",
        rule=rules.softmax_if_norm,
        activation=readers.named("ffn_act_fn"),
        # As `samebits convert` stores them: DBRX itself has three flattened matrices.
        orientation="out_in",
    ),
    "diffusion_gemma_text": Family(
        rule=rules.softmax,
        beyond=readers.gemma_router,
        elsewhere=("final_logit_softcapping", "attn_logit_softcapping"),
    ),
    "gemma4_text": Family(
        rule=rules.softmax,
        sparse=lambda fields, layers: readers.every_layer(
            fields, layers if fields.get("enable_moe_block") else 0
        ),
        beyond=readers.gemma_router,
        elsewhere=("final_logit_softcapping", "attn_logit_softcapping"),
    ),
}

FAMILIES: Mapping[str, Family] = {**PLAIN_FAMILIES, **_OTHERS}

# Model types that spell their layers as a row above does.
MODEL_TYPES: Mapping[str, str] = {name: name for name in FAMILIES} | {
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_next": "qwen2_moe",
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm4_moe": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "solar_open": "deepseek_v3",
    "axk2": "deepseek_v3",
    "deepseek_ocr2_text": "deepseek_v2",
    "unlimited_ocr_text": "deepseek_v2",
    "dots1": "deepseek_v3",
    "exaone_moe": "deepseek_v3",
    "flex_olmo": "olmoe",
    "glm4v_moe_text": "deepseek_v3",
    "granitemoe_swa": "granitemoeshared",
    "granitemoehybrid": "granitemoeshared",
    "hy_v4_vl_text": "hy_v4",
    "inkling2_loop_text": "inkling2_text",
    "kimi_linear": "deepseek_v3",
    "mimo_v2_flash": "deepseek_v3",
    "mistral_large4_text": "mistral4",
    "qwen3_omni_moe_talker_text": "qwen2_moe",
    "qwen4_exp_text": "qwen2_moe",
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "deepseek_v3",
}

# Model types whose layers cannot be said in a LayerSpec, and why.
REFUSED: Mapping[str, str] = {
    "doge": "its experts are rows of an embedding",
    "dots3_note_vision_encoder": "its layers differ in size, each by a configuration of its own",
    "ernie4_5_vl_moe_text": "tokens of text and of images have experts of their own, in two sizes",
    "inkling_text": "its shared experts take part in the router's normalisation",
    "nllb-moe": "each expert has biases of its own and dropout",
    "switch_transformers": "its experts drop tokens beyond a capacity, and have dropout",
    "vitpose_backbone": "experts are chosen by data set, not by token",
    "zaya": "its router is a network with a state from layer to layer, and may skip the experts",
}
