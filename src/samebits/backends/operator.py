"""The one operator boundary of a layer: what torch.compile sees of a call to any backend.

Options enter as canonical strings, so no Python float reaches a compiled graph; the token count is
an ordinary dynamic dimension. The backend is chosen inside, from the real tensors.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from samebits import env
from samebits.autograd import laid_out
from samebits.backends import choose, passes
from samebits.backends.call import DIFFERENTIABLE, INPUTS, PARAMETERS, Call, Gradients, check_bounds
from samebits.backends.options import Options
from samebits.problem import DTYPE_NAMES, Problem
from samebits.routing import require_ids
from samebits.weight_gradients import Buffer


@lru_cache(maxsize=4096)
def _problem(
    options: Options,
    sizes: tuple[int, ...],
    dtypes: tuple[str | None, ...],
    counted: bool,
    grad: bool,
    device: str,
) -> Problem:
    hidden, columns, experts, topk, total, start = sizes
    dtype, gate_up_bias, down_bias, probs = dtypes
    assert dtype is not None
    assert probs is not None
    return Problem(
        H=hidden,
        F=columns,
        E=experts,
        K=topk,
        N=None if total == experts else total,
        expert_start=start,
        dtype=dtype,
        activation=options.activation,
        placement=options.placement,
        layout=options.layout,
        format=options.format,
        row_format=options.row_format,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        probs=probs,
        norm_eps=None if options.norm is None else options.norm.eps,
        out_dtype=None if options.out_dtype is None else DTYPE_NAMES[options.out_dtype],
        counted=counted,
        grad=grad,
        device=device,
    )


# A query of the hardware, asked once for each device.
_device_name = lru_cache(maxsize=64)(env.architecture)


def problem_of(
    options: Options, call: Call, num_experts: int, expert_start: int, *, grad: bool
) -> Problem:
    """Return the problem that a call is; every field but T.

    Determinism: pure function of its arguments.
    """

    def name(tensor: Tensor | None) -> str | None:
        return None if tensor is None else DTYPE_NAMES[tensor.dtype]

    # Packed weights have fewer columns than they stand for.
    experts, rows, hidden = call.gate_up.shape[0], call.gate_up.shape[1], call.x.shape[1]
    columns = rows // options.activation.columns
    return _problem(
        options,
        (hidden, columns, experts, call.topk_ids.shape[1], num_experts, expert_start),
        (name(call.x), name(call.gate_up_bias), name(call.down_bias), name(call.topk_probs)),
        call.num_valid_tokens is not None,
        grad,
        _device_name(call.x.device),
    )


_TENSORS = (
    "Tensor x, Tensor topk_ids, Tensor topk_probs, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, Tensor? norm_scale, Tensor? num_valid_tokens, "
    "Tensor? gate_up_scales, Tensor? down_scales, Tensor? gate_up_global, Tensor? down_global, "
    "Tensor? offsets"
)
_OPTIONS = "str options, int num_experts, int expert_start"
torch.library.define(
    "samebits::experts_forward", f"({_TENSORS}, {_OPTIONS}, bool save) -> (Tensor, Tensor)"
)
torch.library.define("samebits::experts_into", f"(Tensor(a!) out, {_TENSORS}, {_OPTIONS}) -> ()")
_RETURNS = ", ".join("Tensor" for _ in DIFFERENTIABLE)
torch.library.define(
    "samebits::experts_backward",
    f"({_TENSORS}, Tensor z, Tensor dout, {_OPTIONS}, bool[] wanted) -> ({_RETURNS})",
)
torch.library.define(
    "samebits::experts_backward_into",
    f"(Tensor(a!)[] buffers, {_TENSORS}, Tensor z, Tensor dout, {_OPTIONS}, bool[] wanted, "
    "bool[] accumulate) -> (Tensor, Tensor)",
)


def check_ids(call: Call, num_experts: int) -> None:
    """Raise ``ValueError`` for an id that is no expert, where looking costs no device sync."""
    ids = call.topk_ids
    if call.num_valid_tokens is not None and ids.device.type == "cpu":
        ids = ids[: max(0, int(call.num_valid_tokens))]
    require_ids(ids, num_experts)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts on ``device``; None where it is off."""
    # torch refuses the question for the meta device.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def outside_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which autocast is off for ``device``.

    Autocast stays on inside an operator and would narrow the fp32 products that rounding points
    ask for; what autocast means for a layer is decided once, before the operator.
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels start on ``device``, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def compute(
    call: Call, options: Options, num_experts: int, expert_start: int, *, save: bool
) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)`` of the chosen backend, past the operator; see ``run``.

    Determinism: the chosen backend's.
    """
    check_ids(call, num_experts)
    if call.offsets is not None:
        check_bounds(call.offsets, call.x.shape[0])

    def forward() -> tuple[Tensor, Tensor]:
        # What cannot run the backward must not run the forward either.
        grad = save or options.recompute
        problem = problem_of(options, call, num_experts, expert_start, grad=grad)
        found: tuple[Tensor, Tensor]
        found = choose(options.backend, problem).forward(problem, call, save=save)
        return found

    with outside_autocast(call.x.device), on_device(call.x.device):
        if call.out is None:
            about = ("forward", options, num_experts, expert_start, save)
            out, z = passes.repeated(about, call[:INPUTS], forward)
        else:
            out, z = forward()
    if call.out is None or out is call.out:
        return out, z
    return call.out.copy_(out), z


@torch.library.impl("samebits::experts_forward", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    text, num_experts, expert_start, save = arguments[INPUTS:]
    options = Options.parse(text)
    return compute(Call(*arguments[:INPUTS]), options, num_experts, expert_start, save=save)


@torch.library.impl("samebits::experts_into", "CompositeExplicitAutograd")
def _forward_into(out: Tensor, *arguments: Any) -> None:
    text, num_experts, expert_start = arguments[INPUTS:]
    call = Call(*arguments[:INPUTS])._replace(out=out)
    compute(call, Options.parse(text), num_experts, expert_start, save=False)


@torch.library.register_fake("samebits::experts_into")  # type: ignore[untyped-decorator]
def _forward_into_fake(out: Tensor, *arguments: Any) -> None:
    return None


@torch.library.register_fake("samebits::experts_forward")  # type: ignore[untyped-decorator]
def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Call(*arguments[:INPUTS])
    text, _, _, save = arguments[INPUTS:]
    out_dtype = Options.parse(text).out_dtype
    rows = call.topk_ids.shape[0] * call.topk_ids.shape[1] if save else 0
    out = call.x.new_empty(call.x.shape, dtype=call.x.dtype if out_dtype is None else out_dtype)
    return out, call.x.new_empty(rows, call.gate_up.shape[1])


def compute_backward(
    arguments: tuple[Any, ...], into: dict[str, Buffer], *, spend: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the chosen backend, None where not wanted or stored in ``into``.

    Args:
        arguments: Those of ``samebits::experts_backward``; without rows, z is computed again.
        into: Where gradients of parameters are stored.
        spend: z is not needed again: its memory may be given back as soon as it was read.

    Determinism: the chosen backend's.
    """
    call = Call(*arguments[:INPUTS])
    z, dout, text, num_experts, expert_start, wanted = arguments[INPUTS:]

    def backward() -> Gradients:
        options = Options.parse(text)
        problem = problem_of(options, call, num_experts, expert_start, grad=True)
        module = choose(options.backend, problem)
        again = call.topk_ids.numel() > z.shape[0]
        rows = module.recomputed(problem, call) if again else z
        grads: Gradients
        grads = module.backward(
            problem, call, rows, dout, tuple(wanted), into, spend=spend or again
        )
        return grads

    about = ("backward", text, num_experts, expert_start, *wanted, spend)
    places = tuple((name, buffer.accumulate) for name, buffer in into.items())
    tensors = (*call[:INPUTS], z, dout, *(buffer.tensor for buffer in into.values()))
    with outside_autocast(call.x.device), on_device(call.x.device):
        grads = passes.repeated(
            (*about, places), tensors, backward, spent=INPUTS if spend else None
        )
    return tuple(
        None if g is None else laid_out(g, getattr(call, name))
        for g, name in zip(grads, DIFFERENTIABLE, strict=True)
    )


