"""Experts as a module: owns the parameters in any layout and storage, and calls ``experts``."""

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.arguments import require_bool, require_int, require_name, require_type
from samebits.backends import check_name
from samebits.errors import must
from samebits.experts import experts
from samebits.nn.storage import guard_storage
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weight_gradients import Owner, WeightGradients
from samebits.weights import (
    ORIENTATIONS,
    ExpertWeights,
    Layout,
    Orientation,
    PostExpertNorm,
)

_PLAIN = Activation()
_HALVES = Layout()
_HINT = "\nhint: build ExpertWeights over the saved tensors and call load_weights"


class Experts(nn.Module):
    """Hold E experts and compute each token's weighted sum over its experts.

    Parameters, by their name in ``state_dict`` (those not asked for are absent): ``gate_up``,
    ``down``, ``gate_up_bias``, ``down_bias``, ``norm_scale``. They stay where they are: layout and
    orientation are resolved on use, so that optimizers, refits in place and captured graphs keep
    seeing the same memory.

    A ``state_dict`` carries the layout and orientation of its matrices as metadata and refuses to
    load into a module that stores them in another way; ``load_weights`` converts. A plain dict
    (safetensors) carries none: its owner has to know.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: F.
        activation: The function between the projections; its default is plain SwiGLU.
        placement: Where the probability is multiplied in.
        layout: Order of gate and up in the rows of ``gate_up`` and ``gate_up_bias``.
        orientation: "out_in" stores ``gate_up`` as ``(E, 2F, H)`` and ``down`` as ``(E, H, F)``;
            "in_out" stores ``(E, H, 2F)`` and ``(E, F, H)``, as transformers' gpt-oss does.
        gate_up_bias: Add a bias to the first projection.
        down_bias: Add a bias to the second projection.
        norm: Norm of each expert output, with a learned scale; None means none.
        backend: "auto", or the name of one backend, which then runs the layer or raises.
        weight_gradients: Where the parameters' gradients go, and when; None gives them to autograd,
            whatever attributes the parameters have.
        recompute: Keep no output of the first projection for the backward; see
            ``samebits.experts``.
        device: Device of the parameters; "meta" allocates nothing.
        dtype: Dtype of the parameters; None means torch's default dtype.

    Raises:
        TypeError: A specification has the wrong type.
        ValueError: A size, layout, orientation or backend name is not valid.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation = _PLAIN,
        placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
        layout: Layout = _HALVES,
        orientation: Orientation = "out_in",
        gate_up_bias: bool = False,
        down_bias: bool = False,
        norm: PostExpertNorm | None = None,
        backend: str = "auto",
        weight_gradients: WeightGradients | None = None,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_int("num_experts", num_experts, minimum=1)
        require_int("hidden_size", hidden_size, minimum=1)
        require_int("intermediate_size", intermediate_size, minimum=1)
        require_type("activation", activation, Activation)
        require_name("orientation", orientation, ORIENTATIONS)
        require_bool("gate_up_bias", gate_up_bias)
        require_bool("down_bias", down_bias)
        require_bool("recompute", recompute)
        check_name(backend)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation
        self.placement = ProbPlacement(placement)
        self.layout = layout
        self.orientation = orientation
        self.norm = norm
        self.backend = backend
        if weight_gradients is not None:
            require_type("weight_gradients", weight_gradients, WeightGradients)
        self.weight_gradients = weight_gradients
        self.recompute = recompute

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        def matrix(rows: int, columns: int) -> nn.Parameter:
            shape = (rows, columns) if orientation == "out_in" else (columns, rows)
            return parameter(num_experts, *shape)

        rows = activation.columns * intermediate_size
        self.gate_up = matrix(rows, hidden_size)
        self.down = matrix(hidden_size, intermediate_size)
        self.gate_up_bias = parameter(num_experts, rows) if gate_up_bias else None
        self.down_bias = parameter(num_experts, hidden_size) if down_bias else None
        self.norm_scale = None if norm is None else parameter(hidden_size)
        # Validates everything that the parts say about one another.
        _ = self.weights
        self.reset_parameters()
        guard_storage(self, "gate_up", _HINT)

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as ``ExpertWeights``: views of the same memory, standard orientation."""
        gate_up, down = self.gate_up, self.down
        transposed = self.orientation == "in_out"
        return ExpertWeights(
            gate_up=gate_up.transpose(1, 2) if transposed else gate_up,
            down=down.transpose(1, 2) if transposed else down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            layout=self.layout,
            norm=self.norm,
            norm_scale=self.norm_scale,
        )

    def reset_parameters(self) -> None:
        """Draw each projection and bias as ``torch.nn.Linear`` does; set the norm's scale to 1."""
        bounds = {
            "gate_up": self.hidden_size**-0.5,
            "gate_up_bias": self.hidden_size**-0.5,
            "down": self.intermediate_size**-0.5,
            "down_bias": self.intermediate_size**-0.5,
        }
        with torch.no_grad():
            for name, bound in bounds.items():
                tensor = getattr(self, name)
                if tensor is not None:
                    tensor.uniform_(-bound, bound)
            if self.norm_scale is not None:
                self.norm_scale.fill_(1.0)

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Copy ``weights`` into the parameters, in place, from any layout and orientation.

        Everything is checked before the first copy. Values are rounded to the parameters' dtype
        only where it is narrower.

        Args:
            weights: Parameters of as many experts of the same sizes.

        Raises:
            TypeError: ``weights`` is no ``ExpertWeights``.
            ValueError: A tensor is missing, is one too many, or has another shape; or the eps of
                the norm differs.

        Determinism: exact, for equal dtypes.
        """
        require_type("weights", weights, ExpertWeights)
        if weights.norm != self.norm:
            raise ValueError(must("norm", f"be {self.norm}, as in this module", weights.norm))
        own = self.weights
        given = weights.to_layout(self.layout).named_tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.named_tensors().items()}
        actual = {name: tuple(tensor.shape) for name, tensor in given.items()}
        if actual != shapes:
            raise ValueError(must("weights", f"hold {shapes}", actual))
        for name, tensor in own.named_tensors().items():
            tensor.copy_(given[name])

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        *,
        expert_start: int = 0,
        out_dtype: torch.dtype | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return each token's weighted sum over its experts; see ``samebits.experts``.

        Args:
            x: ``(T, H)`` in the dtype of the parameters (any, under autocast).
            routing: Experts and probabilities of each token.
            expert_start: Global id of the first expert of this module; slots of others are dropped.
            out_dtype: None or the dtype of ``x`` rounds the sum; float32 returns it unrounded.
            num_valid_tokens: ``(1,)`` int32; rows of ``x`` from there on are not read.

        Returns:
            ``(T, H)``; differentiable in ``x``, the probabilities and every parameter.

        Raises:
            ValueError: See ``samebits.experts``.
            UnsupportedError: The backend (or every backend) cannot run this layer.

        Determinism: see ``samebits.experts``.
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
            weight_gradients=(
                None if self.weight_gradients is None else self.weight_gradients.of(self._owners())
            ),
            recompute=self.recompute,
        )

    def backward_dw(self) -> None:
        """Compute the gradients that the oldest waiting backward pass left; nothing if none waits.

        Raises:
            UnsupportedError: A parameter was replaced since the forward.
            ValueError: A tensor that the gradients need was changed since the backward.

        Determinism: the bits of a backward that is not delayed.
        """
        if self.weight_gradients is not None:
            self.weight_gradients.backward_dw(self._owners())

    def _owners(self) -> dict[str, Owner]:
        transposed = self.orientation == "in_out"
        return {
            name: Owner(parameter, transposed=transposed and name in ("gate_up", "down"))
            for name, parameter in self.named_parameters(recurse=False)
        }

    @property
    def storage(self) -> str:
        """How parameters are stored, as a ``state_dict`` says; another is not loaded."""
        return f"{self.layout.key} {self.orientation}"

    def extra_repr(self) -> str:
        """Return sizes, and every option that is not neutral."""
        options = {
            "placement": (self.placement.value, ProbPlacement.FC2_OUTPUT.value),
            "layout": (self.layout.key, _HALVES.key),
            "orientation": (self.orientation, "out_in"),
            "gate_up_bias": (self.gate_up_bias is not None, False),
            "down_bias": (self.down_bias is not None, False),
            "norm": (self.norm, None),
            "backend": (self.backend, "auto"),
            "weight_gradients": (self.weight_gradients, None),
            "recompute": (self.recompute, False),
        }
        parts = [
            f"num_experts={self.num_experts}",
            f"hidden_size={self.hidden_size}",
            f"intermediate_size={self.intermediate_size}",
            f"activation={self.activation.key}",
        ]
        parts += [
            f"{name}={value}" for name, (value, neutral) in options.items() if value != neutral
        ]
        return ", ".join(parts)
