"""Read and write safetensors files piece by piece, as raw elements.

A file is 8 bytes of header length, a JSON header (name → dtype, shape, byte range), and the bytes.
The safetensors library writes a file from tensors that are all in memory; here a file may be larger
than that. Elements are moved as integers of their size, so that no value can change, whatever its
format: signs of zeros, NaN payloads and packed formats included.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from samebits.errors import must

# Header dtype -> bytes of an element.
ITEM_BYTES: Mapping[str, int] = (
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 2)
    | dict.fromkeys(("I32", "U32", "F32"), 4)
    | dict.fromkeys(("I64", "U64", "F64"), 8)
)
_CONTAINERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24
# A header longer than this is not one; the format's own bound.
_LONGEST_HEADER = 100_000_000


class BadFileError(ValueError):
    """A file of a checkpoint is damaged or does not hold what it should; the message names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    path: Path
    name: str
    # As the header spells it, for example "BF16".
    dtype: str
    shape: tuple[int, ...]
    # Position of its first byte in the file.
    start: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return self.elements * ITEM_BYTES[self.dtype]

    def read(self, index: int = 0, pieces: int = 1) -> Tensor:
        """Return piece ``index`` of ``pieces`` equal ones along the first dimension, as integers.

        Args:
            index: Which piece.
            pieces: In how many the first dimension is cut; 1 reads the whole tensor.

        Raises:
            BadFileError: The file ends before the tensor does.

        Determinism: exact.
        """
        size = self.bytes // pieces
        shape = (self.shape[0] // pieces, *self.shape[1:]) if self.shape else ()
        container = _CONTAINERS[ITEM_BYTES[self.dtype]]
        if not size:
            return torch.empty(shape, dtype=container)
        content = self._bytes(index * size, size)
        return torch.frombuffer(content, dtype=container).reshape(shape)

    def chunks(self) -> Iterator[bytearray]:
        """Yield the bytes of the tensor, a few megabytes at a time."""
        for start in range(0, self.bytes, _CHUNK):
            yield self._bytes(start, min(_CHUNK, self.bytes - start))

    def _bytes(self, start: int, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + start)
            while view:
                taken = file.readinto(view)
                if not taken:
                    raise BadFileError(f"{self.path} ends within {self.name}: it is truncated")
                view = view[taken:]
        return content


def bytes_of(elements: Tensor) -> bytearray:
    """Return the bytes of a tensor of integers, in memory order of its shape.

    Determinism: exact.
    """
    # Through a buffer of our own: a tensor lends its memory to numpy only, which may be absent.
    content = bytearray(elements.numel() * elements.element_size())
    if content:
        torch.frombuffer(content, dtype=elements.dtype).copy_(elements.reshape(-1))
    return content


def entries_of(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata.

    Raises:
        BadFileError: The file is truncated, or is no safetensors file.
        OSError: It cannot be read.

    Determinism: exact.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise BadFileError(f"{path} is no safetensors file, or its header is truncated")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (RecursionError, ValueError) as error:
        raise BadFileError(f"{path} is no safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise BadFileError(f"{path} is no safetensors file: its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadFileError(f"{path}: its header's __metadata__ is no object of texts")
    found = {name: _entry(path, name, said, 8 + length) for name, said in header.items()}
    end = max((entry.start + entry.bytes for entry in found.values()), default=8 + length)
    if end != size:
        state = "it is truncated" if size < end else "bytes follow its last tensor"
        raise BadFileError(f"{path} must have {end} bytes, as its header says, got {size}: {state}")
    position = 8 + length
    for entry in sorted(found.values(), key=lambda entry: (entry.start, entry.bytes)):
        if entry.start != position:
            state = "shares bytes with" if entry.start < position else "leaves bytes unused after"
            raise BadFileError(f"{path}: {entry.name} {state} the tensor before it")
        position += entry.bytes
    return found, metadata


def _entry(path: Path, name: str, said: Any, base: int) -> Entry:
    try:
        dtype, shape = str(said["dtype"]), _integers(said["shape"])
        start, end = _integers(said["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadFileError(f"{path}: its header does not describe {name}") from error
    if dtype not in ITEM_BYTES:
        raise BadFileError(f"{path}: {name} has dtype {dtype}, which is not known")
    entry = Entry(path, name, dtype, shape, base + start)
    if end - start != entry.bytes:
        raise BadFileError(
            must(f"{path}: {name} of shape {shape}", f"have {entry.bytes} bytes", end - start)
        )
    return entry


def _integers(values: Any) -> tuple[int, ...]:
    """Return what must be a list of integers >= 0: JSON has texts, fractions and truth values."""
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise TypeError(must("sizes", "be integers >= 0", values))
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return self.elements * ITEM_BYTES[self.dtype]


def header_of(shapes: Iterable[Shape], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file that holds ``shapes``, in this order.

    Determinism: a function of its arguments.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for shape in shapes:
        end = position + shape.bytes
        header[shape.name] = {
            "dtype": shape.dtype,
            "shape": list(shape.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Aligned, so that a reader may map the tensors in place.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Writer:
    """Write one file front to back; it gets its name when it is whole, and not before.

    Until then it is called ``<name>.partial``; an exception removes it, a killed process leaves it.
    """

    def __init__(self, path: Path, shapes: Iterable[Shape], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        shapes = list(shapes)
        self._header = header_of(shapes, metadata)
        self._expected = len(self._header) + sum(shape.bytes for shape in shapes)
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb")
        self._file.write(self._header)
        return self

    def write(self, content: bytearray) -> None:
        """Append the next bytes."""
        assert self._file is not None
        self._file.write(content)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        written = self._file.tell()
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is not None:
            self._partial.unlink()
            return
        assert written == self._expected, (written, self._expected)
        self._partial.replace(self._path)


def write_text(path: Path, text: str) -> None:
    """Write a text file that gets its name when it is whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