def _filled(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Return ``grads`` as an operator does, which knows no None: it is empty instead."""
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


@torch.library.impl("samebits::experts_backward", "CompositeExplicitAutograd")
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _filled(compute_backward(arguments, {}), arguments[0])


@torch.library.impl("samebits::experts_backward_into", "CompositeExplicitAutograd")
def _backward_into(buffers: list[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    # One buffer for each wanted parameter, in their order.
    *others, wanted, accumulate = arguments
    names = [n for n, want in zip(DIFFERENTIABLE, wanted, strict=True) if want and n in PARAMETERS]
    into = map(Buffer, buffers, accumulate)
    grads = compute_backward((*others, wanted), dict(zip(names, into, strict=True)))
    dx, dprobs = _filled(grads[:2], others[0])
    return dx, dprobs


@torch.library.register_fake("samebits::experts_backward")  # type: ignore[untyped-decorator]
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, wanted = Call(*arguments[:INPUTS]), arguments[INPUTS + 5]
    tensors = [getattr(call, name) for name in DIFFERENTIABLE]
    return tuple(
        torch.empty_like(t) if want and t is not None else call.x.new_empty(0)
        for t, want in zip(tensors, wanted, strict=True)
    )


@torch.library.register_fake("samebits::experts_backward_into")  # type: ignore[untyped-decorator]
def _backward_into_fake(_buffers: list[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    dx, dprobs, *_ = _backward_fake(*arguments[:-1])
    return dx, dprobs
