"""What a format is, apart from tensors: kinds of values and scales, and the block of one scale."""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from samebits.arguments import require_int, require_name, require_type
from samebits.errors import must
from samebits.formats.shuffled import COLUMNS, SCALED


class ValueKind(NamedTuple):
    """How one number is stored."""

    # Bits of one number; 4 means two in a byte.
    bits: int
    # Dtype of the tensor that holds it.
    dtype: torch.dtype
    # The largest magnitude, as mantissa * 2**exponent with a mantissa in [0.5, 1).
    mantissa: float
    exponent: int

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return self.mantissa * 2.0**self.exponent

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 8 // self.bits


VALUES: dict[str, ValueKind] = {
    "e4m3": ValueKind(8, torch.float8_e4m3fn, 0.875, 9),
    "e2m1": ValueKind(4, torch.uint8, 0.75, 3),
}
SCALES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}


class _Row(NamedTuple):
    values: str
    scales: str
    # None: the key states it.
    block: tuple[int, int] | None
    global_scale: bool
    shuffled: bool = False


# A new format is a row here, and its decoding in ``codes`` where its kinds are new.
_FORMATS: dict[str, _Row] = {
    "fp8": _Row("e4m3", "fp32", None, False),
    "mxfp8": _Row("e4m3", "e8m0", (1, 32), False),
    "mxfp4": _Row("e2m1", "e8m0", (1, 32), False),
    "mxfp4_shuffled": _Row("e2m1", "e8m0", (1, 32), False, shuffled=True),
    "nvfp4": _Row("e2m1", "e4m3", (1, 16), True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Say how a matrix of weights is stored; see ``samebits.formats`` for shapes and meaning.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: The name is unknown, or the block is not one of the format.
    """

    # "fp8", "mxfp8", "mxfp4", "mxfp4_shuffled" or "nvfp4".
    name: str
    # Rows and columns that share a scale; None takes the only one that the format has.
    block: tuple[int, int] | None = None
    # Kind of the values: "e4m3" or "e2m1".
    values: str = field(init=False, repr=False, compare=False)
    # Kind of the scales: "fp32", "e8m0" or "e4m3".
    scales: str = field(init=False, repr=False, compare=False)
    # True: each expert has an fp32 factor of its own.
    global_scale: bool = field(init=False, repr=False, compare=False)
    # True: in the order in which kernels multiply it, see ``samebits.formats.shuffled``.
    shuffled: bool = field(init=False, repr=False, compare=False)
    # Canonical spelling, for example "mxfp4" or "fp8_128x128".
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_name("format", self.name, _FORMATS)
        row = _FORMATS[self.name]
        block = row.block if self.block is None else self.block
        if block is None:
            raise ValueError(must("block", f"be stated for {self.name}", None))
        if not isinstance(block, tuple) or len(block) != 2:
            raise TypeError(must("block", "be a tuple of rows and columns", repr(block)))
        for size in block:
            require_int("block", size, minimum=1)
        if row.block not in (None, block):
            raise ValueError(must("block", f"be {row.block} for {self.name}", block))
        key = self.name if row.block else f"{self.name}_{block[0]}x{block[1]}"
        derived = {"block": block, "key": key} | row._asdict() | {"block": block}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> "WeightFormat":
        """Return the format that ``key`` spells; the inverse of ``WeightFormat.key``."""
        return _parse(key)

    @property
    def rows(self) -> int:
        """Rows of a block: R."""
        assert self.block is not None
        return self.block[0]

    @property
    def columns(self) -> int:
        """Columns of a block: C."""
        assert self.block is not None
        return self.block[1]

    @property
    def value(self) -> ValueKind:
        """How one value is stored."""
        return VALUES[self.values]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the tensor of scales."""
        return SCALES[self.scales]

    @property
    def bits(self) -> float:
        """Bits of a weight, its share of a scale included."""
        return self.value.bits + 8.0 * self.scale_dtype.itemsize / (self.rows * self.columns)

    def shapes(self, matrix: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that hold a matrix of shape ``(E, N, K)``, by name.

        Raises:
            ValueError: No matrix of the format has so many columns.
        """
        experts, rows, columns = matrix
        self.check_columns(columns)
        shapes: dict[str, tuple[int, ...]] = {
            "values": (experts, rows, -(-columns // self.value.per_byte)),
            "scales": (experts, -(-rows // self.rows), -(-columns // self.columns)),
        }
        if self.shuffled:
            shapes["scales"] = (experts, -(-columns // SCALED), rows, SCALED // self.columns)
        if self.global_scale:
            shapes["global_scale"] = (experts,)
        return shapes

    def check_columns(self, columns: int) -> None:
        """Raise ``ValueError`` unless a matrix can have so many columns (K)."""
        if self.shuffled and columns % COLUMNS:
            raise ValueError(must("K", f"be a multiple of {COLUMNS} for {self}", columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPair:
    """The formats of the two projections; they differ at most in their blocks."""

    gate_up: WeightFormat
    down: WeightFormat
    # Canonical spelling: one key, or "gate_up/down" where they differ.
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_type("gate_up", self.gate_up, WeightFormat)
        require_type("down", self.down, WeightFormat)
        first, second = self.gate_up, self.down
        if first.name != second.name:
            rule = f"be of the kind of gate_up ({first.name})"
            raise ValueError(must("format of down", rule, second.name))
        key = first.key if first == second else f"{first.key}/{second.key}"
        object.__setattr__(self, "key", key)

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> "FormatPair":
        """Return the pair that ``key`` spells; the inverse of ``FormatPair.key``."""
        first, _, second = key.partition("/")
        pair = FormatPair(
            gate_up=WeightFormat.parse(first), down=WeightFormat.parse(second or first)
        )
        if pair.key != key:
            raise ValueError(must("format", f"be spelled {pair.key}", repr(key)))
        return pair


@lru_cache(maxsize=256)
def _parse(key: str) -> WeightFormat:
    match = re.fullmatch(r"([a-z0-9]+(?:_[a-z]+)?)(?:_([1-9][0-9]*)x([1-9][0-9]*))?", key)
    if match is None:
        raise ValueError(must("format", "look like mxfp4 or fp8_128x128", repr(key)))
    name, rows, columns = match.groups()
    if rows is None:
        return WeightFormat(name=name)
    found = WeightFormat(name=name, block=(int(rows), int(columns)))
    if found.key != key:
        raise ValueError(must("format", f"be spelled {found.key}", repr(key)))
    return found


FP8 = WeightFormat(name="fp8", block=(128, 128))
MXFP8 = WeightFormat(name="mxfp8")
MXFP4 = WeightFormat(name="mxfp4")
MXFP4_SHUFFLED = WeightFormat(name="mxfp4_shuffled")
NVFP4 = WeightFormat(name="nvfp4")
# Of rows of activations, beside weights in FP8 blocks of 128 columns.
ROWS_FP8 = WeightFormat(name="fp8", block=(1, 128))


def require_rows(row_format: WeightFormat) -> None:
    """Raise unless ``row_format`` is a format of rows of activations.

    Raises:
        TypeError: It is no format.
        ValueError: It is none of rows: a block has several, or its values are no E4M3.
    """
    require_type("row_format", row_format, WeightFormat)
    if row_format.rows != 1 or row_format.values != "e4m3":
        raise ValueError(must("row_format", "be fp8_1x128 or mxfp8", row_format))


def check_row_format(row_format: WeightFormat, weights: FormatPair | None) -> None:
    """Raise unless rows of activations in ``row_format`` can be multiplied with such weights.

    Raises:
        TypeError: ``row_format`` is no format.
        ValueError: It is none of rows, or its scales and columns are not those of the weights; None
            are weights that are not quantised.
    """
    require_rows(row_format)
    if weights is None:
        raise ValueError(must("row_format", "be None where weights are not quantised", row_format))
    for name, held in (("gate_up", weights.gate_up), ("down", weights.down)):
        if (held.scales, held.columns) != (row_format.scales, row_format.columns):
            rule = f"have the scales and the columns of the weights' blocks ({name}: {held})"
            raise ValueError(must("row_format", rule, row_format))
