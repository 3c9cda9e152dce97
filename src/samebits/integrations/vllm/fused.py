"""vLLM's ``fused_experts``, by its signature, on ``samebits.experts``."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from samebits.arguments import require_bool, require_indices
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.integrations.vllm.activations import activation_of
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import ExpertWeights, Layout

# Of the first and of the second projection.
Biases = tuple[Tensor | None, Tensor | None]

# Of a FusedMoEQuantConfig: what says that something is quantised, in an order that never reads a
# scale whose type vLLM asserts before the dtype that explains it.
_QUANTISED = (
    "quant_dtype",
    "weight_quant_dtype",
    "block_shape",
    "per_act_token_quant",
    "per_out_ch_quant",
    "w1_scale",
    "w2_scale",
    "a1_scale",
    "a2_scale",
    "w1_zp",
    "w2_zp",
    "g1_alphas",
    "g2_alphas",
    "a1_gscale",
    "a2_gscale",
)
# Its fields that are read here, by the names above or below, and those that mean something for
# quantised experts alone.
_READ = {"_a1", "_a2", "_w1", "_w2", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"}
_QUANTISED_ONLY = {"is_scale_swizzled", "is_scale_transposed", "mx_alignment"}


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: Any = None,
) -> Tensor:
    """Return the weighted sum of each token's experts; vLLM's arguments, this library's bits.

    Args:
        hidden_states: ``(T, H)``.
        w1: ``(E, 2F, H)``, gate and up as ``activation`` says; ``(E, F, H)`` for ``*_no_mul``.
        w2: ``(E, H, F)``.
        topk_weights: ``(T, K)``; bf16 and fp16 are widened.
        topk_ids: ``(T, K)``, global ids; -1 drops the slot.
        activation: A ``MoEActivation``, or its value; see ``activation_of``.
        apply_router_weight_on_input: Multiply the tokens, ``FC1_INPUT``, instead of the outputs.
        global_num_experts: N with an ``expert_map``; -1 or E without.
        expert_map: ``(N,)``, the local expert of each global one, -1 for those of other ranks.
        quant_config: A ``FusedMoEQuantConfig`` of unquantised experts: ``w1_bias``, ``w2_bias``,
            ``gemm1_clamp_limit``, ``gemm1_alpha`` and ``gemm1_beta`` are read.

    Returns:
        ``(T, H)`` in the dtype of ``hidden_states``; differentiable, which vLLM's is not.

    Raises:
        TypeError: An argument is not of its type.
        UnsupportedError: Something is quantised, an option is not known, or vLLM's own function
            would multiply a bias by the probability.
        ValueError: Arguments disagree, or (checked on CPU) ``expert_map`` is no such map.

    Determinism: see ``samebits.experts``.
    """
    require_bool("apply_router_weight_on_input", apply_router_weight_on_input)
    biases, options = options_of(quant_config)
    chosen, layout = activation_of(activation, **options)
    if apply_router_weight_on_input and biases[0] is not None:
        raise UnsupportedError(
            "apply_router_weight_on_input with w1_bias: vLLM's function multiplies the bias too, "
            "and its layer does not"
        )
    ids = local_ids(topk_ids, expert_map, w1.shape[0], global_num_experts)
    return experts(
        hidden_states,
        Routing(ids, wide(topk_weights)),
        weights_of(w1, w2, biases, layout),
        chosen,
        placement=(
            ProbPlacement.FC1_INPUT if apply_router_weight_on_input else ProbPlacement.FC2_OUTPUT
        ),
    )


def weights_of(w1: Tensor, w2: Tensor, biases: Biases, layout: Layout) -> ExpertWeights:
    """Return vLLM's parameters as this library's: views of the same memory.

    Determinism: exact.
    """
    first, second = biases
    return ExpertWeights(gate_up=w1, down=w2, gate_up_bias=first, down_bias=second, layout=layout)


def wide(probs: Tensor) -> Tensor:
    """Return probabilities in fp32, exactly; fp64 stays.

    Determinism: exact.
    """
    return probs.float() if probs.dtype in (torch.bfloat16, torch.float16) else probs


def local_ids(
    topk_ids: Tensor, expert_map: Tensor | None, num_local: int, global_num_experts: int
) -> Tensor:
    """Return the local expert of each slot, -1 where it is another rank's or dropped.

    Raises:
        TypeError: Ids or the map are no integers.
        ValueError: ``global_num_experts`` disagrees, or (checked on CPU) ``expert_map`` holds
            something else than -1 and each local expert once.

    Determinism: exact.
    """
    ids = require_indices("topk_ids", topk_ids)
    if expert_map is None:
        if global_num_experts not in (-1, num_local):
            rule = f"be -1 or E = {num_local} without an expert_map"
            raise ValueError(must("global_num_experts", rule, global_num_experts))
        return ids
    expert_map = require_indices("expert_map", expert_map)
    total = expert_map.numel()
    if expert_map.dim() != 1 or global_num_experts not in (-1, total):
        rule = f"have shape (global_num_experts,) = ({global_num_experts},)"
        raise ValueError(must("expert_map", rule, tuple(expert_map.shape)))
    if expert_map.device.type == "cpu":
        held = expert_map[expert_map != -1].tolist()
        if sorted(held) != list(range(num_local)):
            rule = f"hold each of {num_local} local experts once, and -1"
            raise ValueError(must("expert_map", rule, expert_map.tolist()))
    inside = (ids >= 0) & (ids < total)
    local = expert_map.to(ids)[ids.clamp(0, total - 1).long()]
    return torch.where(inside, local, -1)


def options_of(quant_config: Any) -> tuple[Biases, dict[str, Any]]:
    """Return both biases and the options of the activation that a ``FusedMoEQuantConfig`` holds.

    Raises:
        TypeError: It has no attributes, as a dict.
        UnsupportedError: It says that something is quantised, or has an option that is not known.

    Determinism: a function of its argument.
    """
    if quant_config is None:
        return (None, None), {}
    if not (dataclasses.is_dataclass(quant_config) or hasattr(quant_config, "__dict__")):
        kind = type(quant_config).__name__  # a dict's entries would be read by nobody
        raise TypeError(must("quant_config", "be a FusedMoEQuantConfig", kind))
    for name in _QUANTISED:
        value = getattr(quant_config, name, None)
        if value is not None and value is not False:
            said = value if not isinstance(value, Tensor) else tuple(value.shape)
            raise UnsupportedError(
                f"quant_config.{name} = {said}: quantised experts of vLLM do not run here"
            )
    if dataclasses.is_dataclass(quant_config):
        _refuse_unread(quant_config)
    biases = (getattr(quant_config, "w1_bias", None), getattr(quant_config, "w2_bias", None))
    return biases, {
        "limit": getattr(quant_config, "gemm1_clamp_limit", None),
        "alpha": getattr(quant_config, "gemm1_alpha", None),
        "beta": getattr(quant_config, "gemm1_beta", None),
    }


def _refuse_unread(quant_config: Any) -> None:
    for field in dataclasses.fields(quant_config):
        if field.name in _READ | _QUANTISED_ONLY:
            continue
        value = getattr(quant_config, field.name)
        default = None if field.default is dataclasses.MISSING else field.default
        if value is not None and value != default:
            raise UnsupportedError(
                f"quant_config.{field.name} = {value!r} is an option of this vLLM that samebits "
                "does not read"
            )
