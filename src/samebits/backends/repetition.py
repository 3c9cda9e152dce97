"""Repeat a call of few tokens by its launches alone: what was decided once is not decided again.

A plain eager call of few tokens costs the host more than the device: checks, the operator, Triton's
search for each kernel. The first call of a kind runs as any other and is recorded; a call that
agrees with it in everything that decides (options, shapes, strides, dtypes, alignments) repeats its
launches on its own addresses. A call is kept only if nothing but views, allocations and kernels
happened in it.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.activation import Activation
from samebits.backends.call import overlap
from samebits.backends.plan import Plan, plan_of
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import Parameters, QuantizedWeights
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import ExpertWeights

# Beyond, the device takes longer than the host, and buffers are worth allocating one by one.
MOST_TOKENS = 256
# Kinds of calls that are kept; past them all are forgotten.
MOST_PLANS = 4096
# Bytes of one buffer of a call that is kept. Quantised matrices that are made dense for a call take
# more: the long way gives them back one by one.
MOST_BYTES = 1 << 28
_PLAIN = (Tensor, torch.nn.Parameter)
# Operators that a repetition does itself, or that change no memory.
ALLOCATIONS = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))
# Operators that make another dtype or layout of one tensor.
_COPIES = frozenset(("_to_copy", "clone"))
_KINDS = (Routing, Activation, str, int)
_WEIGHTS = (ExpertWeights, QuantizedWeights)

Key = tuple[Any, ...]
# None marks a kind of call that cannot be repeated.
_PLANS: dict[Key, Plan | None] = {}


class Request(NamedTuple):
    """The arguments of ``samebits.experts``, as given."""

    x: Tensor
    routing: Routing
    weights: Parameters
    activation: Activation
    placement: ProbPlacement
    backend: str
    expert_start: int
    out_dtype: torch.dtype | None
    num_valid_tokens: Tensor | None
    out: Tensor | None
    # Of ``samebits.grouped_experts``.
    offsets: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Every tensor of the call but ``out``."""
        routing, weights = self.routing, self.weights
        return (
            self.x,
            routing.topk_ids,
            routing.topk_probs,
            *_parts(weights.gate_up),
            *_parts(weights.down),
            weights.gate_up_bias,
            weights.down_bias,
            weights.norm_scale,
            self.num_valid_tokens,
            self.offsets,
        )


def _parts(matrix: Tensor | QuantizedMatrix) -> tuple[Tensor | None, ...]:
    if isinstance(matrix, QuantizedMatrix):
        return matrix.values, matrix.scales, matrix.global_scale
    return (matrix,)


class Kind(NamedTuple):
    """What a call is, and where its tensors lie."""

    # Everything that decides what it launches.
    key: Key
    # Of ``Request.tensors``; 0 for None.
    addresses: list[int]


def kind_of(request: Request) -> Kind | None:
    """Return the kind of a call; None where it must take the long way.

    Determinism: pure function of its arguments and of torch's modes.
    """
    x, routing, weights, activation, placement, backend, start, out_dtype, _, out, _ = request
    if type(x) is not Tensor or not x.is_cuda or x.dim() != 2:
        return None
    if x.shape[0] > MOST_TOKENS or x.numel() == 0:
        return None
    # Such an x is copied before the call that would be recorded.
    if x.stride(1) != 1 and x.shape[1] != 1:
        return None
    if not _are_known(request):
        return None
    if watched() or not has_launches():
        return None
    tensors = request.tensors
    addresses: list[int] = []
    traits = [
        activation.key, placement, weights.layout.key, backend, start, out_dtype,
        routing.num_experts, None if weights.norm is None else weights.norm.key,
    ]  # fmt: skip
    if isinstance(weights, QuantizedWeights):
        first, second = weights.gate_up, weights.down
        # Two columns share a byte: shapes do not tell how many there are.
        traits += (first.format.key, first.columns, second.format.key, second.columns)
        traits.append(weights.dtype)
    if not _add_traits((*tensors, out), traits, addresses):
        return None
    if out is not None and _meets(out, addresses.pop(), tensors, addresses):
        return None
    if out is None:
        addresses.pop()
    return Kind(tuple(traits), addresses)


def _are_known(request: Request) -> bool:
    """Return whether types are as asked; the checks of the long way judge others."""
    _, routing, weights, activation, placement, backend, start, out_dtype, *_ = request
    return (
        (type(routing), type(activation), type(backend), type(start)) == _KINDS
        and type(weights) in _WEIGHTS
        and type(placement) in (ProbPlacement, str)
        and (out_dtype is None or type(out_dtype) is torch.dtype)
    )


