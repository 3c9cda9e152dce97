"""Families of transformers whose experts are plain gated functions, summed behind them.

One row for each way of spelling; see ``families``.
"""

from collections.abc import Mapping

from samebits.integrations.configs import readers, rules
from samebits.integrations.configs.family import Family

_DEEPSEEK_V3 = Family(
    rule=rules.grouped_sigmoid,
    sparse=readers.typed(readers.behind_dense),
    shared=readers.counted_shared(readers.plain),
    selection_bias=True,
    elsewhere=("rope_interleave",),
)
_QWEN = Family(rule=rules.softmax_if_normed, sparse=readers.stepped)
_SHARED_QWEN = Family(
    rule=rules.softmax_if_normed,
    sparse=readers.stepped,
    shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size", gate=True),
)

PLAIN_FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(columns=("intermediate_size",), rule=rules.softmax),
    "olmoe": Family(columns=("intermediate_size",), rule=rules.softmax_if_normed),
    "granitemoe": Family(columns=("intermediate_size",), rule=rules.chosen_softmax),
    "qwen3_moe": _QWEN,
    "qwen2_moe": _SHARED_QWEN,
    "qwen3_5_moe_text": Family(
        rule=rules.softmax,
        shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size", gate=True),
    ),
    "deepseek_v2": Family(
        rule=rules.grouped_softmax,
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.plain),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "hy_v3": Family(
        rule=rules.scaled_sigmoid("router_scaling_factor"),
        sparse=readers.typed(readers.behind_one),
        shared=readers.counted_shared(readers.plain),
        selection_bias=True,
    ),
    "minimax_m2": Family(
        columns=("intermediate_size",),
        rule=rules.sigmoid,
        selection_bias=True,
    ),
    "afmoe": Family(
        rule=rules.scaled_sigmoid("route_scale"),
        sparse=readers.behind("num_dense_layers"),
        shared=readers.counted_shared(readers.plain),
        selection_bias=True,
    ),
    "beam": Family(
        rule=rules.unscaled(rules.grouped_sigmoid),
        sparse=readers.typed(readers.every_layer),
        routed_scaling=lambda fields: float(fields.get("routed_scaling_factor")),
        selection_bias=True,
        elsewhere=("final_logit_softcapping",),
    ),
    "dots3_note_text": Family(
        rule=rules.grouped_sigmoid,
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.plain, "shared_experts_intermediate_size"),
        selection_bias=True,
        elsewhere=("rope_interleave",),
    ),
    "ernie4_5_moe": Family(
        rule=rules.softmax_from("moe_norm_min"),
        sparse=readers.ranged,
        shared=readers.counted_shared(readers.plain),
        selection_bias=True,
    ),
    "flint": Family(
        rule=rules.sigmoid_if_normed,
        sparse=readers.stepped,
        shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size"),
    ),
    "mistral4": Family(
        rule=rules.grouped_softmax_sums,
        sparse=readers.typed(readers.behind_dense),
        shared=readers.counted_shared(readers.plain),
        elsewhere=("rope_interleave", "final_logit_softcapping"),
    ),
    "granitemoeshared": Family(
        columns=("intermediate_size",),
        rule=rules.chosen_softmax,
        sparse=readers.where_experts,
        shared=readers.sized_shared(readers.plain, "shared_intermediate_size"),
        elsewhere=("time_step_limit",),
    ),
    "hunyuan_v1_moe": Family(
        columns=("intermediate_size",),
        rule=rules.softmax,
        shared=readers.sized_shared(readers.plain, "intermediate_size"),
    ),
    "jamba": Family(
        columns=("intermediate_size",),
        rule=rules.scaled_softmax,
        sparse=readers.periodic,
    ),
    "kolibri1": Family(
        rule=rules.chosen_sigmoid_if_normed,
        shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size"),
        selection_bias=True,
    ),
    "laguna": Family(
        rule=rules.soft_capped_sigmoid,
        sparse=readers.typed(readers.every_layer),
        shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size"),
        routed_scaling=lambda fields: float(fields.get("moe_routed_scaling_factor", default=1.0)),
        selection_bias=True,
    ),
    "lara_mini": Family(
        rule=rules.softmax_if_normed,
        shared=readers.sized_shared(readers.plain, "shared_expert_intermediate_size"),
    ),
    "mellum": Family(
        rule=rules.softmax_if_normed,
        sparse=readers.typed(readers.every_layer),
    ),
    "minimax": Family(
        columns=("intermediate_size",),
        rule=rules.without_noise(rules.softmax, "router_jitter_noise"),
        elsewhere=(
            "mlp_alpha_factor",
            "linear_attn_alpha_factor",
            "full_attn_alpha_factor",
        ),
    ),
    "aria_text": Family(
        columns=("intermediate_size",),
        rule=rules.chosen_softmax,
        orientation="in_out",
        shared=readers.counted_shared(readers.plain, "intermediate_size"),
    ),
}
