"""transformers' FP8 experts as cases of `samebits check models`: packed weights, a dense truth.

The class computes with dense matrices where it finds some, so its own code on the dequantised
weights is the oracle, and the contract's loop on them the plain loop. Weights are frozen: output,
dx and the probabilities' gradient are judged.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MixtralConfig

from samebits.checks.models.protocol import Results, Run, Sizes, UnbuildableError
from samebits.formats import MXFP4, WeightFormat
from samebits.formats.packing import quantize_matrix
from samebits.integrations.transformers import fp8, tiny
from samebits.integrations.transformers.experts_case import TinyExperts
from samebits.integrations.transformers.implementations import EAGER, device
from samebits.integrations.transformers.interface import load

# Of the frozen parameters nothing is judged.
_JUDGED = ("out", "d_x", "d_topk_probs")
_SPREAD = 3.0
_OAI = {"swiglu_limit": 2.0, "swiglu_alpha": 1.702}


class Variant(NamedTuple):
    """One way in which transformers' quantizer builds the class."""

    name: str
    # Fields of the configuration, and arguments of the class.
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]


VARIANTS = (
    Variant("fp8_blocks", {"swiglu_limit": 2.0}, {"block_size": (16, 16)}),
    Variant("fp8_blocks_e8m0", _OAI, {"block_size": (16, 16), "scale_fmt": "ue8m0"}),
    Variant("fp8_one_scale", {}, {"block_size": None}),
    Variant("fp8_no_gate", {"hidden_act": "relu2"}, {"block_size": (16, 16), "has_gate": False}),
    Variant(
        "fp4",
        {"mlp_gate_softcap": 2.0, "mlp_up_softcap": 3.0},
        {"block_size": (16, 16), "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    ),
)


@dataclass(frozen=True, slots=True)
class FoundFP8:
    """A variant, with ``build``."""

    variant: Variant

    @property
    def name(self) -> str:
        """``<variant>.FP8Experts``."""
        return f"{self.variant.name}.FP8Experts"

    def build(self, *, odd: bool = False) -> "TinyFP8":
        """Build it; see ``samebits.integrations.transformers.tiny``."""
        return TinyFP8(self, tiny.ODD_SIZES if odd else tiny.DEFAULT_SIZES)


def found() -> list[FoundFP8]:
    """Return every variant.

    Determinism: in a fixed order.
    """
    return [FoundFP8(variant) for variant in VARIANTS]


class TinyFP8(TinyExperts):
    """A ``TinyExperts`` whose runs have packed weights, and whose truth has the same, dense."""

    def __init__(self, about: FoundFP8, sizes: Sizes) -> None:
        self._about = about
        self._sizes = sizes
        variant = about.variant
        arguments = dict(variant.arguments)
        if sizes.F % 16:
            # Blocks of one row: others could belong to gate and up together.
            arguments["block_size"] = arguments["block_size"] and (1, 16)
        if "expert_dtype" in arguments and (sizes.H % 2 or sizes.F % 2):
            raise UnbuildableError("FP4 holds two numbers in a byte: an odd size has no room")
        self._packed = build(sizes, variant.options, arguments)
        fill(self._packed, _SPREAD * sizes.H**-0.5)
        self._master = dense(self._packed)
        self._per_expert = frozenset()
        self._fits = None

    @property
    def name(self) -> str:
        """See ``FoundFP8.name``."""
        return self._about.name

    def run(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Run:
        """Run one implementation on the packed weights; see ``ExpertsCase.run``."""
        if implementation != EAGER and implementation not in load().fp8.ALL_FP8_EXPERTS_FUNCTIONS:
            raise NotImplementedError(f"{implementation} is not in transformers' FP8 interface")
        if implementation.startswith("deepgemm") and device().type != "cuda":
            # Like the other kernels where the package that holds them is absent.
            raise ImportError("DeepGEMM needs a CUDA device")
        return super().run(implementation, dtype, dropped=dropped, scalars=scalars)

    def _judged(self, results: Results) -> Results:
        return {name: results[name] for name in _JUDGED}

    def _runnable(self, dtype: torch.dtype) -> Any:
        del dtype
        module: Any = copy.deepcopy(self._packed)
        module.config = copy.deepcopy(self._packed.config)
        return module


def build(sizes: Sizes, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Return FP8 experts as transformers' quantizer makes them, without weights."""
    interface = load()
    gated = arguments.get("has_gate", True)
    decorated: Any = interface.moe.use_experts_implementation(
        experts_class=type("FP8Experts", (interface.fp8.FP8Experts,), {}),
        experts_interface=interface.fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=gated,
    )
    config: Any = MixtralConfig(
        num_local_experts=sizes.E, hidden_size=sizes.H, intermediate_size=sizes.F
    )
    for name, value in options.items():
        setattr(config, name, value)
    return decorated(config, **arguments)


@torch.no_grad()
def fill(module: Any, scale: float) -> None:
    """Give ``module`` random frozen weights of this standard deviation in its own format."""
    generator = torch.Generator().manual_seed(0)
    for name in (fp8.first_name(module), "down_proj"):
        values, scales = getattr(module, name), getattr(module, name + fp8.SCALE)
        packed = values.dtype == torch.int8
        experts, rows, stored = values.shape
        columns = 2 * stored if packed else stored
        block = module.block_size or (rows // scales.shape[1], stored)
        held = MXFP4 if packed else WeightFormat(name="fp8", block=tuple(block))
        weight = torch.randn(experts, rows, columns, generator=generator) * scale
        found = quantize_matrix(weight, held)
        values.view(torch.uint8).copy_(found.values.view(torch.uint8))
        if scales.dtype == torch.float32:
            scales.copy_(found.scale_factors())
        elif packed:
            scales.view(torch.uint8).copy_(found.scales)
        else:
            # The power of two below each scale: other weights, of the same size.
            exponents = torch.frexp(found.scales).exponent + 126
            scales.view(torch.uint8).copy_(exponents.to(torch.uint8))
    module.requires_grad_(False)


def dense(module: Any) -> Any:
    """Return a copy of ``module`` with its dequantised matrices in fp32, differentiable."""
    copied = copy.deepcopy(module)
    for name in (fp8.first_name(module), "down_proj"):
        weight = fp8.matrix_of(module, name).dequantize(torch.float32)
        setattr(copied, name, nn.Parameter(weight))
        ones = torch.ones(weight.shape[0], 1, 1)
        setattr(copied, name + fp8.SCALE, nn.Parameter(ones, requires_grad=False))
    return copied
