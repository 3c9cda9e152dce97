"""Low-rank adapters over frozen experts, with the bits of the merged layer.

With ``W`` a projection of one expert and ``s`` the scaling::

    W' = D(fp32(W) + s · B · A)

The layer computes with ``W'``, put together at each call, as a server computes with it merged: what
is trained is what is served, to the last bit. It costs a second copy of the projections while a
call lasts, and its gradient.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from samebits.arguments import require_int, require_number, require_type
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights, dequantize
from samebits.nn.experts import Experts
from samebits.nn.quantized import QuantizedExperts
from samebits.routing import Routing
from samebits.weights import ExpertWeights, merge_gate_up

# PEFT's names of an expert's linear layers.
_PEFT = re.compile(
    r"([0-9]+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.lora_(A|B)(?:\.default)?\.weight"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class LoRAExperts(nn.Module):
    """Add trainable low-rank adapters to frozen ``Experts``.

    Parameters: ``gate_up_a`` ``(E, r, H)``, ``gate_up_b`` ``(E, 2F, r)`` with rows in the order of
    the base's layout, ``down_a`` ``(E, r, F)``, ``down_b`` ``(E, H, r)``; E is 1 where ``shared``.
    A fresh adapter has ``b = 0`` and changes no bit. Biases and norms are the base's.

    Args:
        base: The experts, quantised ones too; their parameters are frozen.
        gate_up_rank: r of the first projection; 0 leaves it as it is.
        down_rank: r of the second projection; 0 leaves it as it is.
        scaling: s, usually alpha / r; finite, > 0.
        shared: One adapter for all experts instead of one for each.
        dtype: Dtype of the adapters; None means that of the base.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Both ranks are 0, or a number is out of range.
    """

    def __init__(
        self,
        base: Experts | QuantizedExperts,
        *,
        gate_up_rank: int,
        down_rank: int,
        scaling: float,
        shared: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(base, QuantizedExperts):
            require_type("base", base, Experts)
        require_int("gate_up_rank", gate_up_rank, minimum=0)
        require_int("down_rank", down_rank, minimum=0)
        if not gate_up_rank + down_rank:
            raise ValueError(must("gate_up_rank and down_rank", "not both be 0", 0))
        # As text, because a float attribute may go stale in a compiled graph.
        self._scaling = repr(require_number("scaling", scaling, above=0.0))
        self.base = base.requires_grad_(False)
        held = base.weights
        number = 1 if shared else base.num_experts
        dtype = held.dtype if dtype is None else dtype

        def pair(
            weight: Tensor | QuantizedMatrix, rank: int
        ) -> tuple[nn.Parameter | None, nn.Parameter | None]:
            if not rank:
                return None, None
            _, rows, columns = weight.shape
            a = torch.empty(number, rank, columns, device=weight.device, dtype=dtype)
            b = torch.zeros(number, rows, rank, device=weight.device, dtype=dtype)
            return nn.Parameter(a), nn.Parameter(b)

        self.gate_up_a, self.gate_up_b = pair(held.gate_up, gate_up_rank)
        self.down_a, self.down_b = pair(held.down, down_rank)
        self.reset_parameters()

    @property
    def scaling(self) -> float:
        """The factor s."""
        return float(self._scaling)

    def reset_parameters(self) -> None:
        """Draw ``a`` as ``torch.nn.Linear`` does, and set ``b`` to 0."""
        with torch.no_grad():
            for a, b in ((self.gate_up_a, self.gate_up_b), (self.down_a, self.down_b)):
                if a is not None and b is not None:
                    a.uniform_(-(a.shape[2] ** -0.5), a.shape[2] ** -0.5)
                    b.zero_()

    @property
    def weights(self) -> ExpertWeights:
        """The merged parameters, differentiable in the adapters."""
        stored = self.base.weights
        held = dequantize(stored) if isinstance(stored, QuantizedWeights) else stored
        tensors = held.named_tensors()
        tensors["gate_up"] = self._merged(held.gate_up, self.gate_up_a, self.gate_up_b)
        tensors["down"] = self._merged(held.down, self.down_a, self.down_b)
        return ExpertWeights(layout=held.layout, norm=held.norm, **tensors)

    def _merged(self, weight: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        if a is None or b is None:
            return weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        # Autocast would narrow the product of the adapters.
        with torch.autocast(weight.device.type, enabled=False):
            delta = b.to(wide) @ a.to(wide) * (weight.new_ones((), dtype=wide) * self.scaling)
            return (weight.to(wide) + delta).to(weight.dtype)

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        *,
        expert_start: int = 0,
        out_dtype: torch.dtype | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return each token's weighted sum over its experts; see ``samebits.nn.Experts``.

        Determinism: bit for bit that of ``merge()``.
        """
        return experts(
            x,
            routing,
            self.weights,
            self.base.activation,
            placement=self.base.placement,
            backend=self.base.backend,
            expert_start=expert_start,
            out_dtype=out_dtype,
            num_valid_tokens=num_valid_tokens,
        )

    @torch.no_grad()
    def merge(self) -> Experts:
        """Copy the merged parameters into the base, in place, set ``b`` to 0, and return the base.

        Raises:
            UnsupportedError: The base is quantised: its numbers are too far apart for the adapters.

        Determinism: exact; the base then has the bits that this module had.
        """
        if isinstance(self.base, QuantizedExperts):
            raise UnsupportedError(
                f"adapters cannot be merged into {self.base.format} without changing bits; "
                "hint: LoRAExperts.weights are the merged parameters, unquantised"
            )
        self.base.load_weights(self.weights)
        for b in (self.gate_up_b, self.down_b):
            if b is not None:
                b.zero_()
        return self.base

    @classmethod
    def from_peft(
        cls,
        base: Experts | QuantizedExperts,
        tensors: Mapping[str, Tensor],
        prefix: str,
        *,
        scaling: float,
    ) -> "LoRAExperts":
        """Return adapters with the weights that PEFT saved for an expert's linear layers.

        Args:
            base: The experts that they adapt.
            tensors: Name → tensor, as in ``adapter_model.safetensors``.
            prefix: What is before the expert's number, as in
                "base_model.model.model.layers.0.mlp.experts".
            scaling: ``lora_alpha / r`` of ``adapter_config.json`` (``/ √r`` with ``use_rslora``).

        Returns:
            Adapters over the projections that PEFT adapted. Gate and up had an ``A`` each, so the
            first projection has the sum of their ranks.

        Raises:
            UnsupportedError: There are tensors below ``prefix`` of another kind, as of PEFT's
                ``target_parameters`` (which do not say which parameter is which) or of DoRA.
            ValueError: An expert or a part is missing, or a shape is wrong.

        Determinism: exact.
        """
        found = _peft_tensors(tensors, prefix, base.num_experts)
        first = next(iter(found.values()))
        a_up, b_up = None, None
        if "gate_proj.A" in found:
            a_up, b_up = _joined(found, base)
        ranks = 0 if a_up is None else a_up.shape[1], 0
        if "down_proj.A" in found:
            ranks = ranks[0], found["down_proj.A"].shape[1]
        adapted = cls(
            base, gate_up_rank=ranks[0], down_rank=ranks[1], scaling=scaling, dtype=first.dtype
        )
        values = {"gate_up_a": a_up, "gate_up_b": b_up}
        values |= {"down_a": found.get("down_proj.A"), "down_b": found.get("down_proj.B")}
        with torch.no_grad():
            for name, value in values.items():
                if value is None:
                    continue
                own = getattr(adapted, name)
                if own.shape != value.shape:
                    rule = f"have shape {tuple(own.shape)}"
                    raise ValueError(must(f"{name} of {prefix}", rule, tuple(value.shape)))
                own.copy_(value)
        return adapted


