"""Options of Megatron-LM that one of its own paths drops, each with what to use instead."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.megatron import fields_of, megatron_activation


def conflicts(config: Any) -> list[str]:
    """Return what a configuration asks for and the path that it selects does not compute.

    Args:
        config: A ``TransformerConfig``, Megatron-LM's arguments, or a dict of fields.

    Returns:
        One line each, "<option>: <what happens>; use <alternative>"; empty where there is none.

    Raises:
        TypeError, UnsupportedError: See ``samebits.from_megatron_args``.

    Determinism: a function of the configuration.
    """
    return list(_conflicts(fields_of(config)))


def check(config: Any) -> None:
    """Raise ``ValueError`` with every conflict of a configuration; see ``conflicts``."""
    found = conflicts(config)
    if found:
        raise ValueError("\n  ".join(["Megatron-LM drops options of this configuration:", *found]))


def _conflicts(fields: Fields) -> Iterator[str]:
    activation = megatron_activation(fields)
    clamp = fields.get("activation_func_clamp_value", default=None)
    offset = fields.get("glu_linear_offset", default=0.0)
    interleave = fields.get("moe_mlp_glu_interleave_size", default=None)
    on_input = bool(fields.get("moe_apply_probs_on_input", default=False))
    options = [
        name
        for name, is_on in (
            ("activation_func_clamp_value", clamp is not None),
            ("glu_linear_offset", bool(offset)),
            ("moe_mlp_glu_interleave_size", interleave is not None),
            ("moe_apply_probs_on_input", on_input),
        )
        if is_on
    ]
    scalars = [name for name in options if "moe" not in name]
    yield from _sizes(fields, interleave)
    yield from _inference(fields, options, on_input)
    if fields.get("fp4", default=None) and [name for name in options if "input" not in name]:
        yield (
            f"fp4 with {', '.join(options)}: NVFP4 kernels compute plain halves; use BF16 or MXFP8 "
            "experts"
        )
    if fields.get("use_te_activation_func", default=False) and scalars:
        yield (
            f"use_te_activation_func with {', '.join(scalars)}: Transformer Engine's activation "
            "has neither; use bias_activation_fusion with patch_fused_swiglu(), or adapt()"
        )
    if fields.get("use_transformer_engine_op_fuser", default=False) and (offset or on_input):
        yield (
            "use_transformer_engine_op_fuser with glu_linear_offset or moe_apply_probs_on_input: "
            "the fused operators have constants of their own; use adapt()"
        )
    fused = bool(fields.get("bias_activation_fusion", default=False))
    if fused and clamp is not None and activation.alpha == 1.0 and not _fused_silu_clamps():
        yield (
            "activation_func_clamp_value with bias_activation_fusion: this megatron-core's fused "
            "SwiGLU has no clamp; use bias_activation_fusion=False, or adapt()"
        )
    if fields.get("moe_shared_expert_overlap", default=False) and scalars:
        yield (
            f"moe_shared_expert_overlap with {', '.join(scalars)}: the overlapped shared expert "
            "computes without; use moe_shared_expert_overlap=False"
        )
    if interleave is not None and not fields.get("moe_grouped_gemm", default=True):
        yield (
            "moe_mlp_glu_interleave_size without moe_grouped_gemm: SequentialMLP reads halves; use "
            "moe_grouped_gemm=True, or adapt()"
        )


def _sizes(fields: Fields, interleave: int | None) -> Iterator[str]:
    # Dense layers have the second one; experts too, where the first is absent.
    name = "moe_ffn_hidden_size"
    if not fields.get(name, default=None):
        name = "ffn_hidden_size"
    columns = fields.get(name, default=None)
    if interleave is None or not columns:
        return
    if interleave < 1 or columns % interleave:
        yield (
            f"moe_mlp_glu_interleave_size = {interleave} does not divide {name} = {columns}; use a "
            "divisor of it, or None"
        )


def _inference(fields: Fields, options: list[str], on_input: bool) -> Iterator[str]:
    if fields.get("transformer_impl", default="") != "inference_optimized":
        return
    backend = fields.get("inference_grouped_gemm_backend", default="vllm")
    backend = getattr(backend, "value", backend)
    if backend == "flashinfer" and on_input:
        yield (
            "inference_grouped_gemm_backend=flashinfer with moe_apply_probs_on_input: FlashInfer "
            "multiplies the output; use inference_functions(config)"
        )
        options = [name for name in options if name != "moe_apply_probs_on_input"]
    if options:
        yield (
            f"inference_grouped_gemm_backend={backend} with {', '.join(options)}: its experts "
            "compute plain halves and multiply the output; use inference_functions(config)"
        )


def _fused_silu_clamps() -> bool:
    """Return whether the installed megatron-core clamps in its fused SwiGLU; True without one."""
    try:
        module = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    except ImportError:
        return True
    return "clamp_value" in inspect.signature(module.weighted_bias_swiglu_impl).parameters
