"""The calls of our own registry, by public functions: inputs once, on the device, from a seed.

Inputs hold negative zeros and NaNs with payloads, whose bytes the replays compare like all others.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.backends import passes, repetition
from samebits.experts import experts, grouped_experts
from samebits.formats.descriptor import WeightFormat
from samebits.formats.packing import quantize_matrix
from samebits.formats.weights import Parameters, quantize
from samebits.ops.indirect_gemm import tuning
from samebits.ops.indirect_gemm.tuning import Config
from samebits.problem import DTYPES, Problem
from samebits.routing import Routing
from samebits.testing.inputs import options_of
from samebits.weight_gradients import Owner, WeightGradients
from samebits.weights import ExpertWeights, Layout, PostExpertNorm

Call = Callable[[], Any]

# A NaN that is not the one that arithmetic makes, by element size.
_PAYLOADS = {2: (torch.int16, 0x7FD5), 4: (torch.int32, 0x7FD55555)}


def layer(
    problem: Problem,
    tokens: int,
    backend: str,
    device: torch.device,
    *,
    transposed: bool = False,
    frozen: bool = False,
    main_grad: bool = False,
) -> Call:
    """Return a call of a whole layer: its output and, with ``problem.grad``, its gradients.

    Args:
        problem: The layer; weights in a format have no gradient.
        tokens: T.
        backend: That computes it.
        device: Where.
        transposed: Weights are stored as (E, in, out).
        frozen: Weights have no gradient.
        main_grad: Gradients of the two projections are added to fp32 buffers.
    """
    _forget()
    # Leaves of their own: those of other variants may want a gradient.
    weights = _weights(problem, device).map(Tensor.detach)
    if transposed and isinstance(weights, ExpertWeights):
        weights = weights.to_storage("in_out")
    draw = _Draw(device, tokens)
    dtype = DTYPES[problem.dtype]
    x = _with_odd_rows(draw.normal(tokens, problem.H).to(dtype))
    ids = draw.choices(tokens, problem.experts, problem.K)
    probs = draw.uniform(tokens, problem.K) + 0.05
    count = None
    if problem.counted:
        count = torch.full((1,), max(tokens - 3, 1), dtype=torch.int32, device=device)
    routing = Routing(ids, probs, problem.experts)
    options = options_of(problem, count)
    dout = draw.normal(tokens, problem.H).to(DTYPES[problem.result_dtype])
    held: dict[str, Tensor] = {}
    if isinstance(weights, ExpertWeights) and not frozen:
        held = weights.named_tensors()
    wanted = [x, probs, *held.values()]
    if main_grad:
        owners = {name: Owner(held[name]) for name in ("gate_up", "down")}
        options["weight_gradients"] = WeightGradients(main_grad=True).of(owners)

    def call() -> Any:
        buffers = [_with_main_grad(tensor) for tensor in held.values()] if main_grad else []
        with torch.set_grad_enabled(problem.grad):
            out = experts(x, routing, weights, problem.activation, backend=backend, **options)
            if not problem.grad:
                return out
            return out, *torch.autograd.grad(out, wanted, dout, allow_unused=main_grad), *buffers

    if problem.grad:
        for tensor in wanted:
            tensor.requires_grad_()
    return call


def _forget() -> None:
    """Drop what other variants recorded: the first call is to launch all that it needs, seen."""
    repetition.forget()
    passes.forget()


def _with_main_grad(parameter: Any) -> Tensor:
    """Give a parameter a new buffer that holds something already, and return it."""
    parameter.main_grad = torch.full_like(parameter, 0.5, dtype=torch.float32, requires_grad=False)
    buffer: Tensor = parameter.main_grad
    return buffer


def sorted_rows(problem: Problem, rows: int, backend: str, device: torch.device) -> Call:
    """Return a call of ``grouped_experts``: its output and gradients; the last rows are of none."""
    _forget()
    weights = _weights(problem, device)
    assert isinstance(weights, ExpertWeights)
    draw = _Draw(device, rows)
    x = draw.normal(rows, problem.H).to(DTYPES[problem.dtype])
    ids = draw.choices(rows, problem.E + 1, 1).reshape(-1)
    counts = torch.bincount(ids, minlength=problem.E + 1)[: problem.E]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    probs = draw.uniform(rows, 1).reshape(-1) + 0.05
    dout = draw.normal(rows, problem.H).to(x.dtype)
    wanted = [x, probs, weights.gate_up, weights.down]
    for tensor in wanted:
        tensor.requires_grad_()

    def call() -> Any:
        out = grouped_experts(
            x, offsets, weights, problem.activation, row_probs=probs, backend=backend
        )
        return (out, *torch.autograd.grad(out, wanted, dout))

    return call


def layer_with_tiles(
    problem: Problem, tokens: int, tiles: tuple[Config, Config], device: torch.device
) -> Call:
    """Return ``layer`` by the fused backend with other tiles than those of the table."""
    call = layer(problem, tokens, "fused", device)

    def forced() -> Any:
        with mock.patch.object(tuning, "heuristic", return_value=tiles):
            return call()

    return forced


def sort(slots: int, experts_: int, block_r: int, device: torch.device) -> Call:
    """Return a call that sorts slots and makes two tables of tiles."""
    from samebits.ops.permute import sort_slots
    from samebits.ops.permute.kernel import launch_tiles

    ids = torch.randint(-1, experts_ + 1, (slots // 4, 4), device=device, generator=_seeded(device))

    def call() -> list[Tensor]:
        found = sort_slots(ids, experts_, block_r=block_r)
        other = launch_tiles(found.offsets, slots, 2 * block_r)
        return [*found[:3], *_used(found.tiles), *_used(other)]

    return call


def _used(tiles: Any) -> list[Tensor]:
    """Return a table of tiles without what it holds past its count."""
    *columns, count = tiles
    return [
        count,
        *(torch.where(torch.arange(len(c), device=c.device) < count, c, 0) for c in columns),
    ]


def dequantize(held: str, columns: int, device: torch.device) -> Call:
    """Return a call that makes dense matrices; one expert of four has no rows."""
    from samebits.ops.dequantize.kernel import launch_dequantize

    draw = _Draw(device, columns)
    matrix = quantize_matrix(draw.normal(4, 300, columns), WeightFormat.parse(held))
    offsets = torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32, device=device)
    # Made here: a list as an index would be copied to the device in the call, which no capture may.
    written = torch.tensor([0, 2, 3], device=device)

    def call() -> Tensor:
        return launch_dequantize(matrix, torch.bfloat16, offsets).index_select(0, written)

    return call


def move(tokens: int, hidden: int, topk: int, dtype: torch.dtype, device: torch.device) -> Call:
    """Return a call of permute and combine with all gradients; a tenth of the slots is dropped."""
    from samebits.ops.permute import combine, permute, sort_slots

    draw = _Draw(device, tokens)
    ids = draw.choices(tokens, 64, topk)
    ids[draw.uniform(tokens, topk) < 0.1] = -1
    tokens_of_rows = _with_odd_rows(draw.normal(tokens, hidden).to(dtype))
    factors = draw.uniform(tokens, topk) + 0.05
    dout = draw.normal(tokens, hidden).to(dtype)

    def call() -> tuple[Tensor, ...]:
        # Leaves of this call: torch adds the two gradients of one on the stream that saw it first,
        # which must not be another than the one that is captured.
        x, probs = (t.detach().requires_grad_() for t in (tokens_of_rows, factors))
        found = sort_slots(ids, 64)
        rows = permute(x, found.inverse, topk, probs, offsets=found.offsets)
        out = combine(rows, found.inverse, topk, probs, offsets=found.offsets)
        return rows, out, *torch.autograd.grad(out, [x, probs], dout)

    return call


def activation(
    kind: Activation,
    layout: Layout,
    family: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Call:
    """Return a call of the activation and of its gradients."""
    from samebits.ops.activation import Operands, Wanted, activate, activate_backward

    rows, columns = shape
    draw = _Draw(device, rows)
    width = kind.columns * columns
    z = _with_odd_rows((3 * draw.normal(rows, width)).to(dtype))
    dh = draw.normal(rows, columns).to(dtype)
    bias = offsets = None
    if family == "bias":
        bias = draw.normal(16, width).to(dtype)
        ends = torch.linspace(0, rows, 17, device=device)
        offsets = (ends + torch.cos(ends)).round().int().clamp(0, rows)
        offsets[0], offsets[-1] = 0, rows
    weighted = family in ("bias", "weighted")
    probs = draw.uniform(rows) if weighted else None
    operands = Operands(z, bias, offsets, probs)
    wanted = Wanted(dp=weighted, h=weighted, dbias=bias is not None)

    def call() -> list[Tensor]:
        h = activate(z, kind, layout, bias=bias, offsets=offsets, row_probs=probs)
        found = activate_backward(dh, operands, kind, layout, wanted)
        return [h, *(tensor for tensor in found if tensor is not None)]

    return call


class _Draw:
    """Random tensors of one seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._generator = device, _seeded(device, seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self._device, generator=self._generator)

    def choices(self, tokens: int, experts: int, topk: int) -> Tensor:
        # Stable, so that ties are broken alike everywhere.
        return self.uniform(tokens, experts).sort(stable=True).indices[:, :topk].contiguous()


