"""Adapters that PEFT saved, as those of ``LoRAExperts``: told by their names, or by their shapes.

PEFT adapts a stacked parameter with ``A`` ``(r·E, m)``, experts outermost, and ``B`` ``(n, r·E)``,
experts innermost. Which of m and n are the projection's rows is said by their sizes.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.errors import UnsupportedError, must
from samebits.formats.weights import Parameters
from samebits.weights import Layout, merge_gate_up

# PEFT's names of an expert's linear layers.
_LINEAR = re.compile(
    r"([0-9]+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.lora_(A|B)(?:\.default)?\.weight"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Each further parameter of a module wraps the adapters of those before.
_STACKED = re.compile(r"((?:base_layer\.)*)lora_(A|B)(?:\.default)?\.weight")


class Sizes(NamedTuple):
    """What the experts are whose adapters are read."""

    # E.
    num_experts: int
    # Rows of the first projection.
    rows: int
    # H.
    hidden: int
    # F.
    columns: int
    # Order of gate and up in the rows.
    layout: Layout

    @staticmethod
    def of(weights: Parameters) -> "Sizes":
        """Return the sizes of ``weights``."""
        num_experts, rows, hidden = weights.gate_up.shape
        return Sizes(num_experts, rows, hidden, weights.down.shape[2], weights.layout)


def peft_adapters(
    tensors: Mapping[str, Tensor], prefix: str, sizes: Sizes, a_over_rows: bool | None
) -> dict[str, Tensor]:
    """Return the parameters of ``LoRAExperts`` that ``tensors`` hold; see ``from_peft``.

    Determinism: exact.
    """
    held = {
        name[len(prefix) + 1 :]: tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix + ".")
    }
    for name in held:
        if not (_LINEAR.fullmatch(name) or _STACKED.fullmatch(name)):
            raise UnsupportedError(
                f"{prefix}.{name} is no adapter of a linear layer of one expert or of a stacked "
                "parameter"
            )
    stacked = {name: t for name, t in held.items() if _STACKED.fullmatch(name)}
    if not stacked:
        return _of_linear_layers(held, prefix, sizes)
    if len(stacked) != len(held):
        rule = "hold adapters of stacked parameters or of single experts, not both"
        raise ValueError(must(prefix, rule, sorted(held)))
    return _of_stacked(stacked, prefix, sizes, a_over_rows)


def _of_linear_layers(held: Mapping[str, Tensor], prefix: str, sizes: Sizes) -> dict[str, Tensor]:
    found = _by_part(held, prefix, sizes.num_experts)
    values = {}
    if "gate_proj.A" in found:
        values["gate_up_a"], values["gate_up_b"] = _joined(found, sizes.layout)
    if "down_proj.A" in found:
        values["down_a"], values["down_b"] = found["down_proj.A"], found["down_proj.B"]
    return values


def _by_part(held: Mapping[str, Tensor], prefix: str, num_experts: int) -> dict[str, Tensor]:
    """Return ``(E, …)`` tensors by part and side, for example "gate_proj.A"."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in held.items():
        match = _LINEAR.fullmatch(name)
        assert match is not None
        part = _PARTS.get(match[2], match[2])
        of_part = found.setdefault(f"{part}.{match[3]}", {})
        if int(match[1]) in of_part:
            raise ValueError(must(f"{prefix}.{name}", "be the one of its kind", "a second one"))
        of_part[int(match[1])] = tensor
    parts = {key.partition(".")[0] for key in found}
    wanted = {f"{part}.{side}" for part in parts for side in "AB"}
    if not found or wanted != set(found) or ("gate_proj" in parts) != ("up_proj" in parts):
        rule = "hold A and B of gate and up, or of down"
        raise ValueError(must(prefix, rule, sorted(found) or "nothing"))
    for key, experts_of in found.items():
        missing = sorted(set(range(num_experts)) ^ set(experts_of))
        if missing:
            raise ValueError(must(f"{prefix}: {key}", f"be of {num_experts} experts", missing))
        shapes = sorted({tuple(tensor.shape) for tensor in experts_of.values()})
        if len(shapes) > 1:
            raise ValueError(must(f"{prefix}: {key}", "have one shape", shapes))
    return {
        key: torch.stack([experts_of[e] for e in range(num_experts)])
        for key, experts_of in found.items()
    }


