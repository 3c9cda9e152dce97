"""Quantised parameters of the experts held here: two matrices in a format, the rest as it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.arguments import require_type
from samebits.errors import must
from samebits.formats.codes import together
from samebits.formats.descriptor import FormatPair, WeightFormat
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.packing import ScaleRule, quantize_matrix
from samebits.weights import (
    WEIGHT_DTYPES,
    ExpertWeights,
    Layout,
    PostExpertNorm,
    merge_gate_up,
    split_gate_up,
)

_VECTORS = ("gate_up_bias", "down_bias", "norm_scale")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeights:
    """Hold the parameters of E experts with both projections quantised; never a copy.

    ``experts(x, routing, Q)`` has the bits of ``experts(x, routing, dequantize(Q))``. The matrices
    are frozen: they have no gradient.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes, dtypes or devices disagree; the message names both.
    """

    # First projection, (E, 2F or F, H), rows in the order of layout.
    gate_up: QuantizedMatrix
    # Second projection, (E, H, F).
    down: QuantizedMatrix
    # D: the dtype that the weights stand for, and of the layer's input.
    dtype: torch.dtype
    # See ``ExpertWeights``; D or fp32.
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    layout: Layout = Layout()
    norm: PostExpertNorm | None = None
    norm_scale: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("gate_up", "down"):
            require_type(name, getattr(self, name), QuantizedMatrix)
        if self.dtype not in WEIGHT_DTYPES:
            rule = "be bfloat16, float16, float32 or float64"
            raise TypeError(must("dtype", rule, self.dtype))
        if self.down.device != self.gate_up.device:
            rule = f"be on the device of gate_up ({self.gate_up.device})"
            raise ValueError(must("down", rule, self.down.device))
        # Raises where the formats do not go together.
        _ = self.format
        # The rules of dense weights, on matrices of these shapes that take no memory.
        gate_up, down = (
            torch.empty(1, dtype=self.dtype, device=self.gate_up.device).expand(matrix.shape)
            for matrix in (self.gate_up, self.down)
        )
        ExpertWeights(gate_up=gate_up, down=down, **self._rest())

    def _rest(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in (*_VECTORS, "layout", "norm")}

    @property
    def gated(self) -> bool:
        """True where ``gate_up`` holds a gate and an up part: 2F rows."""
        return self.gate_up.shape[1] != self.down.shape[2]

    @property
    def format(self) -> FormatPair:
        """The formats of the two projections."""
        return FormatPair(gate_up=self.gate_up.format, down=self.down.format)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name ("gate_up.values" …), in a fixed order."""
        tensors = {
            f"{name}.{part}": tensor
            for name in ("gate_up", "down")
            for part, tensor in getattr(self, name).named_tensors().items()
        }
        return tensors | self.unquantized()

    def unquantized(self) -> dict[str, Tensor]:
        """Return the biases and the scale of the norm that are present, by field name."""
        return {n: t for n in _VECTORS if (t := getattr(self, n)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> "QuantizedWeights":
        """Return weights with ``function`` applied to every tensor (to a device, a slice …)."""
        changed: dict[str, Any] = {n: function(t) for n, t in self.unquantized().items()}
        changed |= {n: getattr(self, n).map(function) for n in ("gate_up", "down")}
        return replace(self, **changed)

    def to(self, dtype: torch.dtype) -> "QuantizedWeights":
        """Return weights that stand for numbers in ``dtype``; what is not quantised is cast."""
        changed: dict[str, Any] = {n: t.to(dtype) for n, t in self.unquantized().items()}
        return replace(self, dtype=dtype, **changed)

    def shuffled(self) -> "QuantizedWeights":
        """Return MXFP4 weights as ``mxfp4_shuffled``: the same weights and bits, in less time.

        A copy, to be made once, when a checkpoint is loaded; biases and norm are taken as they are.

        Raises:
            ValueError: The format is another, or H or F is no multiple of 64.
        """
        return replace(self, gate_up=self.gate_up.shuffled(), down=self.down.shuffled())

    def unshuffled(self) -> "QuantizedWeights":
        """Return ``mxfp4_shuffled`` weights as MXFP4, a copy; others as they are."""
        return replace(self, gate_up=self.gate_up.unshuffled(), down=self.down.unshuffled())

    def to_layout(self, layout: Layout) -> "QuantizedWeights":
        """Return weights with gate and up reordered to ``layout``; the same weights, a copy.

        Blocks of several rows become blocks of one row, which may then stand in any order.
        """
        require_type("layout", layout, Layout)
        if layout == self.layout:
            return self
        if not self.gated:
            raise ValueError(must("layout", "be Layout() where there is no up part", layout.key))

        def reordered(tensor: Tensor) -> Tensor:
            def merged(parts: list[Tensor]) -> Tensor:
                gate, up = parts
                return merge_gate_up(gate, up, layout, 1)

            return together(merged, split_gate_up(tensor, self.layout, 1))

        if self.gate_up.format.shuffled:
            return self.unshuffled().to_layout(layout).shuffled()
        held = self.gate_up.refine(1, self.gate_up.format.columns)
        gate_up = replace(held, values=reordered(held.values), scales=reordered(held.scales))
        bias = None if self.gate_up_bias is None else reordered(self.gate_up_bias)
        return replace(self, gate_up=gate_up, gate_up_bias=bias, layout=layout)


# What ``samebits.experts`` computes with.
Parameters = ExpertWeights | QuantizedWeights


def quantize(
    weights: ExpertWeights,
    weight_format: WeightFormat | FormatPair,
    scale_rule: ScaleRule | None = None,
) -> QuantizedWeights:
    """Return ``weights`` with both projections in a format.

    Args:
        weights: Dense parameters; biases and norm are taken as they are.
        weight_format: The format, for example ``samebits.formats.MXFP4``, or one for each
            projection.
        scale_rule: "floor" or "round_up", for E8M0 scales only; None means "round_up" there. See
            ``samebits.formats.packing``.

    Raises:
        TypeError: See ``quantize_matrix``.
        ValueError: See ``quantize_matrix``.

    Determinism: exact; see ``quantize_matrix``.
    """
    require_type("weights", weights, ExpertWeights)
    if isinstance(weight_format, FormatPair):
        first, second = weight_format.gate_up, weight_format.down
    else:
        first = second = weight_format
    return QuantizedWeights(
        gate_up=quantize_matrix(weights.gate_up, first, scale_rule),
        down=quantize_matrix(weights.down, second, scale_rule),
        dtype=weights.dtype,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        layout=weights.layout,
        norm=weights.norm,
        norm_scale=weights.norm_scale,
    )


def dequantize(weights: QuantizedWeights) -> ExpertWeights:
    """Return the dense parameters that quantised ones stand for, in their dtype D.

    Determinism: elementwise; see ``samebits.formats``.
    """
    require_type("weights", weights, QuantizedWeights)
    return ExpertWeights(
        gate_up=weights.gate_up.dequantize(weights.dtype),
        down=weights.down.dequantize(weights.dtype),
        **weights._rest(),
    )