def _seeded(device: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


# One at a time: those of one family take gigabytes, and its variants follow one another.
@lru_cache(maxsize=1)
def _weights(problem: Problem, device: torch.device) -> Parameters:
    draw = _Draw(device, 0)
    dtype = DTYPES[problem.dtype]
    rows = problem.activation.columns * problem.F

    def matrices(n: int, k: int, scale: float) -> Tensor:
        # Expert by expert: fp32 draws of all would take twice the memory.
        made = torch.empty(problem.E, n, k, dtype=dtype, device=device)
        for one in made:
            one.copy_(draw.normal(n, k) * scale)
        return made

    def bias(kind: str | None, columns: int) -> Tensor | None:
        return None if kind is None else draw.normal(problem.E, columns).to(DTYPES[kind])

    dense = ExpertWeights(
        gate_up=matrices(rows, problem.H, 3 * problem.H**-0.5),
        down=matrices(problem.H, problem.F, problem.F**-0.5),
        gate_up_bias=bias(problem.gate_up_bias, rows),
        down_bias=bias(problem.down_bias, problem.H),
        layout=problem.layout,
        norm=None if problem.norm_eps is None else PostExpertNorm(eps=problem.norm_eps),
        norm_scale=None if problem.norm_eps is None else draw.uniform(problem.H).to(dtype) + 0.5,
    )
    return dense if problem.format is None else quantize(dense, problem.format)


def _with_odd_rows(x: Tensor) -> Tensor:
    """Set one row to negative zeros and one to NaNs with a payload."""
    if x.shape[0] > 4:
        kind, bits = _PAYLOADS[x.element_size()]
        x[1] = -0.0
        x[3] = torch.full_like(x[3], bits, dtype=kind).view(x.dtype)
    return x
