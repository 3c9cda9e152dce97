"""What one way of spelling mixture-of-experts layers is: a row of ``FAMILIES``."""

from collections.abc import Callable
from dataclasses import dataclass

from samebits.integrations.configs import readers
from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.readers import Layers, OfLayer, SharedOfLayer
from samebits.integrations.configs.rules import Rule
from samebits.problem import ProbPlacement
from samebits.weights import Layout, Orientation


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family spells its layers; every function reads ``Fields``."""

    # Names of F of a routed expert.
    columns: tuple[str, ...] = ("moe_intermediate_size",)
    rule: Rule
    activation: OfLayer = readers.plain
    # How many layers there are.
    layers: Callable[[Fields], int] = readers.number_of_layers
    # Name of H.
    hidden: str = "hidden_size"
    # Name of the size in which the experts work, where the model has one.
    latent: str | None = None
    # The layers that have experts.
    sparse: Layers = readers.every_layer
    shared: SharedOfLayer = lambda fields, layer, layers: None
    routed_scaling: Callable[[Fields], float] = lambda fields: 1.0
    identity_experts: Callable[[Fields], int] = lambda fields: 0
    # What a layer does that LayerSpec does not say.
    beyond: Callable[[Fields, int], str | None] = lambda fields, layer: None
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    layout: Layout = Layout()
    orientation: Orientation = "out_in"
    biased: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    # Fields that look like options of the experts and belong to something else.
    elsewhere: tuple[str, ...] = ()
