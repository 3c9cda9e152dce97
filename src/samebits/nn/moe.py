"""A whole mixture-of-experts layer: router, experts, and what models put around them."""

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from samebits.arguments import require_bool, require_int, require_number, require_type
from samebits.backends.call import check_count
from samebits.backends.operator import autocast_dtype
from samebits.errors import must
from samebits.nn.linear import RowLinear, project, require_floats
from samebits.nn.losses import expert_counts, load_balancing_loss, router_z_loss
from samebits.nn.quantized import AnyExperts, require_experts
from samebits.nn.router import Router, RouterOutput
from samebits.nn.sums import Parts, add_parts
from samebits.routing import Routing, RoutingRule

# The gate of shared experts: a router of one expert.
_GATE = RoutingRule(topk=1, score="sigmoid")


class MoEOutput(NamedTuple):
    """The output of a layer, and what its router is trained and balanced with; tensors only.

    Returned, never stored in the module: activation checkpointing runs a forward twice, and state
    would count twice; and only what a forward returns survives compilation and reentrant
    checkpointing with its gradient.
    """

    # The shape of x.
    out: Tensor
    # Scalar, 1 at perfect balance; see ``load_balancing_loss``. Not multiplied by a coefficient.
    balance_loss: Tensor
    # Scalar; see ``router_z_loss``. Not multiplied by a coefficient.
    z_loss: Tensor
    # (N,) int64, slots of each expert; for ``Router.update_selection_bias``.
    counts: Tensor


