"""How the families of models in transformers spell their mixture-of-experts layers.

One row of ``FAMILIES`` for each way of spelling; ``MODEL_TYPES`` says which model types share it.
What a family's code fixes without a field (gpt-oss' offset of 1, a router that always
renormalises) stands here; everything that its configuration can change is read from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from samebits.integrations.configs import readers
from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.readers import Layers, OfLayer, SharedOfLayer
from samebits.problem import ProbPlacement
from samebits.routing import RoutingRule
from samebits.weights import Layout, Orientation


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family spells its layers; every function reads ``Fields``."""

    # Names of F of a routed expert.
    columns: tuple[str, ...] = ("moe_intermediate_size",)
    rule: Callable[[Fields], RoutingRule]
    activation: OfLayer = readers.plain
    # The layers that have experts.
    sparse: Layers = readers.every_layer
    shared: SharedOfLayer = lambda fields, layer, layers: None
    routed_scaling: Callable[[Fields], float] = lambda fields: 1.0
    identity_experts: Callable[[Fields], int] = lambda fields: 0
    # What a layer does that LayerSpec does not say.
    beyond: Callable[[Fields, int], str | None] = lambda fields, layer: None
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    layout: Layout = Layout()
    orientation: Orientation = "out_in"
    biased: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    # Fields that look like options of the experts and belong to something else.
    elsewhere: tuple[str, ...] = ()


_DEEPSEEK_V3 = Family(
    rule=readers.grouped_sigmoid,
    sparse=readers.typed(readers.behind_dense),
    shared=readers.counted_shared(readers.plain),
    selection_bias=True,
    elsewhere=("rope_interleave",),
)
_QWEN = Family(rule=readers.softmax_if_normed, sparse=readers.stepped)
_SHARED_QWEN = Family(
    rule=readers.softmax_if_normed,
    sparse=readers.stepped,
    shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size", gate=True),
)

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(columns=("intermediate_size",), rule=readers.softmax),
    "olmoe": Family(columns=("intermediate_size",), rule=readers.softmax_if_normed),
    "granitemoe": Family(columns=("intermediate_size",), rule=readers.chosen_softmax),
    "qwen3_moe": _QWEN,
    "qwen2_moe": _SHARED_QWEN,
    "qwen3_5_moe_text": Family(
        rule=readers.softmax,
        shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size", gate=True),
    ),
    "deepseek_v2": Family(
        rule=readers.grouped_softmax,
        sparse=readers.behind_dense,
        shared=readers.counted_shared(readers.plain),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v4": Family(
        rule=readers.scored_by_field,
        activation=readers.pre_clamped,
        shared=readers.counted_shared(readers.pre_clamped),
        selection_bias=True,
        beyond=readers.hash_routing,
    ),
    "bailing_hybrid": Family(
        rule=readers.grouped_sigmoid,
        activation=readers.post_clamped("expert_swiglu_limit_list"),
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.post_clamped("share_expert_swiglu_limit_list")),
        selection_bias=True,
    ),
    "hy_v3": Family(
        rule=readers.scaled_sigmoid,
        sparse=readers.typed(readers.behind_one),
        shared=readers.counted_shared(readers.plain),
        selection_bias=True,
    ),
    "minimax_m2": Family(
        columns=("intermediate_size",),
        rule=readers.sigmoid,
        selection_bias=True,
    ),
    "minimax_m3_vl_text": Family(
        columns=("intermediate_size",),
        rule=readers.sigmoid,
        activation=readers.plain_with_offset,
        sparse=readers.typed(readers.every_layer),
        shared=readers.sized_shared(readers.plain_with_offset, "shared_intermediate_size"),
        routed_scaling=lambda fields: float(fields.get("routed_scaling_factor")),
        selection_bias=True,
    ),
    "gpt_oss": Family(
        columns=("intermediate_size",),
        rule=readers.chosen_softmax,
        activation=readers.plain_with_offset,
        layout=Layout(interleave=1),
        orientation="in_out",
        biased=True,
        router_bias=True,
    ),
    "step3p5": Family(
        rule=readers.sigmoid,
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
        rule=readers.chosen_sigmoid,
        sparse=readers.interleaved_layers,
        shared=readers.sized_shared(readers.plain, "intermediate_size"),
        placement=ProbPlacement.FC1_INPUT,
        orientation="in_out",
    ),
    "longcat_flash": Family(
        columns=("expert_ffn_hidden_size", "moe_intermediate_size"),
        rule=readers.scaled_softmax,
        identity_experts=lambda fields: int(fields.get("zero_expert_num", default=0)),
        selection_bias=True,
    ),
    "gemma4_text": Family(
        rule=readers.softmax,
        sparse=lambda fields, layers: readers.every_layer(
            fields, layers if fields.get("enable_moe_block") else 0
        ),
        beyond=readers.gemma_router,
        elsewhere=("final_logit_softcapping", "attn_logit_softcapping"),
    ),
}

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
}
