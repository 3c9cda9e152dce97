"""Parameters of the experts held here: what is stored, in which order, and lossless conversions.

A layout describes storage, never mathematics. ``gate_up`` has 2F rows (F without a gate). With
F = 4 they hold, from row 0 on::

    Layout()                            g0 g1 g2 g3 u0 u1 u2 u3
    Layout(up_first=True)               u0 u1 u2 u3 g0 g1 g2 g3
    Layout(interleave=1)                g0 u0 g1 u1 g2 u2 g3 u3        (gpt-oss)
    Layout(interleave=2)                g0 g1 u0 u1 g2 g3 u2 u3
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.arguments import require_bool, require_int, require_name, require_number, require_type
from samebits.errors import must

Orientation = Literal["out_in", "in_out"]
ORIENTATIONS: tuple[Orientation, ...] = ("out_in", "in_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Say in which order the rows of ``gate_up`` hold gate and up; biases and scales follow it."""

    # Rows per alternating block of gate and up; None means two halves. 2F is a multiple of 2s.
    interleave: int | None = None
    # True: up comes before gate.
    up_first: bool = False
    # Canonical spelling, for example "halves" or "interleave=1,up_first".
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = self.interleave
        if size is not None:
            require_int("interleave", size, minimum=1)
        require_bool("up_first", self.up_first)
        blocks = "halves" if size is None else f"interleave={size}"
        object.__setattr__(self, "key", blocks + (",up_first" if self.up_first else ""))

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> "Layout":
        """Return the layout that ``key`` spells; the inverse of ``Layout.key``."""
        return _parse_layout(key)

    def block(self, columns: int) -> int:
        """Return the rows per block for ``columns`` = F; ``interleave`` must divide it."""
        size = columns if self.interleave is None else self.interleave
        if columns % size:
            rule = f"divide F = {columns} (2F must be a multiple of 2 * interleave)"
            raise ValueError(must("interleave", rule, size))
        return size


@lru_cache(maxsize=256)
def _parse_layout(key: str) -> Layout:
    match = re.fullmatch(r"(?:halves|interleave=([1-9][0-9]*))(,up_first)?", key)
    if match is None:
        raise ValueError(must("layout key", "look like halves or interleave=1,up_first", repr(key)))
    size, up_first = match.groups()
    return Layout(interleave=None if size is None else int(size), up_first=up_first is not None)