def _peft_tensors(
    tensors: Mapping[str, Tensor], prefix: str, num_experts: int
) -> dict[str, Tensor]:
    """Return ``(E, …)`` tensors by part and side, for example "gate_proj.A"."""
    held: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix + "."):
            continue
        match = _PEFT.fullmatch(name[len(prefix) + 1 :])
        if match is None:
            raise UnsupportedError(
                f"{name} is no adapter of one linear layer of one expert, which alone says where "
                "it belongs"
            )
        part = _PARTS.get(match[2], match[2])
        held.setdefault(f"{part}.{match[3]}", {})[int(match[1])] = tensor
    parts = {key.partition(".")[0] for key in held}
    wanted = {f"{part}.{side}" for part in parts for side in "AB"}
    if not held or wanted != set(held) or ("gate_proj" in parts) != ("up_proj" in parts):
        rule = "hold A and B of gate and up, or of down"
        raise ValueError(must(prefix, rule, sorted(held) or "nothing"))
    for key, experts_of in held.items():
        missing = sorted(set(range(num_experts)) ^ set(experts_of))
        if missing:
            raise ValueError(must(f"{prefix}: {key}", f"be of {num_experts} experts", missing))
    return {
        key: torch.stack([experts_of[e] for e in range(num_experts)])
        for key, experts_of in held.items()
    }


def _joined(found: Mapping[str, Tensor], base: Experts | QuantizedExperts) -> tuple[Tensor, Tensor]:
    """Return A and B of gate and up as one: each part's rows use the part's own rank."""
    gate, up = found["gate_proj.B"], found["up_proj.B"]
    zeros = (
        gate.new_zeros(*gate.shape[:2], up.shape[2]),
        up.new_zeros(*up.shape[:2], gate.shape[2]),
    )
    rows = torch.cat([gate, zeros[0]], 2), torch.cat([zeros[1], up], 2)
    if rows[0].shape != rows[1].shape:
        raise ValueError(must("up_proj.B", f"have shape {tuple(gate.shape)}", tuple(up.shape)))
    b = merge_gate_up(*rows, base.layout, 1)
    return torch.cat([found["gate_proj.A"], found["up_proj.A"]], 1), b
