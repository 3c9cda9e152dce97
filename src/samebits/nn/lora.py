"""Low-rank adapters over frozen experts, with the bits of the merged layer.

With ``W`` a projection of one expert and ``s`` the scaling::

    W' = D(fp32(W) + s · B · A)

The layer computes with ``W'``, put together at each call, as a server computes with it merged: what
is trained is what is served, to the last bit. It costs a second copy of the projections while a
call lasts, and its gradient.
"""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from samebits.arguments import require_int, require_number
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import Parameters, QuantizedWeights, dequantize
from samebits.nn.experts import Experts
from samebits.nn.peft import Sizes, peft_adapters
from samebits.nn.quantized import AnyExperts, QuantizedExperts, require_experts
from samebits.problem import DTYPE_NAMES, DTYPES
from samebits.routing import Routing
from samebits.weights import ExpertWeights


class LoRAExperts(nn.Module):
    """Add trainable low-rank adapters to frozen ``Experts``.

    Parameters: ``gate_up_a`` ``(E, r, H)``, ``gate_up_b`` ``(E, 2F, r)`` with rows in the order of
    the base's layout, ``down_a`` ``(E, r, F)``, ``down_b`` ``(E, H, r)``; E is 1 where ``shared``.
    A fresh adapter has ``b = 0`` and changes no weight, but a -0, which becomes +0. Biases, the
    norm and the options of a call (``recompute`` too) are the base's.

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
        UnsupportedError: The base quantises activations.
    """

    def __init__(
        self,
        base: AnyExperts,
        *,
        gate_up_rank: int,
        down_rank: int,
        scaling: float,
        shared: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_experts("base", base)
        if isinstance(base, QuantizedExperts) and base.row_format is not None:
            raise UnsupportedError(
                "adapters are merged into dense weights, beside which no rows are quantised"
                "\nhint: QuantizedExperts(…, row_format=None)"
            )
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
        if dtype not in DTYPE_NAMES:
            raise TypeError(must("dtype", f"be one of {', '.join(DTYPES)}", dtype))

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
    def num_experts(self) -> int:
        """E, the number of the base's experts."""
        return self.base.num_experts

    @property
    def weights(self) -> ExpertWeights:
        """The merged parameters, differentiable in the adapters."""
        adapters = dict(self.named_parameters(recurse=False))
        return self._adapted(self.base.weights, adapters)

    def _adapted(self, stored: Parameters, adapters: Mapping[str, Tensor]) -> ExpertWeights:
        """Return ``stored`` merged with ``adapters``, by the names of this module's parameters."""
        held = dequantize(stored) if isinstance(stored, QuantizedWeights) else stored
        tensors = held.named_tensors()
        for name in ("gate_up", "down"):
            a, b = adapters.get(f"{name}_a"), adapters.get(f"{name}_b")
            tensors[name] = self._merged(tensors[name], a, b)
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
            recompute=self._recompute,
        )

    @property
    def _recompute(self) -> bool:
        return isinstance(self.base, Experts) and self.base.recompute

    def extra_repr(self) -> str:
        """Return what sizes of parameters do not say."""
        return f"scaling={self._scaling}"

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
        self._store(self.weights)
        for b in (self.gate_up_b, self.down_b):
            if b is not None:
                b.zero_()
        return self.base

    def _store(self, weights: ExpertWeights) -> None:
        """Copy merged parameters into the base, in place."""
        assert isinstance(self.base, Experts)
        self.base.load_weights(weights)

    @classmethod
    def from_peft(
        cls,
        base: AnyExperts,
        tensors: Mapping[str, Tensor],
        prefix: str,
        *,
        scaling: float,
        a_over_rows: bool | None = None,
    ) -> "LoRAExperts":
        """Return adapters with the weights that PEFT saved.

        Either for the linear layers of single experts, or for stacked parameters
        (``target_parameters``), whose names do not say which is which: their shapes do.

        Args:
            base: The experts that they adapt, with the layout of the model that PEFT trained.
            tensors: Name → tensor, as in ``adapter_model.safetensors``.
            prefix: The name of the experts, as in "base_model.model.model.layers.0.mlp.experts".
            scaling: ``lora_alpha / r`` of ``adapter_config.json`` (``/ √r`` with ``use_rslora``).
            a_over_rows: For stacked parameters: whether ``A`` is over the projection's rows, as for
                one stored ``(E, in, out)`` whose module PEFT took for the other orientation. None
                finds it by the shapes.

        Returns:
            Adapters over the projections that PEFT adapted, in a dtype that holds all of them. Gate
            and up had an ``A`` each, so the first projection has the sum of their ranks.

        Raises:
            UnsupportedError: There are tensors below ``prefix`` of another kind (DoRA), or shapes
                that fit more than one parameter.
            ValueError: An expert or a part is missing, or a shape is wrong.

        Determinism: exact.
        """
        values = peft_adapters(tensors, prefix, Sizes.of(base.weights), a_over_rows)
        dtype = reduce(torch.promote_types, (value.dtype for value in values.values()))
        ranks = (values[n].shape[1] if n in values else 0 for n in ("gate_up_a", "down_a"))
        gate_up_rank, down_rank = ranks
        adapted = cls(
            base,
            gate_up_rank=gate_up_rank,
            down_rank=down_rank,
            scaling=scaling,
            dtype=dtype,
        )
        with torch.no_grad():
            for name, value in values.items():
                own = getattr(adapted, name)
                if own.shape != value.shape:
                    rule = f"have shape {tuple(own.shape)}"
                    raise ValueError(must(f"{name} of {prefix}", rule, tuple(value.shape)))
                own.copy_(value)
        return adapted