def split_gate_up(z: Tensor, layout: Layout, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return the gate and up parts of ``z`` along ``dim`` (2F entries); views if strides allow."""
    dim = dim % z.dim()
    if z.shape[dim] < 2 or z.shape[dim] % 2:
        raise ValueError(must("z", f"have 2F entries along dimension {dim}", tuple(z.shape)))
    columns = z.shape[dim] // 2
    block = layout.block(columns)
    pairs = z.unflatten(dim, (columns // block, 2, block))
    first, second = (pairs.select(dim + 1, i).flatten(dim, dim + 1) for i in (0, 1))
    return (second, first) if layout.up_first else (first, second)


def merge_gate_up(gate: Tensor, up: Tensor, layout: Layout, dim: int = -1) -> Tensor:
    """Return one tensor that holds ``gate`` and ``up`` (F entries each) by ``layout``; a copy."""
    dim = dim % gate.dim()
    block = layout.block(gate.shape[dim])
    first, second = (up, gate) if layout.up_first else (gate, up)
    blocks = [part.unflatten(dim, (-1, block)) for part in (first, second)]
    return torch.stack(blocks, dim + 1).flatten(dim, dim + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostExpertNorm:
    """Root-mean-square norm of each expert output (Muse-Spark), before the probability.

    ``v = y * scale``, ``y' = v / sqrt(mean(v²) + eps)``, all in fp32; the scale comes first.
    """

    # Added to the mean square; finite, > 0.
    eps: float
    # Canonical spelling.
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", require_number("eps", self.eps, above=0.0))
        object.__setattr__(self, "key", repr(self.eps))


_PARAMETERS = ("gate_up", "down", "gate_up_bias", "down_bias", "norm_scale")
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Hold the parameters of E experts; a plain container of the caller's tensors, never a copy.

    Raises:
        TypeError: An argument is not a tensor, or its dtype is not a float type.
        ValueError: Shapes, dtypes or devices disagree; the message names both.
    """

    # First projection, (E, 2F, H) gated or (E, F, H), any strides; (E, H, 2F) storage is a view.
    gate_up: Tensor
    # Second projection, (E, H, F), any strides.
    down: Tensor
    # Bias of the first projection, (E, 2F) or (E, F), dtype of gate_up or fp32.
    gate_up_bias: Tensor | None = None
    # Bias of the second projection, (E, H), dtype of down or fp32.
    down_bias: Tensor | None = None
    # Order of gate and up in the rows of gate_up and gate_up_bias.
    layout: Layout = Layout()
    # Norm of each expert output, with its scale; both or neither.
    norm: PostExpertNorm | None = None
    # Scale of the norm, (H,), dtype of down or fp32.
    norm_scale: Tensor | None = None

    def __post_init__(self) -> None:
        for name in _PARAMETERS:
            value, optional = getattr(self, name), name not in ("gate_up", "down")
            if not (isinstance(value, Tensor) or (value is None and optional)):
                raise TypeError(must(name, "be a tensor", type(value).__name__))
        require_type("layout", self.layout, Layout)
        if self.norm is not None:
            require_type("norm", self.norm, PostExpertNorm)
        self._check_matrices()
        if (self.norm is None) != (self.norm_scale is None):
            raise ValueError(must("norm and norm_scale", "be given together", "one of them"))
        experts, hidden, columns = self.down.shape
        self._check_vector("gate_up_bias", (experts, self.gate_up.shape[1]))
        self._check_vector("down_bias", (experts, hidden))
        self._check_vector("norm_scale", (hidden,))
        if self.gated:
            self.layout.block(columns)
        elif self.layout != Layout():
            rule = "be Layout() where there is no up part"
            raise ValueError(must("layout", rule, self.layout.key))

    def _check_matrices(self) -> None:
        if self.gate_up.dim() != 3 or self.down.dim() != 3:
            shapes = f"{tuple(self.gate_up.shape)} and {tuple(self.down.shape)}"
            raise ValueError(must("gate_up and down", "have three dimensions", shapes))
        if self.gate_up.dtype not in WEIGHT_DTYPES:
            rule = "be bfloat16, float16, float32 or float64"
            raise TypeError(must("gate_up", rule, self.gate_up.dtype))
        experts, hidden, columns = self.down.shape
        rows = self.gate_up.shape[1]
        if self.gate_up.shape[0] != experts or self.gate_up.shape[2] != hidden:
            rule = f"have shape (E, 2F or F, H) with E, H of down {tuple(self.down.shape)}"
            raise ValueError(must("gate_up", rule, tuple(self.gate_up.shape)))
        if rows not in (columns, 2 * columns):
            rule = f"have 2F or F rows with F = down.shape[2] = {columns}"
            raise ValueError(must("gate_up", rule, rows))
        if self.down.dtype != self.gate_up.dtype:
            rule = f"have the dtype of gate_up ({self.gate_up.dtype})"
            raise ValueError(must("down", rule, self.down.dtype))

    def _check_vector(self, name: str, shape: tuple[int, ...]) -> None:
        value: Tensor | None = getattr(self, name)
        if value is None:
            return
        if tuple(value.shape) != shape:
            raise ValueError(must(name, f"have shape {shape}", tuple(value.shape)))
        if value.dtype not in (self.gate_up.dtype, torch.float32):
            rule = f"be {self.gate_up.dtype} (as gate_up) or float32"
            raise ValueError(must(name, rule, value.dtype))
        if value.device != self.gate_up.device:
            rule = f"be on the device of gate_up ({self.gate_up.device})"
            raise ValueError(must(name, rule, value.device))

    @property
    def dtype(self) -> torch.dtype:
        """D: the dtype of the projections."""
        return self.gate_up.dtype

    @property
    def gated(self) -> bool:
        """True where ``gate_up`` holds a gate and an up part: 2F rows."""
        return self.gate_up.shape[1] != self.down.shape[2]

    @staticmethod
    def from_storage(
        gate_up: Tensor,
        down: Tensor,
        *,
        orientation: Orientation | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        layout: Layout | None = None,
    ) -> "ExpertWeights":
        """Return weights over stored matrices whose orientation is stated, or clear from shapes.

        Args:
            gate_up: ``(E, 2F, H)`` where orientation is "out_in", ``(E, H, 2F)`` where "in_out".
            down: ``(E, H, F)`` where orientation is "out_in", ``(E, F, H)`` where "in_out".
            orientation: None takes the one orientation that the shapes allow. A square matrix
                (H = F, H = 2F) loads either way without a shape error, so it must be stated.
            gate_up_bias: ``(E, 2F)``.
            down_bias: ``(E, H)``.
            layout: Order of gate and up; None means two halves, gate first.

        Returns:
            Views of the same memory.

        Raises:
            ValueError: The orientation is not stated and the shapes allow both, or neither.

        Determinism: no arithmetic.
        """
        if orientation is None:
            orientation = _orientation(gate_up, down)
        _check_orientation(orientation)
        if orientation == "in_out":
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return ExpertWeights(
            gate_up=gate_up,
            down=down,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            layout=Layout() if layout is None else layout,
        )

    def to_layout(self, layout: Layout) -> "ExpertWeights":
        """Return weights with gate and up reordered to ``layout``; lossless, copies ``gate_up``."""
        if layout == self.layout:
            return self
        if not self.gated:
            raise ValueError(must("layout", "be Layout() where there is no up part", layout.key))
        gate_up = merge_gate_up(*split_gate_up(self.gate_up, self.layout, 1), layout, 1)
        bias = self.gate_up_bias
        if bias is not None:
            bias = merge_gate_up(*split_gate_up(bias, self.layout), layout)
        return replace(self, gate_up=gate_up, gate_up_bias=bias, layout=layout)

    def to_storage(self, orientation: Orientation) -> "ExpertWeights":
        """Return weights whose matrices are contiguous in ``orientation``; values unchanged."""
        _check_orientation(orientation)
        if orientation == "out_in":
            return replace(self, gate_up=self.gate_up.contiguous(), down=self.down.contiguous())
        gate_up, down = (
            matrix.transpose(1, 2).contiguous().transpose(1, 2)
            for matrix in (self.gate_up, self.down)
        )
        return replace(self, gate_up=gate_up, down=down)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ExpertWeights":
        """Return weights with ``function`` applied to every tensor (``.to``, ``.detach`` …)."""
        mapped: dict[str, Any] = {n: function(t) for n, t in self.named_tensors().items()}
        return replace(self, **mapped)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by field name, in a fixed order."""
        return {n: t for n in _PARAMETERS if (t := getattr(self, n)) is not None}


def _check_orientation(orientation: str) -> None:
    require_name("orientation", orientation, ORIENTATIONS)


def _orientation(gate_up: Tensor, down: Tensor) -> Orientation:
    if gate_up.dim() != 3 or down.dim() != 3:
        shapes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise ValueError(must("gate_up and down", "have three dimensions", shapes))
    _, a, b = gate_up.shape
    _, c, d = down.shape
    out_in = b == c and a in (d, 2 * d)
    in_out = a == d and b in (c, 2 * c)
    # A square matrix fits either way on its own, whatever its partner says.
    if a == b or c == d or (out_in and in_out):
        sizes = f"gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}"
        raise ValueError(must("orientation", "be stated for square matrices", sizes))
    if not (out_in or in_out):
        rule = "fit together as (E, 2F, H), (E, H, F) or (E, H, 2F), (E, F, H)"
        sizes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise ValueError(must("gate_up and down", rule, sizes))
    return "out_in" if out_in else "in_out"
