"""Shrink the configuration of a whole model by the names of its fields.

Names are the only handle on a configuration with two hundred fields. A model for which they do not
do does not build, and the check says so.
"""

import re
from typing import Any

from transformers import PreTrainedConfig

# First match wins. None keeps the token ids and the like inside the tiny vocabulary.
_RULES: tuple[tuple[str, int | None], ...] = (
    (r"(^|_)vocab_size$", 97),
    (r"^(hidden_size|d_model|n_embd|embed_dim|text_hidden_size)$", 64),
    (r"intermediate|ffn_dim|ffn_hidden", 48),
    (r"^(n_layers?|num_layers|depth|encoder_layers|decoder_layers|num_decoder_layers)$", 2),
    (r"^(num_attention_heads|n_heads?|attention_heads|num_heads|\w+coder_attention_heads)$", 4),
    (r"key_value_heads|kv_heads", 2),
    (r"^qk_(rope|nope)_head_dim$", 8),
    (r"head_dim$", 16),
    (r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$", 6),
    (r"^(num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts|moe_top_k)$", 2),
    (r"shared_experts$", 1),
    (r"^(n_group|topk_group|num_expert_group)$|n_groups$", 1),
    (r"lora_rank", 16),
    (r"max_position_embeddings", 128),
    (r"sliding_window|index_topk|window_size", 16),
    (r"index_n_heads", 2),
    (r"^(first_k_dense\w*|moe_layer_start_index|num_dense_layers|num_hash_layers)$", 0),
    (r"(mamba_n|mamba_num|linear_num_value|linear_num_key|num_ssm)_heads", 4),
    (r"mamba_d_head", 32),
    (r"mamba_head_dim|linear_.*_head_dim|mamba_d_state|ssm_state_size", 16),
    (r"_token(_id)?$", None),
)
_OPTIONAL_SIZE = re.compile(r"^(num_|n_|moe_int|hidden_size$|head_dim$|intermediate)")
_NOT_A_SIZE = re.compile(r"group|fused|mtp|rope")
_LAYERS = "num_hidden_layers"
_MOST_LAYERS = 5


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Make ``config`` tiny in place, its sub-configurations too, and return it.

    The model keeps one layer of each kind that its lists of layer kinds name.
    """
    fields = list(vars(config))
    depth = getattr(config, _LAYERS, None)
    lists = [name for name in fields if _per_layer(getattr(config, name, None), depth)]
    kinds = max([2, *(len(set(map(str, getattr(config, n)))) for n in lists)])
    layers = min(kinds, _MOST_LAYERS)
    rope = hasattr(config, "qk_rope_head_dim")
    for name in fields:
        value = getattr(config, name, None)
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif name in lists:
            setattr(config, name, _one_of_each(value, layers))
        elif name == _LAYERS:
            setattr(config, name, layers)
        elif name == "head_dim":
            setattr(config, name, 8 if rope else 16)
        elif _is_size(name, value):
            _set_by_rule(config, name)
    return config


def _per_layer(value: Any, depth: int | None) -> bool:
    return isinstance(value, (list, tuple)) and depth is not None and len(value) == depth > 0


def _one_of_each(values: Any, layers: int) -> list[Any]:
    """Return ``layers`` entries: each different one first, then the list from its start."""
    different = {str(value): value for value in reversed(values)}
    return [*reversed(different.values()), *values][:layers]


def _is_size(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return True
    return value is None and bool(_OPTIONAL_SIZE.search(name)) and not _NOT_A_SIZE.search(name)


def _set_by_rule(config: PreTrainedConfig, name: str) -> None:
    for pattern, size in _RULES:
        if re.search(pattern, name):
            setattr(config, name, 1 if size is None else size)
            return