def _joined(found: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """Return A and B of gate and up as one: each part's rows use the part's own rank."""
    gate, up = found["gate_proj.B"], found["up_proj.B"]
    zeros = (
        gate.new_zeros(*gate.shape[:2], up.shape[2]),
        up.new_zeros(*up.shape[:2], gate.shape[2]),
    )
    rows = torch.cat([gate, zeros[0]], 2), torch.cat([zeros[1], up], 2)
    if rows[0].shape != rows[1].shape:
        raise ValueError(must("up_proj.B", f"have shape {tuple(gate.shape)}", tuple(up.shape)))
    b = merge_gate_up(*rows, layout, 1)
    return torch.cat([found["gate_proj.A"], found["up_proj.A"]], 1), b


def _of_stacked(
    held: Mapping[str, Tensor], prefix: str, sizes: Sizes, a_over_rows: bool | None
) -> dict[str, Tensor]:
    levels: dict[str, dict[str, Tensor]] = {}
    for name, tensor in held.items():
        match = _STACKED.fullmatch(name)
        assert match is not None
        pair = levels.setdefault(match[1], {})
        if match[2] in pair:
            raise ValueError(must(f"{prefix}.{name}", "be the one of its kind", "a second one"))
        pair[match[2]] = tensor
    values: dict[str, Tensor] = {}
    for level, pair in levels.items():
        where = f"{prefix}.{level}lora"
        if set(pair) != {"A", "B"}:
            raise ValueError(must(where, "hold A and B", sorted(pair)))
        part, swapped = _role(pair["A"], pair["B"], where, sizes, a_over_rows)
        if f"{part}_a" in values:
            raise ValueError(must(where, f"be the one adapter of {part}", "a second one"))
        a, b = _by_expert(pair["A"], pair["B"], sizes.num_experts, where)
        values[f"{part}_a"], values[f"{part}_b"] = (b.mT, a.mT) if swapped else (a, b)
    return values


def _role(
    a: Tensor, b: Tensor, where: str, sizes: Sizes, a_over_rows: bool | None
) -> tuple[str, bool]:
    """Return which projection a pair adapts, and whether its ``A`` is over the rows."""
    _, rows, hidden, columns, _ = sizes
    shapes = {
        ("gate_up", False): (hidden, rows),
        ("gate_up", True): (rows, hidden),
        ("down", False): (columns, hidden),
        ("down", True): (hidden, columns),
    }
    found = (a.shape[-1], b.shape[0])
    fitting = [
        role for role, shape in shapes.items() if shape == found and a_over_rows in (None, role[1])
    ]
    if not fitting:
        rule = f"be over ({hidden}, {rows}) or ({columns}, {hidden})"
        raise ValueError(must(where, rule, found))
    if len(fitting) > 1:
        said = " or ".join(f"{part}, a_over_rows={swapped}" for part, swapped in fitting)
        raise UnsupportedError(f"{where} of {found} does not say what it adapts: {said}")
    return fitting[0]


def _by_expert(a: Tensor, b: Tensor, num_experts: int, where: str) -> tuple[Tensor, Tensor]:
    """Return ``(E, r, m)`` and ``(E, n, r)``."""
    if a.shape[0] != b.shape[1] or a.shape[0] % num_experts:
        rule = f"have r·E columns of B and rows of A, with E = {num_experts}"
        raise ValueError(must(where, rule, f"{tuple(a.shape)} and {tuple(b.shape)}"))
    rank = a.shape[0] // num_experts
    by_expert = b.reshape(b.shape[0], rank, num_experts).permute(2, 0, 1)
    return a.reshape(num_experts, rank, -1), by_expert
