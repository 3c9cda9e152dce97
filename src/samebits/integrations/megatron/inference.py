"""Drop-ins for Megatron-core's ``mcore_fused_moe`` and ``vllm_fused_moe``.

Those two take no options of the activation: what a configuration says of a clamp, an offset, an
interleave or probabilities on the input is lost there. These come from a configuration, and compute
what training computes, probability placement included.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.arguments import require_indices
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.integrations.configs.megatron import fields_of
from samebits.integrations.megatron.adapter import options_of
from samebits.routing import Routing
from samebits.weights import ExpertWeights

# Names of Megatron-core's ActivationType: whether it has a gate, and the kind of activation.
_TYPES = {"SWIGLU": (True, "silu"), "SQUARED_RELU": (False, "relu2")}


class InferenceFunctions(NamedTuple):
    """The two functions for one configuration; arguments as in Megatron-core."""

    mcore_fused_moe: Callable[..., Tensor]
    vllm_fused_moe: Callable[..., Tensor]


def inference_functions(config: Any, *, backend: str = "auto") -> InferenceFunctions:
    """Return both functions for a configuration.

    Args:
        config: A ``TransformerConfig``, Megatron-LM's arguments, or a dict of fields.
        backend: See ``samebits.experts``.

    Returns:
        Functions of ``(hidden_states, probs, fc1_weight, fc2_weight, activation_type,
        num_local_experts, local_expert_start, valid_tokens, routing_map, …)``. Rows from
        ``valid_tokens`` on are not read, and are 0. ``out`` (the dtype of the activations, or fp32)
        is written and returned; without it ``mcore_fused_moe`` returns the activations' dtype and
        ``vllm_fused_moe`` unrounded fp32. ``num_tokens_hint`` changes no bit.

    Raises:
        UnsupportedError, ValueError: See ``samebits.from_megatron_args``.

    Determinism: see ``samebits.experts``.
    """
    options = options_of(config)
    total = int(fields_of(config).get("num_moe_experts", "num_experts"))

    def run(
        hidden_states: Tensor,
        probs: Tensor,
        matrices: tuple[Any, Any],
        activation_type: Any,
        shard: tuple[int, int],
        valid_tokens: Tensor,
        routing_map: Tensor,
        out: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        _check_type(activation_type, options.activation.kind, options.activation.gated)
        for name, matrix in zip(("fc1_weight", "fc2_weight"), matrices, strict=True):
            if not isinstance(matrix, Tensor):
                kind = type(matrix).__name__
                raise UnsupportedError(f"{name} is a {kind}: only BF16, FP16 and FP32 run here")
        if matrices[0].shape[0] != shard[0]:
            rule = f"hold num_local_experts = {shard[0]} experts"
            raise ValueError(must("fc1_weight", rule, matrices[0].shape[0]))
        if out is not None and (
            out.shape != hidden_states.shape
            or out.dtype not in (hidden_states.dtype, torch.float32)
        ):
            rule = f"have shape {tuple(hidden_states.shape)}, in {hidden_states.dtype} or fp32"
            raise ValueError(must("out", rule, f"{out.dtype} {tuple(out.shape)}"))
        value = experts(
            hidden_states,
            Routing(require_indices("routing_map", routing_map), probs, total),
            ExpertWeights(gate_up=matrices[0], down=matrices[1], layout=options.layout),
            options.activation,
            placement=options.placement,
            backend=backend,
            expert_start=shard[1],
            out_dtype=dtype if out is None else out.dtype,
            num_valid_tokens=valid_tokens.reshape(1),
        )
        return value if out is None else out.copy_(value)

    def mcore_fused_moe(
        hidden_states: Tensor,
        probs: Tensor,
        fc1_weight: Any,
        fc2_weight: Any,
        activation_type: Any,
        num_local_experts: int,
        local_expert_start: int,
        valid_tokens: Tensor,
        routing_map: Tensor,
        disable_fused_quant_kernels: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the partial output of the local experts; see ``inference_functions``."""
        if disable_fused_quant_kernels:
            raise UnsupportedError("disable_fused_quant_kernels has a meaning for MXFP8 only")
        return run(
            hidden_states,
            probs,
            (fc1_weight, fc2_weight),
            activation_type,
            (num_local_experts, local_expert_start),
            valid_tokens,
            routing_map,
            out,
            hidden_states.dtype,
        )

    def vllm_fused_moe(
        hidden_states: Tensor,
        probs: Tensor,
        fc1_weight: Any,
        fc2_weight: Any,
        activation_type: Any,
        num_local_experts: int,
        local_expert_start: int,
        valid_tokens: Tensor,
        routing_map: Tensor,
        out: Tensor | None = None,
        num_tokens_hint: int | None = None,
    ) -> Tensor:
        """Return the partial output of the local experts; see ``inference_functions``."""
        if num_tokens_hint is not None and num_tokens_hint < 0:
            raise ValueError(must("num_tokens_hint", "be >= 0", num_tokens_hint))
        return run(
            hidden_states,
            probs,
            (fc1_weight, fc2_weight),
            activation_type,
            (num_local_experts, local_expert_start),
            valid_tokens,
            routing_map,
            out,
            torch.float32,
        )

    return InferenceFunctions(mcore_fused_moe, vllm_fused_moe)


def _check_type(activation_type: Any, kind: str, gated: bool) -> None:
    name = getattr(activation_type, "name", str(activation_type))
    if name not in _TYPES:
        raise UnsupportedError(must("activation_type", f"be one of {', '.join(_TYPES)}", name))
    if _TYPES[name] != (gated, kind):
        of = "gated" if gated else "not gated"
        raise ValueError(must("activation_type", f"fit the configuration's {kind}, {of}", name))
