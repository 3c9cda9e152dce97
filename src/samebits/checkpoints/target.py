"""The tensors of a checkpoint to be written, and where their bytes come from."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from samebits.checkpoints.files import Entry, Shape, bytes_of
from samebits.checkpoints.layers import KINDS, Experts, Matrix, layout_of_scales
from samebits.checkpoints.schemes import Kind, Part, Place, Scheme
from samebits.errors import UnsupportedError, must
from samebits.weights import Layout, merge_gate_up


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor, and a source of its bytes, a piece at a time."""

    shape: Shape
    pieces: Callable[[], Iterator[bytearray]]


def copied(entry: Entry) -> Output:
    """Return a tensor that stays as it is."""
    return Output(Shape(entry.name, entry.dtype, entry.shape), entry.chunks)


def outputs_of(layer: Experts, scheme: Scheme) -> list[Output]:
    """Return the tensors of one layer's experts, stored as ``scheme`` does.

    Raises:
        UnsupportedError: The scheme has no place for something that the layer has.
        ValueError: Its blocks do not divide F.

    Determinism: exact.
    """
    kinds = [kind for kind in KINDS if ("down", kind) in layer.matrices]
    for kind in kinds:
        if ("down", kind) not in scheme.tails:
            rule = f"have no {kind} of experts, for which scheme {scheme.key} has no name"
            raise UnsupportedError(must(layer.root, rule, "one"))
    if "gate_up" in scheme.parts:
        scheme.layout.block(layer.matrices["gate", "weight"].shape[0])
    outputs = []
    for kind in kinds:
        for part in scheme.parts:
            outputs += _outputs(layer, scheme, part, kind)
    # As files of experts usually are: all of one expert side by side.
    return sorted(outputs, key=lambda output: natural(output.shape.name))


def _outputs(layer: Experts, scheme: Scheme, part: Part, kind: Kind) -> list[Output]:
    layout = _layout(layer, scheme, kind)
    matrix = layer.matrices["gate" if part == "gate_up" else part, kind]
    rows = matrix.shape[0] * (2 if part == "gate_up" else 1)
    shape = (rows, *matrix.shape[1:])
    if part in scheme.transposed and kind != "bias":
        shape = shape[::-1]
    block = partial(_block, layer, scheme, layout, part, kind)
    experts = range(layer.num_experts)
    if scheme.per_expert:
        return [
            _output(scheme, Place(layer.root, part, kind, e), matrix, shape, partial(block, (e,)))
            for e in experts
        ]
    if scheme.flattened:
        shape = (layer.num_experts * shape[0], *shape[1:])
    else:
        shape = (layer.num_experts, *shape)
    place = Place(layer.root, part, kind, None)
    return [_output(scheme, place, matrix, shape, partial(block, experts))]


def _output(
    scheme: Scheme,
    place: Place,
    matrix: Matrix,
    shape: tuple[int, ...],
    pieces: Callable[[], Iterator[bytearray]],
) -> Output:
    return Output(Shape(scheme.name_of(place), matrix.dtype, shape), pieces)


def _layout(layer: Experts, scheme: Scheme, kind: Kind) -> Layout:
    if kind != "scale" or "gate_up" not in scheme.parts:
        return scheme.layout
    weight, scale = layer.matrices["gate", "weight"], layer.matrices["gate", "scale"]
    return layout_of_scales(scheme.layout, weight.shape[0], scale.shape[0])


def _block(
    layer: Experts, scheme: Scheme, layout: Layout, part: Part, kind: Kind, experts: range
) -> Iterator[bytearray]:
    for expert in experts:
        if part == "gate_up":
            gate, up = layer.read("gate", kind, expert), layer.read("up", kind, expert)
            value = merge_gate_up(gate, up, layout, 0)
        else:
            value = layer.read(part, kind, expert)
        if part in scheme.transposed and kind != "bias":
            value = value.T
        yield bytes_of(value)


def natural(name: str) -> list[str | int]:
    """Return a sort key by which ``layers.2`` comes before ``layers.10``.

    Determinism: a function of its argument.
    """
    # Text and numbers alternate, text first: keys of two names compare like with like.
    return [int(word) if word.isdecimal() else word for word in re.split("([0-9]+)", name)]
