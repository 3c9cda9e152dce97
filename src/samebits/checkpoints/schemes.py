"""How checkpoints name and store the parameters of experts.

A name is ``<root>.<tail>``; the root ends in ``experts`` (or ``moe``) and stays as it is, the tail
is a template of the scheme. Matrices of one expert, in the terms of CONTRACT, are gate and up
``(F, H)``, and down ``(H, F)``.

===============  ===================================================  ============================
scheme           tail of a weight                                     stored
===============  ===================================================  ============================
``hf``           ``{e}.gate_proj.weight``, ``up_proj``, ``down_proj`` one matrix each
``mixtral``      ``{e}.w1.weight`` (gate), ``w3`` (up), ``w2``        one matrix each
``separate``     ``gate_proj.weight``, ``up_proj``, ``down_proj``     ``(E, F, H)``, ``(E, H, F)``
``stacked``      ``gate_up_proj``, ``down_proj``                      ``(E, 2F, H)``, ``(E, H, F)``
``interleaved``  as ``stacked``                                       rows g0 u0 g1 u1 …
``transposed``   as ``stacked``                                       ``(E, H, 2F)``, ``(E, F, H)``
``gpt-oss``      as ``stacked``                                       transposed and interleaved
``dbrx``         ``mlp.w1`` (gate), ``mlp.v1`` (up), ``mlp.w2``       ``(E·F, H)`` each
``megatron``     ``linear_fc1.weight{e}``, ``linear_fc2.weight{e}``   ``(2F, H)``, ``(H, F)``
``sequential``   ``local_experts.{e}.linear_fc1.weight``              ``(2F, H)``, ``(H, F)``
===============  ===================================================  ============================
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from samebits.errors import must, unknown
from samebits.weights import Layout

Part = Literal["gate", "up", "gate_up", "down"]
Kind = Literal["weight", "bias", "scale"]
_ROOT = r"(?P<root>(?:.*\.)?(?:experts|moe))\."
_EXPERT = r"(?P<expert>0|[1-9][0-9]*)"


class Place(NamedTuple):
    """Where a tensor belongs: which layer's, which part, of which expert (None: of all)."""

    root: str
    part: Part
    kind: Kind
    expert: int | None


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of naming and storing; see the module docstring."""

    name: str
    # (part, kind) -> tail; "{e}" is the expert.
    tails: Mapping[tuple[Part, Kind], str]
    # Order of gate and up in the rows of a gate_up tensor.
    layout: Layout = Layout()
    # Parts whose matrices are stored as (in, out).
    transposed: frozenset[Part] = frozenset()
    # The experts' matrices are one behind the other in the first dimension.
    flattened: bool = False

    @property
    def per_expert(self) -> bool:
        """Whether each expert has tensors of its own."""
        return "{e}" in next(iter(self.tails.values()))

    @property
    def key(self) -> str:
        """Canonical spelling; see ``parse_scheme``."""
        plain = SCHEMES[self.name].layout == self.layout
        return self.name if plain else f"{self.name}:{self.layout.key}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that have tensors, in order."""
        return tuple(dict.fromkeys(part for part, _ in self.tails))

    def name_of(self, place: Place) -> str:
        """Return the name of the tensor at ``place``."""
        tail = self.tails[place.part, place.kind]
        return f"{place.root}.{tail.format(e=place.expert)}"

    def place_of(self, name: str) -> Place | None:
        """Return where the tensor called ``name`` belongs, or None where this scheme has it not."""
        for (part, kind), tail in self.tails.items():
            match = re.fullmatch(_ROOT + _pattern(tail), name)
            if match is not None:
                expert = match["expert"] if self.per_expert else None
                return Place(match["root"], part, kind, None if expert is None else int(expert))
        return None


@lru_cache(maxsize=256)
def _pattern(tail: str) -> str:
    return re.escape(tail).replace(re.escape("{e}"), _EXPERT)


def _projections(gate: str, up: str, down: str, prefix: str) -> dict[tuple[Part, Kind], str]:
    names: dict[Part, str] = {"gate": gate, "up": up, "down": down}
    ends: dict[Kind, str] = {"weight": "weight", "bias": "bias", "scale": "weight_scale_inv"}
    return {(p, k): f"{prefix}{n}.{end}" for p, n in names.items() for k, end in ends.items()}


_STACKED: dict[tuple[Part, Kind], str] = {
    ("gate_up", "weight"): "gate_up_proj",
    ("down", "weight"): "down_proj",
    ("gate_up", "bias"): "gate_up_proj_bias",
    ("down", "bias"): "down_proj_bias",
}
# Of weights in FP8 blocks; known for this way of storing only.
_SCALED: dict[tuple[Part, Kind], str] = {
    **_STACKED,
    ("gate_up", "scale"): "gate_up_proj_scale_inv",
    ("down", "scale"): "down_proj_scale_inv",
}
_BOTH: frozenset[Part] = frozenset({"gate_up", "down"})
_ONE = Layout(interleave=1)


def _megatron(template: str) -> dict[tuple[Part, Kind], str]:
    names: dict[Part, str] = {"gate_up": "linear_fc1", "down": "linear_fc2"}
    kinds: tuple[Kind, ...] = ("weight", "bias")
    return {(p, k): template.format(n, k) for p, n in names.items() for k in kinds}


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("hf", _projections("gate_proj", "up_proj", "down_proj", "{e}.")),
        Scheme("mixtral", _projections("w1", "w3", "w2", "{e}.")),
        Scheme("separate", _projections("gate_proj", "up_proj", "down_proj", "")),
        Scheme("stacked", _SCALED),
        Scheme("interleaved", _STACKED, layout=_ONE),
        Scheme("transposed", _STACKED, transposed=_BOTH),
        Scheme("gpt-oss", _STACKED, layout=_ONE, transposed=_BOTH),
        Scheme(
            "dbrx",
            {
                ("gate", "weight"): "mlp.w1",
                ("up", "weight"): "mlp.v1",
                ("down", "weight"): "mlp.w2",
            },
            transposed=frozenset({"down"}),
            flattened=True,
        ),
        Scheme("megatron", _megatron("{}.{}{{e}}")),
        Scheme("sequential", _megatron("local_experts.{{e}}.{}.{}")),
    )
}


def parse_scheme(text: str) -> Scheme:
    """Return the scheme of a name, or of ``name:layout`` as in ``megatron:interleave=32``.

    Raises:
        ValueError: There is no such scheme, or it has no gate and up in one tensor to lay out.

    Determinism: a function of its argument.
    """
    name, colon, layout = text.partition(":")
    if name not in SCHEMES:
        raise ValueError(unknown("scheme", name, SCHEMES))
    scheme = SCHEMES[name]
    if not colon:
        return scheme
    if "gate_up" not in scheme.parts:
        rule = "have no layout where gate and up are stored apart"
        raise ValueError(must(f"scheme {name}", rule, layout))
    return replace(scheme, layout=Layout.parse(layout))
