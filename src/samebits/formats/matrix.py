"""One quantised matrix of all experts: its tensors, and the weights that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.arguments import require_int, require_type
from samebits.errors import must
from samebits.formats.codes import decode_e2m1, decode_e8m0
from samebits.formats.descriptor import MXFP4, MXFP4_SHUFFLED, WeightFormat
from samebits.formats.shuffled import (
    shuffle_scales,
    shuffle_values,
    unshuffle_scales,
    unshuffle_values,
)

_PARTS = ("values", "scales", "global_scale")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """Hold a matrix ``(E, N, K)`` in a format; the caller's tensors, never a copy.

    Raises:
        TypeError: An argument is no tensor, or has another dtype than the format's.
        ValueError: Shapes or devices disagree; the message names both.
    """

    format: WeightFormat
    # K: the contraction, in weights (not in bytes).
    columns: int
    # See the table of ``samebits.formats`` for shapes and dtypes.
    values: Tensor
    scales: Tensor
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        require_type("format", self.format, WeightFormat)
        require_int("columns", self.columns, minimum=1)
        require_type("values", self.values, Tensor)
        if self.values.dim() != 3:
            raise ValueError(must("values", "have three dimensions", tuple(self.values.shape)))
        dtypes = {
            "values": self.format.value.dtype,
            "scales": self.format.scale_dtype,
            "global_scale": torch.float32,
        }
        shapes = self.format.shapes(self.shape)
        if self.global_scale is not None and not self.format.global_scale:
            raise ValueError(must("global_scale", f"be None for {self.format}", "a tensor"))
        for name, shape in shapes.items():
            tensor: Tensor = getattr(self, name)
            require_type(name, tensor, Tensor)
            if tensor.dtype != dtypes[name]:
                rule = f"be {dtypes[name]} for {self.format}"
                raise TypeError(must(name, rule, tensor.dtype))
            if tuple(tensor.shape) != shape:
                matrix = f"a {self.format} matrix of shape {self.shape}"
                rule = f"have shape {shape} for {matrix}"
                raise ValueError(must(name, rule, tuple(tensor.shape)))
            if tensor.device != self.values.device:
                rule = f"be on the device of values ({self.values.device})"
                raise ValueError(must(name, rule, tensor.device))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return self.values.shape[0], self.values.shape[1], self.columns

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.values.device

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by field name, in a fixed order."""
        return {name: t for name in _PARTS if (t := getattr(self, name)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> "QuantizedMatrix":
        """Return the matrix with ``function`` applied to every tensor (to a device, a slice …)."""
        mapped: dict[str, Any] = {n: function(t) for n, t in self.named_tensors().items()}
        return replace(self, **mapped)

    def select(self, experts: slice | list[int]) -> "QuantizedMatrix":
        """Return the matrices of some experts: views of a slice, copies of a list's."""
        return self.map(lambda tensor: tensor[experts])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights ``(E, N, K)`` in ``dtype``, contiguous; see ``samebits.formats``.

        Formats are frozen: the result has no gradient, whatever the tensors require.

        Determinism: elementwise; one product in fp32, rounded once more to ``dtype``.
        """
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        # As a decorator of a method, torch 2.13 cannot trace it.
        with torch.no_grad():
            # One after the other, so that the fp32 numbers of a single expert exist.
            for expert in range(self.shape[0]):
                one = self.select(slice(expert, expert + 1))
                out[expert] = one._numbers().mul_(one._spread(one.scale_factors()))[0]
        return out

    def scale_factors(self) -> Tensor:
        """Return the fp32 factor of each block, ``(E, ⌈N/R⌉, ⌈K/C⌉)``, ``global_scale`` included.

        Determinism: elementwise; exact but for the product with ``global_scale``.
        """
        if self.format.shuffled:
            return decode_e8m0(unshuffle_scales(self.scales, self.columns))
        factors = decode_e8m0(self.scales) if self.format.scales == "e8m0" else self.scales.float()
        if self.global_scale is None:
            return factors
        return factors * self.global_scale[:, None, None]

    def shuffled(self) -> "QuantizedMatrix":
        """Return an MXFP4 matrix in ``mxfp4_shuffled``, which is faster: a copy, the same weights.

        Raises:
            ValueError: The format is another, or K is no multiple of 64.

        Determinism: exact.
        """
        if self.format == MXFP4_SHUFFLED:
            return self
        if self.format != MXFP4:
            raise ValueError(must("format", f"be {MXFP4} to be shuffled", self.format))
        MXFP4_SHUFFLED.check_columns(self.columns)
        return replace(
            self,
            format=MXFP4_SHUFFLED,
            values=shuffle_values(self.values),
            scales=shuffle_scales(self.scales),
        )

    def unshuffled(self) -> "QuantizedMatrix":
        """Return an ``mxfp4_shuffled`` matrix in MXFP4, a copy; others as they are.

        Determinism: exact.
        """
        if not self.format.shuffled:
            return self
        return replace(
            self,
            format=MXFP4,
            values=unshuffle_values(self.values),
            scales=unshuffle_scales(self.scales, self.columns),
        )

    def refine(self, rows: int, columns: int) -> "QuantizedMatrix":
        """Return the same weights with smaller blocks, each a copy of its block's scale.

        Args:
            rows: Rows of a block, a divisor of the format's.
            columns: Columns of a block, a divisor of the format's.

        Raises:
            TypeError: A size is no int.
            ValueError: A size is no divisor, or the format has no other block.

        Determinism: exact.
        """
        held = self.format
        for size in (rows, columns):
            require_int("block", size, minimum=1)
        if held.block == (rows, columns):
            return self
        if held.rows % rows or held.columns % columns:
            raise ValueError(must("block", f"divide {held.block}", (rows, columns)))
        smaller = WeightFormat(name=held.name, block=(rows, columns))
        _, held_rows, held_columns = smaller.shapes(self.shape)["scales"]
        # A block may be larger than the matrix.
        times = min(held.rows // rows, held_rows), min(held.columns // columns, held_columns)
        scales = self.scales.repeat_interleave(times[0], 1)[:, :held_rows]
        scales = scales.repeat_interleave(times[1], 2)[..., :held_columns]
        return replace(self, format=smaller, scales=scales.contiguous())

    def _numbers(self) -> Tensor:
        if self.format.values == "e2m1":
            values = unshuffle_values(self.values) if self.format.shuffled else self.values
            return decode_e2m1(values, self.columns)
        return self.values.float()

    def _spread(self, factors: Tensor) -> Tensor:
        """Return one factor for each weight."""
        _, rows, columns = self.shape
        factors = factors.repeat_interleave(min(self.format.columns, columns), 2)[..., :columns]
        if self.format.rows == 1:
            return factors
        return factors.repeat_interleave(min(self.format.rows, rows), 1)[:, :rows]
