"""The experts of one layer of a checkpoint: one matrix of one expert at a time.

Everything that names and shapes can tell is checked when a layer is found, before anything is
written. Matrices come in the terms of CONTRACT, gate and up ``(F, H)`` and down ``(H, F)``, as raw
integers.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from samebits.checkpoints.files import BadFileError, Entry
from samebits.checkpoints.schemes import Kind, Part, Place, Scheme
from samebits.checkpoints.source import Folder
from samebits.errors import UnsupportedError, must
from samebits.weights import Layout, split_gate_up

PARTS: tuple[Part, ...] = ("gate", "up", "down")
KINDS: tuple[Kind, ...] = ("weight", "bias", "scale")
# Dtypes of scales that have a NaN as torch knows it.
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Matrix(NamedTuple):
    """What is stored of one part and kind of every expert."""

    dtype: str
    # Of one expert, as CONTRACT has it.
    shape: tuple[int, ...]


class Experts(Protocol):
    """One layer's experts, wherever they are."""

    root: str
    num_experts: int
    # (gate, up or down; kind) -> what is stored.
    matrices: dict[tuple[Part, Kind], Matrix]

    def read(self, part: Part, kind: Kind, expert: int) -> Tensor:
        """Return one matrix of one expert."""


class StoredExperts:
    """The experts of one layer in one folder.

    Args:
        root: What the names begin with.
        scheme: How they are stored.
        entries: The tensors.
        num_experts: E, which a flattened scheme does not say; checked where the others do.

    Raises:
        BadFileError: An expert or a part is missing, or a shape or dtype is not that of the others.
        UnsupportedError: The scheme does not say E, and it is not given.
    """

    def __init__(
        self, root: str, scheme: Scheme, entries: dict[Place, Entry], num_experts: int | None
    ) -> None:
        self.root = root
        self._scheme = scheme
        self._entries = entries
        self.num_experts = self._count(num_experts)
        kinds = [k for k in KINDS if any(place.kind == k for place in entries)]
        for kind in kinds:
            self._check_complete(kind)
        if "weight" not in kinds:
            raise BadFileError(f"{root} has no weights")
        self.matrices: dict[tuple[Part, Kind], Matrix] = {}
        for kind in kinds:
            for part in scheme.parts:
                self._add(part, kind)
            self._check_shapes(kind)
        self._pair: tuple[tuple[Kind, int], tuple[Tensor, Tensor]] | None = None

    def read(self, part: Part, kind: Kind, expert: int) -> Tensor:
        """Return one matrix of one expert; see ``Experts``.

        Determinism: exact.
        """
        if part in self._scheme.parts:
            return self._stored(part, kind, expert)
        # Gate and up are asked for one after the other: what was read for the first serves both.
        if self._pair is None or self._pair[0] != (kind, expert):
            both = self._stored("gate_up", kind, expert)
            self._pair = (kind, expert), split_gate_up(both, self._layout(kind), 0)
        return self._pair[1][part == "up"]

    def _stored(self, part: Part, kind: Kind, expert: int) -> Tensor:
        if self._scheme.per_expert:
            value = self._entries[Place(self.root, part, kind, expert)].read()
        else:
            entry = self._entries[Place(self.root, part, kind, None)]
            value = entry.read(expert, self.num_experts)
            value = value if self._scheme.flattened else value[0]
        return value.T if part in self._scheme.transposed and kind != "bias" else value

    def _layout(self, kind: Kind) -> Layout:
        if kind != "scale":
            return self._scheme.layout
        weight, scale = self.matrices["gate", "weight"], self.matrices["gate", "scale"]
        return layout_of_scales(self._scheme.layout, weight.shape[0], scale.shape[0])

    def _count(self, given: int | None) -> int:
        scheme = self._scheme
        if scheme.flattened:
            if given is None:
                hint = "hint: say how many experts there are with --experts"
                raise UnsupportedError(f"scheme {scheme.name} does not say how many\n{hint}")
            return given
        if scheme.per_expert:
            found = 1 + max(place.expert for place in self._entries if place.expert is not None)
        else:
            entry = next(iter(self._entries.values()))
            found = entry.shape[0] if entry.shape else 0
        if given not in (None, found):
            raise BadFileError(must(self.root, f"hold {given} experts", found))
        return found

    def _check_complete(self, kind: Kind) -> None:
        own = self._scheme.per_expert
        experts: Iterable[int | None] = range(self.num_experts) if own else (None,)
        for expert in experts:
            for part in self._scheme.parts:
                place = Place(self.root, part, kind, expert)
                if place not in self._entries:
                    raise BadFileError(
                        f"{self._scheme.name_of(place)} is missing: {self.root} has "
                        f"{self.num_experts} experts, and a {kind} of each projection"
                    )

    def _add(self, part: Part, kind: Kind) -> None:
        """Note what is stored of ``part``, which must be alike for every expert."""
        held = [e for place, e in self._entries.items() if place[1:3] == (part, kind)]
        first = _alike(held)
        dimensions = 1 if kind == "bias" else 2
        stacked = not self._scheme.per_expert and not self._scheme.flattened
        if len(first.shape) != dimensions + stacked:
            rule = f"have {dimensions + stacked} dimensions in scheme {self._scheme.key}"
            raise BadFileError(must(first.name, rule, first.shape))
        if 0 in first.shape:
            raise BadFileError(must(first.name, "have no dimension of 0", first.shape))
        shape = first.shape[1:] if stacked else first.shape
        if stacked and first.shape[0] != self.num_experts:
            raise BadFileError(must(first.name, f"hold {self.num_experts} experts", first.shape))
        if self._scheme.flattened:
            if shape[0] % self.num_experts:
                rule = f"have a multiple of {self.num_experts} rows, one block for each expert"
                raise BadFileError(must(first.name, rule, shape[0]))
            shape = (shape[0] // self.num_experts, *shape[1:])
        if part in self._scheme.transposed and kind != "bias":
            shape = shape[::-1]
        if part != "gate_up":
            self.matrices[part, kind] = Matrix(first.dtype, shape)
            return
        if shape[0] % 2:
            raise BadFileError(must(first.name, "have as many rows of gate as of up", first.shape))
        half = Matrix(first.dtype, (shape[0] // 2, *shape[1:]))
        self.matrices["gate", kind] = self.matrices["up", kind] = half

    def _check_shapes(self, kind: Kind) -> None:
        gate, up, down = (self.matrices[part, kind] for part in PARTS)
        if gate != up:
            rule = f"be {gate.dtype} of shape {gate.shape}, as its gate"
            raise BadFileError(must(f"up of {self.root}", rule, f"{up.dtype} of shape {up.shape}"))
        columns, hidden = self.matrices["gate", "weight"].shape
        expected = {"weight": (hidden, columns), "bias": (hidden,), "scale": gate.shape[::-1]}[kind]
        if kind == "bias" and gate.shape != (columns,):
            raise BadFileError(must(f"bias of {self.root}", f"have F = {columns}", gate.shape))
        if down.shape != expected:
            rule = f"have shape {expected} (out, in) in scheme {self._scheme.key}, by its gate"
            raise BadFileError(must(f"down {kind} of {self.root}", rule, down.shape))


def _alike(held: list[Entry]) -> Entry:
    first = held[0]
    for entry in held:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            rule = f"be {first.dtype} of shape {first.shape}, as {first.name}"
            raise BadFileError(must(entry.name, rule, f"{entry.dtype} of shape {entry.shape}"))
    return first


def layout_of_scales(layout: Layout, rows: int, scale_rows: int) -> Layout:
    """Return the layout of the scales of blocks of rows, where the rows have ``layout``.

    Args:
        layout: Order of gate and up in the rows of a gate_up matrix.
        rows: F.
        scale_rows: Rows of scales of one of both.

    Raises:
        UnsupportedError: A block holds rows of gate and of up, or may do so.

    Determinism: a function of its arguments.
    """
    block = rows // scale_rows
    # The last block of a matrix may be shorter. Then rows / scale_rows is no power of two, or there
    # is one block only; block sizes are powers of two.
    whole = rows % scale_rows == 0 and block & (block - 1) == 0 and scale_rows > 1
    size = layout.interleave
    if not whole or (size is not None and size % block):
        raise UnsupportedError(
            f"scales of {scale_rows} blocks of {rows} rows cannot follow layout {layout.key}: a "
            "block must not hold rows of gate and of up\nhint: dequantise first"
        )
    return layout if size is None else Layout(interleave=size // block, up_first=layout.up_first)


def layers_of(
    folder: Folder, scheme: Scheme, num_experts: int | None
) -> tuple[dict[str, StoredExperts], list[Entry]]:
    """Return the experts of every layer, by root, and the tensors that are not experts'.

    Raises:
        BadFileError, UnsupportedError: See ``StoredExperts``.

    Determinism: exact.
    """
    places: dict[str, dict[Place, Entry]] = {}
    others = []
    for name, entry in folder.entries.items():
        place = scheme.place_of(name)
        if place is None:
            others.append(entry)
        else:
            places.setdefault(place.root, {})[place] = entry
    for entry in others:
        _refuse_unknown(entry.name, places)
    layers = {root: StoredExperts(root, scheme, held, num_experts) for root, held in places.items()}
    return layers, others


def _refuse_unknown(name: str, roots: Iterable[str]) -> None:
    """Refuse a tensor of experts that the scheme does not name: it would be left as it was."""
    for root in roots:
        tail = name.removeprefix(root + ".")
        if tail != name and (root.endswith("experts") or "_proj" in tail):
            raise UnsupportedError(
                f"{name} belongs to the experts, and no scheme says how it is stored\n"
                "hint: packed formats are dequantised first"
            )


def check_scales(layer: Experts) -> None:
    """Raise ``BadFileError`` where a scale is NaN.

    Determinism: exact.
    """
    for (part, kind), matrix in layer.matrices.items():
        if kind != "scale":
            continue
        for expert in range(layer.num_experts):
            value = layer.read(part, kind, expert)
            if matrix.dtype == "F8_E8M0":
                bad = value == 0xFF
            elif matrix.dtype in _FLOATS:
                bad = value.view(_FLOATS[matrix.dtype]).isnan()
            else:
                raise BadFileError(f"scales of {layer.root} have dtype {matrix.dtype}")
            if bool(bad.any()):
                raise BadFileError(f"a scale of {part} of expert {expert} in {layer.root} is NaN")