class MoE(nn.Module):
    """Route each token, run its experts, and add what the model has beside them.

    With D the dtype of ``x`` and every sum in fp32::

        v      = x, or D(x · latent_downᵀ)                         # latent_size
        routed = Σ_k p_k · expert_k(v), unrounded; or D(D(routed) · latent_upᵀ)
        routed = routed + (Σ_k p_k over identity experts) · x      # identity_experts
        out    = D(routed_scaling · routed + gate · shared(x))     # shared, shared_gate

    The router and the shared experts always see ``x`` itself.

    Args:
        router: Chooses among ``experts.num_experts + identity_experts`` experts.
        experts: The routed experts.
        shared: Experts that every token goes to: an ``Experts`` with ``num_experts=1`` and its own
            activation; several shared experts are one with the sum of their sizes.
        shared_gate: Multiply the shared output by ``sigmoid(x · shared_gateᵀ)``, in fp32
            (Qwen2-MoE); otherwise by 1.
        latent_size: Size in which the routed experts work, between two projections (Nemotron-3);
            None means H.
        identity_experts: Number of experts, behind the real ones, that return their input
            (LongCat's zero experts).
        routed_scaling: Multiplied into the routed sum, after the experts (MiniMax-M3); a factor on
            the probabilities is ``RoutingRule.scaling_factor``.

    Raises:
        TypeError: A part has the wrong type.
        ValueError: The parts do not fit together; the message names both sizes.
    """

    def __init__(
        self,
        *,
        router: Router,
        experts: AnyExperts,
        shared: AnyExperts | None = None,
        shared_gate: bool = False,
        latent_size: int | None = None,
        identity_experts: int = 0,
        routed_scaling: float = 1.0,
    ) -> None:
        super().__init__()
        require_type("router", router, Router)
        require_experts("experts", experts)
        require_bool("shared_gate", shared_gate)
        require_int("identity_experts", identity_experts, minimum=0)
        if latent_size is not None:
            require_int("latent_size", latent_size, minimum=1)
        hidden = router.hidden_size
        _check_parts(router, experts, latent_size, identity_experts)
        _check_shared(shared, shared_gate, hidden)
        _check_fp64(router, experts, shared)
        self.router = router
        self.experts = experts
        self.shared = shared
        self.latent_size = latent_size
        self.identity_experts = identity_experts
        # As text, because a float attribute may go stale in a compiled graph.
        self._routed_scaling = repr(require_number("routed_scaling", routed_scaling, above=0.0))
        self.shared_gate = None
        self.latent_down = None
        self.latent_up = None
        held = experts.weights
        place = {"device": held.gate_up.device, "dtype": held.dtype}
        if shared_gate:
            self.shared_gate = RowLinear(hidden, 1, bias=False, **place)
        if latent_size is not None:
            self.latent_down = RowLinear(hidden, latent_size, bias=False, **place)
            self.latent_up = RowLinear(latent_size, hidden, bias=False, **place)

    @property
    def routed_scaling(self) -> float:
        """Factor of the routed sum."""
        return float(self._routed_scaling)

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        losses: Literal[False] = False,
        topk_ids: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        losses: Literal[True],
        topk_ids: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> MoEOutput: ...

    def forward(
        self,
        x: Tensor,
        *,
        losses: bool = False,
        topk_ids: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor | MoEOutput:
        """Return the output of the layer, with ``losses`` also what trains its router.

        Args:
            x: ``(…, H)`` in the dtype of the parameters (any, under autocast).
            losses: True returns ``MoEOutput``; the output has the same bits either way.
            topk_ids: ``(T, K)``, a recorded choice to replay; see ``Routing.from_logits``.
            num_valid_tokens: ``(1,)`` int32 on the device of ``x``; of the T flattened tokens,
                those from there on are not read, get 0 and count in no loss.

        Returns:
            A tensor of the shape of ``x``, or ``MoEOutput``.

        Raises:
            TypeError: An argument has the wrong type or kind of dtype.
            ValueError: Shapes or dtypes disagree; the message names both.
            UnsupportedError: The backend (or every backend) cannot run this layer.

        Determinism: bitwise repeatable; row independent where the backend of ``experts`` is.
        """
        require_floats("x", x)
        require_bool("losses", losses)
        hidden = self.router.hidden_size
        if x.dim() == 0 or x.shape[-1] != hidden:
            rule = f"have shape (…, H) with H = {hidden}"
            raise ValueError(must("x", rule, tuple(x.shape)))
        rows = x.reshape(-1, hidden)
        valid = None
        if num_valid_tokens is not None:
            check_count(num_valid_tokens, rows)
            valid = torch.arange(rows.shape[0], device=x.device) < num_valid_tokens
            rows = torch.where(valid[:, None], rows, 0.0)
        routed = self.router(rows, topk_ids)
        out = self._output(rows, routed.routing, num_valid_tokens).reshape(x.shape)
        return self._with_losses(out, routed, valid) if losses else out

    def _output(self, x: Tensor, routing: Routing, count: Tensor | None) -> Tensor:
        dtype = _working_dtype(x)
        real = self._real(routing)
        bare = self.latent_up is None and self.shared is None and not self.identity_experts
        if bare and self._routed_scaling == "1.0":
            out: Tensor = self.experts(x, real, num_valid_tokens=count)
            return out
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.latent_down is not None and self.latent_up is not None:
            latent = self.experts(self.latent_down(x), real, num_valid_tokens=count)
            routed = self.latent_up(latent).to(wide)
        else:
            routed = self.experts(x, real, out_dtype=wide, num_valid_tokens=count)
        shared = None
        if self.shared is not None:
            gate = self._shared_routing(x, wide)
            shared = self.shared(x, gate, out_dtype=wide, num_valid_tokens=count)
        identity = x.to(dtype) if self.identity_experts else None
        parts = Parts(routed, identity, routing.topk_ids, routing.topk_probs, shared)
        identities = range(self.experts.num_experts, self.router.num_experts)
        return add_parts(parts, identities, self._routed_scaling, dtype)

    def _real(self, routing: Routing) -> Routing:
        """Return the routing with the slots of identity experts dropped."""
        if not self.identity_experts:
            return routing
        real = self.experts.num_experts
        ids = routing.topk_ids
        ids = torch.where((ids >= real) & (ids <= self.router.num_experts), -1, ids)
        return Routing(ids, routing.topk_probs, real)

    def _shared_routing(self, x: Tensor, wide: torch.dtype) -> Routing:
        ids = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        if self.shared_gate is None:
            return Routing(ids, torch.ones(ids.shape, dtype=wide, device=x.device), 1)
        gate = project(x.to(wide), self.shared_gate.weight.to(wide))
        return Routing.from_logits(gate, _GATE, topk_ids=ids)

    def _with_losses(self, out: Tensor, routed: RouterOutput, valid: Tensor | None) -> MoEOutput:
        ids, logits = routed.routing.topk_ids, routed.logits
        if valid is not None:
            ids = torch.where(valid[:, None], ids, -1)
        counts = expert_counts(ids, self.router.num_experts)
        balance = load_balancing_loss(self.router.shares(logits), counts, valid)
        return MoEOutput(out, balance, router_z_loss(logits, valid), counts)

    def extra_repr(self) -> str:
        """Return the options of the layer that are not neutral."""
        parts = []
        if self.latent_size is not None:
            parts.append(f"latent_size={self.latent_size}")
        if self.identity_experts:
            parts.append(f"identity_experts={self.identity_experts}")
        if self._routed_scaling != "1.0":
            parts.append(f"routed_scaling={self._routed_scaling}")
        return ", ".join(parts)


def _working_dtype(x: Tensor) -> torch.dtype:
    dtype = autocast_dtype(x.device)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


def _check_parts(
    router: Router, experts: AnyExperts, latent_size: int | None, identity_experts: int
) -> None:
    total = experts.num_experts + identity_experts
    if router.num_experts != total:
        sum_ = f"{experts.num_experts} + {identity_experts}"
        rule = f"be experts.num_experts + identity_experts = {sum_}"
        raise ValueError(must("router.num_experts", rule, router.num_experts))
    source = "router.hidden_size" if latent_size is None else "latent_size"
    size = router.hidden_size if latent_size is None else latent_size
    if experts.hidden_size != size:
        raise ValueError(must("experts.hidden_size", f"be {source} = {size}", experts.hidden_size))


def _check_shared(shared: AnyExperts | None, shared_gate: bool, hidden: int) -> None:
    if shared is None:
        if shared_gate:
            rule = "be False without shared, which alone uses it"
            raise ValueError(must("shared_gate", rule, True))
        return
    require_experts("shared", shared)
    if shared.num_experts != 1:
        raise ValueError(must("shared.num_experts", "be 1", shared.num_experts))
    if shared.hidden_size != hidden:
        rule = f"be router.hidden_size = {hidden}"
        raise ValueError(must("shared.hidden_size", rule, shared.hidden_size))


def _check_fp64(router: Router, experts: AnyExperts, shared: AnyExperts | None) -> None:
    """Raise where fp64, in which sums are taken in fp64, meets a narrower part."""
    dtypes = {"router": router.weight.dtype, "experts": experts.weights.dtype}
    if shared is not None:
        dtypes["shared"] = shared.weights.dtype
    if torch.float64 in dtypes.values() and set(dtypes.values()) != {torch.float64}:
        actual = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(must("router, experts and shared", "all be float64, or none", actual))
