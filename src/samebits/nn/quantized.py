"""Frozen experts in a low-precision format as a module: what a quantised checkpoint becomes."""

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.backends import check_name
from samebits.experts import experts
from samebits.formats.descriptor import SCALES, VALUES, WeightFormat, check_row_format
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.nn.experts import Experts
from samebits.nn.storage import guard_storage
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import Layout

_PLAIN = Activation()
# Buffers are of these dtypes, which a cast of the module leaves alone: it would round numbers.
_BYTES = {1: torch.uint8, 4: torch.int32}


class QuantizedExperts(nn.Module):
    """Hold E experts whose projections are quantised; bit for bit the dequantised layer.

    Buffers, by their name in ``state_dict``: ``gate_up_values``, ``gate_up_scales``,
    ``gate_up_global_scale`` (NVFP4 only) and the same of ``down``, as integers of their size:
    casting the module casts biases only. Biases and the norm's scale are parameters. A
    ``state_dict`` says format, dtype and layout, and is refused by a module that has others.

    Args:
        weights: The parameters; their memory is used, not copied.
        activation: The function between the projections; its default is plain SwiGLU.
        placement: Where the probability is multiplied in.
        backend: "auto", or the name of one backend, which then runs the layer or raises.
        row_format: Quantise activations too, see ``samebits.experts``; then it is another layer.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The placement or the backend is unknown, or ``row_format`` does not go with the
            format of the weights.
    """

    def __init__(
        self,
        weights: QuantizedWeights,
        activation: Activation = _PLAIN,
        *,
        placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
        backend: str = "auto",
        row_format: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        require_type("weights", weights, QuantizedWeights)
        require_type("activation", activation, Activation)
        check_name(backend)
        self.activation = activation
        self.placement = ProbPlacement(placement)
        self.backend = backend
        if row_format is not None:
            check_row_format(row_format, weights.format)
        self.row_format = row_format
        self.layout: Layout = weights.layout
        self.norm = weights.norm
        self.format = weights.format
        self.dtype = weights.dtype
        self.num_experts, self.hidden_size, self.intermediate_size = weights.down.shape
        for name in ("gate_up", "down"):
            for part, tensor in getattr(weights, name).named_tensors().items():
                integers = tensor.detach().view(_BYTES[tensor.element_size()])
                self.register_buffer(f"{name}_{part}", integers)

        def parameter(value: Tensor | None) -> nn.Parameter | None:
            return None if value is None else nn.Parameter(value)

        self.gate_up_bias = parameter(weights.gate_up_bias)
        self.down_bias = parameter(weights.down_bias)
        self.norm_scale = parameter(weights.norm_scale)
        guard_storage(self, "gate_up_values")

    @property
    def weights(self) -> QuantizedWeights:
        """The parameters: views of the module's memory."""
        return QuantizedWeights(
            gate_up=self._matrix("gate_up", self.hidden_size),
            down=self._matrix("down", self.intermediate_size),
            dtype=self.dtype,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            layout=self.layout,
            norm=self.norm,
            norm_scale=self.norm_scale,
        )

    def _matrix(self, name: str, columns: int) -> QuantizedMatrix:
        held = self.format.gate_up if name == "gate_up" else self.format.down
        dtypes = {"values": VALUES[held.values].dtype, "scales": SCALES[held.scales]}
        if held.global_scale:
            dtypes["global_scale"] = torch.float32
        tensors = {part: self._buffer(f"{name}_{part}").view(t) for part, t in dtypes.items()}
        return QuantizedMatrix(format=held, columns=columns, **tensors)

    def _buffer(self, name: str) -> Tensor:
        return self.get_buffer(name)

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

        Determinism: bit for bit that of the dequantised layer, without a ``row_format``.
        """
        return experts(
            x,
            routing,
            self.weights,
            self.activation,
            placement=self.placement,
            backend=self.backend,
            expert_start=expert_start,
            out_dtype=out_dtype,
            num_valid_tokens=num_valid_tokens,
            row_format=self.row_format,
        )

    @property
    def storage(self) -> str:
        """How buffers are stored, as a ``state_dict`` says; another is not loaded."""
        return f"{self.format} {self.dtype} {self.layout}"

    def extra_repr(self) -> str:
        """Return sizes, format and activation, and every other option that is not neutral."""
        options = {
            "placement": (self.placement.value, ProbPlacement.FC2_OUTPUT.value),
            "norm": (self.norm, None),
            "backend": (self.backend, "auto"),
            "row_format": (self.row_format, None),
        }
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, format={self.format}, "
            f"dtype={self.dtype}, activation={self.activation.key}, layout={self.layout}"
        ) + "".join(
            f", {name}={value}" for name, (value, neutral) in options.items() if value != neutral
        )


AnyExperts = Experts | QuantizedExperts


def require_experts(argument: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` holds experts, quantised or not."""
    if not isinstance(value, QuantizedExperts):
        require_type(argument, value, Experts)
