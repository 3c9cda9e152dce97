"""What every backend gets: the tensors of one call, and the gradients that are wanted of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import Parameters, QuantizedWeights
from samebits.problem import DTYPE_NAMES, DTYPES, Problem
from samebits.routing import Routing
from samebits.weights import ExpertWeights


class Call(NamedTuple):
    """Tensors of one call; shapes as in CONTRACT section 1, already validated."""

    # (T, H).
    x: Tensor
    # (T, K) int32 or int64.
    topk_ids: Tensor
    # (T, K).
    topk_probs: Tensor
    # (E, 2F or F, H), any strides; where quantised, the values of ``samebits.formats``.
    gate_up: Tensor
    # (E, H, F), any strides; where quantised, the values.
    down: Tensor
    # (E, 2F or F).
    gate_up_bias: Tensor | None
    # (E, H).
    down_bias: Tensor | None
    # (H,).
    norm_scale: Tensor | None
    # (1,) int32.
    num_valid_tokens: Tensor | None
    # Scales and global scales of quantised projections, as in ``samebits.formats``.
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    gate_up_global: Tensor | None = None
    down_global: Tensor | None = None
    # (E + 1,) int32 or int64: the rows of x are sorted by expert, K is 1 and ids say the same.
    offsets: Tensor | None = None
    # (T, H), where the caller wants the output; a backend may return another tensor instead.
    out: Tensor | None = None


# The tensors that enter an operator: all but ``out``.
INPUTS = Call._fields.index("out")
# The differentiable tensors of a call, in the order in which every backward returns gradients.
DIFFERENTIABLE = (
    "x",
    "topk_probs",
    "gate_up",
    "down",
    "gate_up_bias",
    "down_bias",
    "norm_scale",
)


# Those of them that a module owns.
PARAMETERS = DIFFERENTIABLE[2:]


class Gradients(NamedTuple):
    """Gradients of one call, named as the tensors they belong to.

    None where not wanted, or where a buffer was given for it.
    """

    x: Tensor | None = None
    topk_probs: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    norm_scale: Tensor | None = None


def quantized(problem: Problem, call: Call, name: str) -> QuantizedMatrix:
    """Return the projection ``name`` ("gate_up" or "down") of a problem with a format."""
    assert problem.format is not None
    columns = {"gate_up": problem.H, "down": problem.F}
    scales: Tensor | None = getattr(call, f"{name}_scales")
    assert scales is not None
    return QuantizedMatrix(
        format=getattr(problem.format, name),
        columns=columns[name],
        values=getattr(call, name),
        scales=scales,
        global_scale=getattr(call, f"{name}_global"),
    )


def weights_of_experts(
    problem: Problem, call: Call, name: str, experts: slice | list[int]
) -> Tensor:
    """Return the projection ``name`` of some experts in the working dtype.

    Determinism: exact where nothing is quantised; otherwise see ``samebits.formats``.
    """
    if problem.format is None:
        matrices: Tensor = getattr(call, name)[experts]
        return matrices
    return quantized(problem, call, name).select(experts).dequantize(DTYPES[problem.dtype])


def check_weights(weights: Parameters) -> None:
    """Raise unless ``weights`` are parameters that can be computed with, and differentiated.

    Raises:
        TypeError: They are no parameters.
        UnsupportedError: A gradient of quantised ones is wanted.
    """
    if not isinstance(weights, QuantizedWeights):
        require_type("weights", weights, ExpertWeights)
        return
    matrices = (weights.gate_up, weights.down)
    if torch.is_grad_enabled() and any(
        tensor.requires_grad for matrix in matrices for tensor in matrix.named_tensors().values()
    ):
        raise UnsupportedError(
            f"weights in {weights.format} have no gradient: a step of an optimizer is smaller than "
            "the distance of their numbers\nhint: requires_grad_(False) and LoRAExperts, or train "
            "samebits.dequantize(weights)"
        )


def call_of(
    x: Tensor, routing: Routing, weights: Parameters, num_valid_tokens: Tensor | None
) -> Call:
    """Return the tensors of a call, in their places.

    Determinism: no arithmetic.
    """
    first, second = weights.gate_up, weights.down
    call = Call(
        x,
        routing.topk_ids,
        routing.topk_probs,
        first if isinstance(first, Tensor) else first.values,
        second if isinstance(second, Tensor) else second.values,
        weights.gate_up_bias,
        weights.down_bias,
        weights.norm_scale,
        num_valid_tokens,
    )
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return call
    return call._replace(
        gate_up_scales=first.scales,
        down_scales=second.scales,
        gate_up_global=first.global_scale,
        down_global=second.global_scale,
    )


def check_out(out: Tensor, call: Call, dtype: torch.dtype) -> None:
    """Raise unless ``out`` can take the result of ``call`` in ``dtype`` and is no part of it.

    Determinism: pure function of shapes and addresses.
    """
    require_type("out", out, Tensor)
    expected = f"{dtype} of shape {tuple(call.x.shape)} on {call.x.device}"
    actual = f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
    if actual != expected:
        raise ValueError(must("out", f"be {expected}", actual))
    if not out.is_contiguous():
        raise ValueError(must("out", "be contiguous", f"strides {out.stride()}"))
    # Addresses do not exist where a call is only traced.
    if torch.compiler.is_compiling():
        return
    for name, tensor in zip(Call._fields, call, strict=True):
        if tensor is not None and overlap(out, tensor):
            raise ValueError(must("out", f"have no memory in common with {name}", "some"))


def check_tensors(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation,
    num_valid_tokens: Tensor | None,
) -> None:
    """Raise unless the tensors of a call fit one another.

    Determinism: no arithmetic.
    """
    if x.dim() != 2:
        raise ValueError(must("x", "have shape (T, H)", tuple(x.shape)))
    if x.dtype not in DTYPE_NAMES or x.dtype != weights.dtype:
        rule = f"have the dtype of the weights ({weights.dtype})"
        raise ValueError(must("x", rule, x.dtype))
    if x.shape[1] != weights.down.shape[1]:
        rule = f"have shape (T, H) with H = down.shape[1] = {weights.down.shape[1]}"
        raise ValueError(must("x", rule, tuple(x.shape)))
    check_routing(routing, x)
    for name, matrix in (("gate_up", weights.gate_up), ("down", weights.down)):
        if matrix.device != x.device:
            raise ValueError(must(name, f"be on the device of x ({x.device})", matrix.device))
    rows, columns = weights.gate_up.shape[1], weights.down.shape[2]
    # As sizes, not as ``weights.gated``: torch 2.11 cannot compare symbolic truth values.
    if rows != activation.columns * columns:
        size = f"{activation.columns} * F = {activation.columns * columns}"
        rule = f"have {size} rows for activation {activation.key}"
        raise ValueError(must("gate_up", rule, rows))
    if num_valid_tokens is not None:
        check_count(num_valid_tokens, x)


def check_routing(routing: Routing, x: Tensor) -> None:
    """Raise unless ``routing`` is one of the tokens ``x`` ``(T, H)``.

    Determinism: no arithmetic.
    """
    ids = routing.topk_ids
    if ids.shape[0] != x.shape[0]:
        rule = f"have shape (T, K) with T = x.shape[0] = {x.shape[0]}"
        raise ValueError(must("topk_ids", rule, tuple(ids.shape)))
    if ids.shape[1] < 1:
        raise ValueError(must("topk_ids", "have shape (T, K) with K >= 1", tuple(ids.shape)))
    if routing.topk_probs.dtype not in (torch.float32, x.dtype):
        rule = f"be float32 or the dtype of x ({x.dtype})"
        raise ValueError(must("topk_probs", rule, routing.topk_probs.dtype))
    if ids.device != x.device:
        raise ValueError(must("topk_ids", f"be on the device of x ({x.device})", ids.device))


def check_bounds(offsets: Tensor, total: int) -> None:
    """Raise unless ``offsets`` ascend within ``total`` rows, where looking costs no device sync.

    Determinism: no arithmetic.
    """
    if offsets.device.type != "cpu":
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > total or bounds != sorted(bounds):
        raise ValueError(must("offsets", f"ascend from 0 to at most R = {total}", bounds))


def check_count(num_valid_tokens: Tensor, x: Tensor) -> None:
    """Raise unless ``num_valid_tokens`` is a ``(1,)`` int32 tensor on the device of ``x``.

    Determinism: no arithmetic.
    """
    if not isinstance(num_valid_tokens, Tensor) or num_valid_tokens.dtype != torch.int32:
        actual = getattr(num_valid_tokens, "dtype", type(num_valid_tokens).__name__)
        raise TypeError(must("num_valid_tokens", "be an int32 tensor", actual))
    if tuple(num_valid_tokens.shape) != (1,):
        raise ValueError(must("num_valid_tokens", "have shape (1,)", tuple(num_valid_tokens.shape)))
    if num_valid_tokens.device != x.device:
        rule = f"be on the device of x ({x.device})"
        raise ValueError(must("num_valid_tokens", rule, num_valid_tokens.device))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether the addresses from the first to the last element of two tensors meet.

    Determinism: pure function of addresses.
    """
    if one.numel() == 0 or other.numel() == 0:
        return False
    (start, stop), (first, last) = _span(one), _span(other)
    return start < last and first < stop


def _span(tensor: Tensor) -> tuple[int, int]:
    start, size = tensor.data_ptr(), tensor.element_size()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * size


def accumulate_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for fp64."""
    return torch.float64 if problem.dtype == "fp64" else torch.float32


def why_no_kernels(problem: Problem) -> str | None:
    """Return why the Triton kernels cannot run ``problem`` on its NVIDIA GPU, or None.

    Determinism: pure function of the problem.
    """
    architecture = int(problem.device.removeprefix("sm_"))
    if architecture < 80:
        return f"its kernels need sm_80 or newer, not {problem.device}"
    if problem.format is not None and architecture < 89:
        first = problem.format.gate_up
        if "e4m3" in (first.values, first.scales):
            return f"Triton reads E4M3 numbers on sm_89 or newer, not on {problem.device}"
    if problem.dtype == "fp64":
        return "its kernels compute bf16, fp16 and fp32"
    return None
