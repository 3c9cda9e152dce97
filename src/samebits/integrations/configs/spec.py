"""What one mixture-of-experts layer of a model is, in the words of this library."""

from dataclasses import dataclass

import torch

from samebits.activation import Activation
from samebits.errors import UnsupportedError
from samebits.nn.experts import Experts
from samebits.nn.moe import MoE
from samebits.nn.router import Router
from samebits.problem import ProbPlacement
from samebits.routing import RoutingRule
from samebits.weights import Layout, Orientation


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """The expert that every token goes to; several shared experts are one of their summed size."""

    # F of the shared expert.
    intermediate_size: int
    # Its own function, with its own limit.
    activation: Activation = Activation()
    # Order of gate and up in its rows, as stored.
    layout: Layout = Layout()
    # Multiplied by the sigmoid of a learned gate (Qwen2-MoE).
    gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: sizes, the experts' function, storage, routing, and what stands beside them."""

    # H.
    hidden_size: int
    # F of one routed expert.
    intermediate_size: int
    # E, without identity experts.
    num_experts: int
    # The function between the projections.
    activation: Activation
    # How logits become ids and probabilities.
    rule: RoutingRule
    # Where the probability is multiplied in.
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    # Order of gate and up in the rows of the first projection, as stored.
    layout: Layout = Layout()
    # How the matrices are stored.
    orientation: Orientation = "out_in"
    # Both projections of every expert have a bias.
    biased: bool = False
    # The router's logits have a bias.
    router_bias: bool = False
    # A bias is added to the scores for the choice only.
    selection_bias: bool = False
    # The shared expert, or None.
    shared: SharedSpec | None = None
    # Experts behind the real ones that return their input (LongCat).
    identity_experts: int = 0
    # Multiplied into the routed sum; a factor on the probabilities is the rule's.
    routed_scaling: float = 1.0
    # Size in which the experts work, between two projections; None means H.
    latent_size: int | None = None
    # What the layer does that is not said here; None where nothing is left out.
    beyond: str | None = None

    def moe(
        self,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MoE:
        """Return a layer of this library with these sizes and options, and fresh parameters.

        Args:
            backend: See ``samebits.nn.Experts``.
            device: Device of the parameters; "meta" allocates nothing.
            dtype: Dtype of the parameters; None means torch's default dtype.

        Raises:
            UnsupportedError: The layer does something that ``MoE`` does not; the message says what.

        Determinism: parameters are drawn from torch's generator.
        """
        if self.beyond is not None:
            raise UnsupportedError(f"samebits.nn.MoE cannot be this layer: {self.beyond}")
        hidden = self.hidden_size
        shared = self.shared
        return MoE(
            router=Router(
                hidden_size=hidden,
                num_experts=self.num_experts + self.identity_experts,
                rule=self.rule,
                bias=self.router_bias,
                selection_bias=self.selection_bias,
                device=device,
                dtype=dtype,
            ),
            experts=Experts(
                num_experts=self.num_experts,
                hidden_size=hidden if self.latent_size is None else self.latent_size,
                intermediate_size=self.intermediate_size,
                activation=self.activation,
                placement=self.placement,
                layout=self.layout,
                orientation=self.orientation,
                gate_up_bias=self.biased,
                down_bias=self.biased,
                backend=backend,
                device=device,
                dtype=dtype,
            ),
            shared=None
            if shared is None
            else Experts(
                num_experts=1,
                hidden_size=hidden,
                intermediate_size=shared.intermediate_size,
                activation=shared.activation,
                layout=shared.layout,
                backend=backend,
                device=device,
                dtype=dtype,
            ),
            shared_gate=shared is not None and shared.gate,
            latent_size=self.latent_size,
            identity_experts=self.identity_experts,
            routed_scaling=self.routed_scaling,
        )
