"""The library as one of vLLM's experts kernels. Importing this module imports vLLM.

``SamebitsRoutedExperts`` takes the place of vLLM's experts layer (an out-of-tree layer, in vLLM's
words) and gives it ``SamebitsExperts`` instead of the kernel that vLLM would have chosen.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from samebits.errors import UnsupportedError
from samebits.experts import experts
from samebits.integrations.vllm.activations import activation_of
from samebits.integrations.vllm.fused import local_ids, options_of, weights_of, wide
from samebits.routing import Routing


class SamebitsExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Both projections, the activation, the weighting and the sum over a token's experts.

    Raises:
        UnsupportedError: The layer's configuration asks for something that is not computed here.
        ValueError: Options of its activation disagree.
    """

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        reason = why_not(moe_config)
        if reason is not None:
            raise UnsupportedError(f"samebits under vLLM: {reason}")
        _, options = options_of(quant_config)
        options = {
            "limit": _first(options.get("limit"), moe_config.swiglu_limit),
            "alpha": _first(options.get("alpha"), moe_config.swiglu_alpha),
            "beta": _first(options.get("beta"), moe_config.swiglu_beta),
            "situ_beta": moe_config.activation_situ_beta,
            "situ_linear_beta": moe_config.activation_situ_linear_beta,
        }
        self._activation, self._layout = activation_of(moe_config.activation, **options)

    @staticmethod
    def activation_format() -> Any:
        """Tokens come as ``(T, H)``."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() or current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation.value != "relu2")

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not (
            moe_parallel_config.use_all2all_kernels
            or moe_parallel_config.use_passthrough_all2all
            or moe_parallel_config.enable_eplb
        )

    @staticmethod
    def _supports_batch_invariance() -> bool:
        # On a GPU every backend's rows are independent of the number of tokens.
        return not current_platform.is_cpu()

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Nothing is left to be weighted or added."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, *sizes: Any, **named: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of two scratch buffers, which are not used, and of the output."""
        tokens = named["M"] if "M" in named else sizes[0]
        hidden = named["K"] if "K" in named else sizes[2]
        return (0,), (0,), (tokens, hidden)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write each token's weighted sum to ``output``; see ``samebits.experts``.

        Raises:
            UnsupportedError: The call asks for something that is not computed here.
            ValueError: See ``samebits.experts``.

        Determinism: see ``samebits.experts``.
        """
        del workspace13, workspace2, expert_tokens_meta
        if activation != self.moe_config.activation:
            raise UnsupportedError(f"the layer was built for {self.moe_config.activation}")
        if a1q_scale is not None or a2_scale is not None:
            raise UnsupportedError("scales of activations: quantised experts do not run here")
        if self.post_gemm2_hook is not None:
            raise UnsupportedError("post_gemm2_hook takes the rows before their sum")
        probs = wide(topk_weights)
        if apply_router_weight_on_input:
            # vLLM's prepare step has multiplied the tokens.
            probs = torch.ones_like(probs)
        experts(
            hidden_states,
            Routing(local_ids(topk_ids, expert_map, w1.shape[0], global_num_experts), probs),
            weights_of(w1, w2, (self.w1_bias, self.w2_bias), self._layout),
            self._activation,
            out=output,
        )


class SamebitsRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """vLLM's experts layer, with ``SamebitsExperts`` as its kernel."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        reason = why_not(moe_config)
        if type(method) is not UnquantizedFusedMoEMethod:
            reason = f"its experts are quantised ({type(method).__name__})"
        if reason is not None:
            raise UnsupportedError(
                f"samebits cannot be the experts of {prefix}: {reason}\n"
                "hint: load it unquantised, or take samebits out of VLLM_PLUGINS"
            )
        # This backend leaves the weights as they were loaded.
        method.unquantized_backend = UnquantizedMoeBackend.TRITON
        method.experts_cls = SamebitsExperts
        return method


def why_not(moe_config: Any) -> str | None:
    """Return why a layer of vLLM cannot run on this library; None where it can.

    Determinism: a function of its argument.
    """
    parallel = moe_config.moe_parallel_config
    if moe_config.moe_backend != "auto":
        return f"--moe-backend {moe_config.moe_backend} asks for another backend"
    if moe_config.is_lora_enabled:
        return "LoRA of vLLM adds to the inside of its own kernels"
    if parallel.enable_eplb:
        return (
            "expert load balancing renumbers experts while it serves, and their order is the "
            "order of a token's sum"
        )
    if parallel.use_all2all_kernels or parallel.use_passthrough_all2all:
        return f"all-to-all dispatch ({parallel.all2all_backend}) was never tried with it"
    batched = parallel.use_batched_activation_format
    wanted = mk.FusedMoEActivationFormat
    supported, reason = SamebitsExperts.is_supported_config(
        SamebitsExperts, moe_config, None, None,
        wanted.BatchedExperts if batched else wanted.Standard,
    )  # fmt: skip
    return None if supported else reason


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
