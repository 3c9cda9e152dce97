"""The expert layer as a function: tokens in, weighted sum of their experts' outputs out."""

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_bool, require_int, require_type
from samebits.backends import check_name, repetition
from samebits.backends.call import (
    Call,
    call_of,
    check_bounds,
    check_out,
    check_tensors,
    check_weights,
)
from samebits.backends.differentiable import run
from samebits.backends.operator import autocast_dtype, compute
from samebits.backends.options import Options
from samebits.errors import must
from samebits.formats.descriptor import WeightFormat, check_row_format
from samebits.formats.weights import Parameters, QuantizedWeights
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weight_gradients import Destination

_PLAIN = Activation()
# What autocast casts, in a linear layer too.
_NARROWED = (torch.bfloat16, torch.float16, torch.float32)


def experts(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation = _PLAIN,
    *,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    backend: str = "auto",
    expert_start: int = 0,
    out_dtype: torch.dtype | None = None,
    num_valid_tokens: Tensor | None = None,
    out: Tensor | None = None,
    weight_gradients: Destination | None = None,
    recompute: bool = False,
    row_format: WeightFormat | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts, ``Σ_k p_k · expert_k(x)``.

    CONTRACT.md is the specification: options in section 2, placement in 3, rounding in 5. Under
    autocast, ``x`` and the parameters are cast to autocast's dtype first, as a linear layer does.

    Args:
        x: Token activations, ``(T, H)``, in the dtype of the weights, last dimension contiguous.
        routing: Experts and probabilities of each token.
        weights: Parameters of the E experts held here; quantised ones have no gradient.
        activation: The function between the projections; its default is plain SwiGLU.
        placement: Where the probability is multiplied in.
        backend: "auto", or the name of one backend, which then runs the call or raises.
        expert_start: Global id of the first expert held here; slots of others are dropped.
        out_dtype: None or the dtype of ``x`` rounds the sum; float32 returns it unrounded.
        num_valid_tokens: ``(1,)`` int32 on the device of ``x``; rows of ``x`` from there on are
            not read, their output and gradient rows are 0.
        out: Where to write the result, for callers with a buffer of their own: ``(T, H)``
            contiguous, of the result's dtype, no memory in common with the other tensors. Not
            where a gradient is wanted.
        weight_gradients: Where the gradients of the parameters go, ``WeightGradients(…).of(…)``;
            None gives them to autograd. Without a gradient it is not looked at.
        recompute: Keep no output of the first projection for the backward, which computes it again:
            the inputs alone are kept, the bits are the same.
        row_format: Quantise what is multiplied with quantised weights too (W8A8): ``ROWS_FP8``
            beside FP8 blocks of 128 columns, ``MXFP8`` beside MXFP8 and MXFP4. Without a gradient.

    Returns:
        ``(T, H)``; differentiable in ``x``, the probabilities and every parameter. ``out``, where
        it is given.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes, dtypes, devices or ids disagree; the message names both.
        UnsupportedError: The named backend (or every backend) cannot run this problem.

    Determinism: bitwise repeatable. Each row independent of T and of the other rows on a GPU; on
    CPU the backend's ``notes`` say what holds.
    """
    return _computed(
        x, routing, weights, activation, placement, backend, expert_start, out_dtype,
        num_valid_tokens, out, weight_gradients, recompute, row_format, None,
    )  # fmt: skip


def _computed(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation,
    placement: ProbPlacement,
    backend: str,
    expert_start: int,
    out_dtype: torch.dtype | None,
    num_valid_tokens: Tensor | None,
    out: Tensor | None,
    weight_gradients: Destination | None,
    recompute: bool,
    row_format: WeightFormat | None,
    offsets: Tensor | None,
) -> Tensor:
    """Return what ``experts`` does; ``offsets`` where rows are sorted, see ``Call``."""
    kind = None
    if row_format is None and not torch.compiler.is_compiling():
        request = repetition.Request(
            x, routing, weights, activation, placement, backend, expert_start, out_dtype,
            num_valid_tokens, out, offsets,
        )  # fmt: skip
        kind = repetition.kind_of(request)
        if kind is not None and (known := repetition.repeat(kind, request)) is not None:
            return known
    call, options, num_experts = checked(
        x,
        routing,
        weights,
        activation,
        placement=placement,
        backend=backend,
        expert_start=expert_start,
        out_dtype=out_dtype,
        num_valid_tokens=num_valid_tokens,
        row_format=row_format,
    )
    if offsets is not None:
        call = call._replace(offsets=offsets)
    if out is not None:
        check_out(out, call, options.out_dtype or call.x.dtype)
        call = call._replace(out=out)
    if kind is not None and not repetition.is_recorded(kind.key):
        return repetition.record(
            kind.key,
            request,
            lambda: compute(call, options, num_experts, expert_start, save=False)[0],
        )
    require_bool("recompute", recompute)
    return run(call, options, num_experts, expert_start, weight_gradients, recompute=recompute)


def checked(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation,
    *,
    placement: ProbPlacement,
    backend: str,
    expert_start: int,
    out_dtype: torch.dtype | None,
    num_valid_tokens: Tensor | None,
    row_format: WeightFormat | None = None,
) -> tuple[Call, Options, int]:
    """Return the call, its options and N, from the arguments of ``experts``; see there.

    Determinism: pure function of its arguments.
    """
    require_type("x", x, Tensor)
    require_type("routing", routing, Routing)
    check_weights(weights)
    require_type("activation", activation, Activation)
    x, weights = _autocast(x, weights)
    num_experts = weights.down.shape[0] if routing.num_experts is None else routing.num_experts
    require_int("expert_start", expert_start)
    check_tensors(x, routing, weights, activation, num_valid_tokens)
    if not 0 <= expert_start <= num_experts - weights.down.shape[0]:
        rule = f"keep expert_start + E within N = {num_experts}, with E = {weights.down.shape[0]}"
        raise ValueError(must("expert_start", rule, expert_start))
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(must("out_dtype", f"be None, {x.dtype} or torch.float32", out_dtype))
    check_name(backend)
    call = call_of(
        x if x.stride(-1) == 1 or x.shape[1] == 1 else x.contiguous(),
        routing,
        weights,
        num_valid_tokens,
    )
    options = Options(
        activation,
        # Made only of a string: torch 2.10 cannot trace the making of a member.
        placement if isinstance(placement, ProbPlacement) else ProbPlacement(placement),
        weights.layout,
        weights.norm,
        None if out_dtype == x.dtype else out_dtype,
        backend,
        weights.format if isinstance(weights, QuantizedWeights) else None,
        row_format=row_format,
    )
    if row_format is not None:
        check_row_format(row_format, options.format)
    return call, options, num_experts


def grouped_experts(
    rows: Tensor,
    offsets: Tensor,
    weights: Parameters,
    activation: Activation = _PLAIN,
    *,
    row_probs: Tensor | None = None,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    weight_gradients: Destination | None = None,
    recompute: bool = False,
    row_format: WeightFormat | None = None,
) -> Tensor:
    """Return each row's expert output, for callers that sorted their rows by expert already.

    Row r belongs to the expert e with ``offsets[e] <= r < offsets[e + 1]``; its result is that of
    ``experts`` with K = 1.

    Args:
        rows: ``(R, H)``, sorted by expert.
        offsets: ``(E + 1,)`` int32 or int64, from 0, monotone, at most R (checked on CPU);
            rows from ``offsets[E]`` on belong to no expert: they are not read and their output
            and gradient rows are 0.
        weights: Parameters of the E experts.
        activation: See ``experts``.
        row_probs: ``(R,)`` probability of each row; None means 1.
        placement: See ``experts``.
        backend: See ``experts``.
        out_dtype: See ``experts``.
        weight_gradients: See ``experts``.
        recompute: See ``experts``.
        row_format: See ``experts``.

    Returns:
        ``(R, H)``.

    Raises:
        TypeError: See ``experts``.
        ValueError: See ``experts``.
        UnsupportedError: See ``experts``.

    Determinism: see ``experts``.
    """
    require_type("rows", rows, Tensor)
    require_type("offsets", offsets, Tensor)
    check_weights(weights)
    if rows.dim() != 2:
        raise ValueError(must("rows", "have shape (R, H)", tuple(rows.shape)))
    check_offsets(offsets, rows, weights.down.shape[0])
    if row_probs is None:
        row_probs = torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
    require_type("row_probs", row_probs, Tensor)
    if tuple(row_probs.shape) != (rows.shape[0],):
        rule = f"have shape ({rows.shape[0]},)"
        raise ValueError(must("row_probs", rule, tuple(row_probs.shape)))
    if row_probs.device != rows.device:
        rule = f"be on the device of rows ({rows.device})"
        raise ValueError(must("row_probs", rule, row_probs.device))
    indices = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    ids = torch.searchsorted(offsets[1:].contiguous(), indices, right=True)
    return _computed(
        rows, Routing(ids[:, None], row_probs[:, None]), weights, activation, placement, backend,
        0, out_dtype, None, None, weight_gradients, recompute, row_format, offsets,
    )  # fmt: skip


def check_offsets(offsets: Tensor, rows: Tensor, num_local: int) -> None:
    """Raise unless ``offsets`` are E + 1 bounds of ``rows``; their values are checked on CPU."""
    if tuple(offsets.shape) != (num_local + 1,):
        rule = f"have shape (E + 1,) = ({num_local + 1},)"
        raise ValueError(must("offsets", rule, tuple(offsets.shape)))
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(must("offsets", "be int32 or int64", offsets.dtype))
    if offsets.device != rows.device:
        rule = f"be on the device of rows ({rows.device})"
        raise ValueError(must("offsets", rule, offsets.device))
    # Fake ones have no values; compiled, the operator looks at them.
    if type(offsets) is Tensor and not torch.compiler.is_compiling():
        check_bounds(offsets, rows.shape[0])


def _autocast(x: Tensor, weights: Parameters) -> tuple[Tensor, Parameters]:
    dtype = autocast_dtype(x.device)
    if dtype is None or x.dtype not in _NARROWED or weights.dtype not in _NARROWED:
        return x, weights
    if isinstance(weights, QuantizedWeights):
        return x.to(dtype), weights.to(dtype)
    return x.to(dtype), weights.map(lambda tensor: tensor.to(dtype))
