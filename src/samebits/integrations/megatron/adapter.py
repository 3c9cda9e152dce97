"""Run Megatron-LM's experts modules on this library: same parameters, same call.

``adapt(module)`` replaces the forward of one ``TEGroupedMLP`` or ``SequentialMLP``. The parameters
stay the same objects with the same names, so that optimizers, checkpoints and refits go on as
before; where their memory is one buffer (``repoint``) the library reads it without a copy.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.arguments import require_indices
from samebits.errors import UnsupportedError
from samebits.experts import check_offsets, experts, grouped_experts
from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.megatron import (
    fields_of,
    megatron_activation,
    megatron_layout,
    megatron_placement,
)
from samebits.integrations.megatron.parameters import (
    Parameters,
    held_by,
    linears_of,
    owners_of,
    weights_of,
)
from samebits.integrations.megatron.stacking import in_memory_order, repoint
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weight_gradients import WeightGradients
from samebits.weights import Layout

_REFUSED = {
    "fp8": "FP8 experts are Transformer Engine's; use BF16 experts",
    "fp4": "FP4 experts are Transformer Engine's; use BF16 experts",
    "fine_grained_activation_offloading": "the library keeps its own activations",
}


class Options(NamedTuple):
    """What a configuration says of the experts."""

    activation: Activation
    layout: Layout
    placement: ProbPlacement


def options_of(config: Any) -> Options:
    """Return what a configuration says of the experts.

    Raises:
        UnsupportedError, ValueError: See ``samebits.from_megatron_args``.

    Determinism: a function of the configuration.
    """
    fields = fields_of(config)
    activation = megatron_activation(fields)
    layout = megatron_layout(fields, "moe_mlp_glu_interleave_size", activation)
    placement = megatron_placement(fields, int(fields.get("moe_router_topk", default=1)))
    return Options(activation, layout, placement)


class Adapted:
    """An experts module that runs on this library; ``remove()`` gives it its own forward back."""

    def __init__(self, module: nn.Module, forward: Any, marked: list[Tensor]) -> None:
        self.module = module
        self._forward, self._marked = forward, marked

    def remove(self) -> None:
        """Undo ``adapt``, unless the module was adapted again; parameters stay where they are."""
        if vars(self.module).get("forward") is not self._forward:
            return
        for name in ("forward", "backward_dw", _POLICY):
            vars(self.module).pop(name, None)
        for parameter in self._marked:
            del parameter.skip_backward_post_hook  # type: ignore[attr-defined]


def adapt(module: nn.Module, config: Any = None, *, backend: str = "auto") -> Adapted:
    """Make an experts module of Megatron-LM compute with ``samebits.grouped_experts``.

    Its call stays ``(permuted_hidden, tokens_per_expert, permuted_probs) -> (out, None)``. With
    ``gradient_accumulation_fusion`` gradients of parameters go into their ``main_grad``; with
    ``delay_wgrad_compute`` (or the flag that overlaps them with dispatch) they wait for
    ``backward_dw()``. See ``samebits.WeightGradients``.

    Args:
        module: A ``TEGroupedMLP`` or ``SequentialMLP``, or any module with ``linear_fc1`` and
            ``linear_fc2`` (weights ``weight0`` …, or one stacked ``weight``) or ``local_experts``.
        config: Its configuration; None takes ``module.config``.
        backend: See ``samebits.experts``.

    Returns:
        A handle, to undo it.

    Raises:
        TypeError: The module has no such parameters.
        UnsupportedError: The configuration asks for something that this path does not do.
        ValueError: Its options contradict one another.

    Determinism: see ``samebits.experts``.
    """
    config = module.config if config is None else config
    fields = fields_of(config)
    _refuse(fields)
    options = options_of(config)
    held = held_by(module)
    weights_of(held, options.layout)  # shapes and dtypes are checked before anything changes
    policy = _policy_of(fields)
    for parameters in held.values():
        if len(parameters) > 1:
            # Views of parameters and of gradients have to run the same way.
            repoint(parameters[::-1] if policy is not None and policy.main_grad else parameters)

    def forward(
        self: nn.Module,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        output_buffer: Tensor | None = None,
        grad_input_buffer: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if output_buffer is not None or grad_input_buffer is not None:
            raise UnsupportedError("output_buffer and grad_input_buffer are the op-fuser's")
        # Of self, which is another module in a deep copy.
        out = _compute(
            self,
            options,
            backend,
            permuted_local_hidden_states,
            _offsets(tokens_per_expert, permuted_local_hidden_states),
            permuted_probs.reshape(-1).float(),
        )
        return out, None

    for name in ("backward_dw", _POLICY):  # of an earlier call
        vars(module).pop(name, None)
    bound = vars(module)["forward"] = MethodType(forward, module)
    marked: list[Tensor] = []
    if policy is not None:
        vars(module)[_POLICY] = policy
        if policy.delayed:
            marked = _delay(module, held)
    return Adapted(module, bound, marked)


def _refuse(fields: Fields) -> None:
    for name, reason in _REFUSED.items():
        value = fields.get(name, default=None)
        if value:
            raise UnsupportedError(f"{name} = {value!r}: {reason}")
    if "moe_act" in fields.get("recompute_modules", default=()):
        raise UnsupportedError(
            "recompute_modules = moe_act: the activation is part of the library's operator; use "
            'recompute_modules = ["moe"]'
        )


def _compute(
    module: nn.Module, options: Options, backend: str, rows: Tensor, offsets: Tensor, probs: Tensor
) -> Tensor:
    """Return the rows of ``module``, from the parameters that it holds now."""
    held = held_by(module)
    backwards = in_memory_order(held["gate_up"])[0] is not held["gate_up"][0]
    if backwards:
        held = {name: parameters[::-1] for name, parameters in held.items()}
    weights = weights_of(held, options.layout)
    policy: WeightGradients | None = vars(module).get(_POLICY)
    destination = None if policy is None else policy.of(owners_of(held))
    if not backwards:
        return grouped_experts(
            rows,
            offsets,
            weights,
            options.activation,
            row_probs=probs,
            placement=options.placement,
            backend=backend,
            weight_gradients=destination,
        )
    check_offsets(offsets, rows, weights.down.shape[0])
    return experts(
        rows,
        Routing(_backward_ids(offsets, rows)[:, None], probs[:, None]),
        weights,
        options.activation,
        placement=options.placement,
        backend=backend,
        weight_gradients=destination,
    )


# Where a module keeps its ``WeightGradients``: a deep copy has to have its own.
_POLICY = "_samebits_weight_gradients"


def _policy_of(fields: Fields) -> WeightGradients | None:
    """Return what a configuration says of the gradients of parameters."""
    main_grad = bool(fields.get("gradient_accumulation_fusion", default=False))
    delayed = bool(
        fields.get("delay_wgrad_compute", default=False)
        or fields.get("overlap_dispatch_backward_with_experts_wgrad", default=False)
    )
    return WeightGradients(main_grad=main_grad, delayed=delayed) if main_grad or delayed else None


def _delay(module: nn.Module, held: Parameters) -> list[Tensor]:
    """Give the module ``backward_dw``, and return the parameters that it marked."""
    vars(module)["backward_dw"] = MethodType(_backward_dw, module)
    parameters = [p for parameters in held.values() for p in parameters]
    marked = [p for p in parameters if not hasattr(p, "skip_backward_post_hook")]
    for parameter in parameters:
        # The data-parallel wrapper then leaves the parameter's hook to backward_dw.
        parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
    return list(dict.fromkeys(marked))


def _backward_dw(self: nn.Module) -> None:
    """Compute the weight gradients of the oldest backward, then what waits for them."""
    policy: WeightGradients = vars(self)[_POLICY]
    if not policy.pending:
        return
    policy.backward_dw()
    for linear in linears_of(self, "linear_fc2") + linears_of(self, "linear_fc1"):
        # Transformer Engine's layers keep the hooks of the data-parallel wrapper.
        run_hooks = getattr(linear, "_trigger_wgrad_accumulation_and_reduce_hooks", None)
        if run_hooks is not None:
            run_hooks()


def _offsets(tokens_per_expert: Tensor | list[int], rows: Tensor) -> Tensor:
    counts = torch.as_tensor(tokens_per_expert, device=rows.device)
    counts = require_indices("tokens_per_expert", counts).to(torch.int64)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _backward_ids(offsets: Tensor, rows: Tensor) -> Tensor:
    """Return each row's place in weights that are stacked last to first; -1 for rows of none."""
    indices = torch.arange(rows.shape[0], device=rows.device)
    ids = torch.searchsorted(offsets[1:].contiguous(), indices, right=True)
    return offsets.shape[0] - 2 - ids