def _add_traits(
    tensors: tuple[Tensor | None, ...], traits: list[Any], addresses: list[int]
) -> bool:
    """Add what decides about tensors; False where one is no plain one, or wants a gradient."""
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            traits.append(None)
            addresses.append(0)
        elif type(tensor) not in _PLAIN or (grad and tensor.requires_grad):
            return False
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            # Strides of contiguous tensors follow from their shape, or multiply an index of 0.
            strides = True if tensor.is_contiguous() else tensor.stride()
            traits += (tensor.shape, strides, tensor.dtype, tensor.get_device(), address % 16)
    return True


def _meets(
    out: Tensor, start: int, tensors: tuple[Tensor | None, ...], addresses: list[int]
) -> bool:
    """Return whether ``out``, which starts at ``start``, has memory in common with an input."""
    if not out.is_contiguous():
        return any(t is not None and overlap(out, t) for t in tensors)
    stop = start + out.nbytes
    # What starts behind ``out`` cannot meet it: only the others are looked at closely.
    return any(
        t is not None and address < stop and overlap(out, t)
        for t, address in zip(tensors, addresses, strict=True)
    )


def watched() -> bool:
    """Return whether something watches or changes the operators of this thread."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cuda")
    )


@lru_cache(maxsize=1)
def has_launches() -> bool:
    """Return whether Triton is installed: without it there is nothing to record."""
    return find_spec("triton") is not None


def repeat(kind: Kind, request: Request) -> Tensor | None:
    """Return the output of a call whose kind is kept, or None.

    Determinism: the same kernels on the same values as the recorded call, hence the same bits.
    """
    plan = _PLANS.get(kind.key)
    if plan is None or plan.current_device() != request.x.get_device():
        return None
    return _written(request, plan.play(request.x, kind.addresses, request.out))


def _written(request: Request, out: Tensor) -> Tensor:
    """Return ``out``; autograd hears of the caller's buffer, which no operator wrote."""
    if request.out is not None:
        torch.autograd.graph.increment_version(request.out)
    return out


def is_recorded(key: Key) -> bool:
    """Return whether a call of this kind was recorded, whatever came of it."""
    return key in _PLANS


def plans() -> list[Plan | None]:
    """Return what was kept of each recorded call."""
    return list(_PLANS.values())


def forget() -> None:
    """Drop every recorded call."""
    _PLANS.clear()


class Copy(NamedTuple):
    """A copy that a call made: ``function(source, *rest, **options)``."""

    function: Callable[..., Tensor]
    source: Tensor
    rest: tuple[Any, ...]
    options: dict[str, Any]
    result: Tensor


class Watch(TorchDispatchMode):
    """See whether a call does anything but allocate, view and launch.

    Args:
        allocated: Hears of each allocation.
        copied: Hears of each copy; returns whether a repetition can make it, too.
    """

    def __init__(
        self,
        allocated: Callable[[Tensor], None] | None = None,
        copied: Callable[[Copy], bool] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated, self.copied = allocated, copied
        self.others: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        options = kwargs or {}
        result = func(*args, **options)
        if name in ALLOCATIONS:
            if self.allocated is not None:
                self.allocated(result)
            return result
        known = func.is_view
        if name in _COPIES and self.copied is not None:
            known = self.copied(Copy(func, args[0], args[1:], options, result))
        if not known:
            self.others.append(name)
        return result


def record(key: Key, request: Request, function: Callable[[], Tensor]) -> Tensor:
    """Return ``function()``, the call itself, and keep its launches under ``key``.

    Determinism: that of ``function``.
    """
    # Imported here: the operator must not need Triton.
    from samebits.ops._triton.launch import recorded_launches

    large: list[int] = []

    def allocated(tensor: Tensor) -> None:
        if tensor.nbytes > MOST_BYTES:
            large.append(tensor.nbytes)

    def keep(launch: Any) -> Any:
        # What is kept of a launch holds its buffers until the call ends.
        return None if large else launch

    with Watch(allocated) as watch, recorded_launches(keep) as made:
        out = function()
    if len(_PLANS) >= MOST_PLANS:
        forget()
    repeatable = made.complete and not watch.others and not large
    _PLANS[key] = plan_of(request.tensors, request.out, made.launches, out) if repeatable else None
    return _written(request, out)
