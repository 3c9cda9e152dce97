"""Variants of what else a layer can be asked for: quantised or frozen weights, fp32 buffers, kinds.

Each is a family of options of kernels that ``layers`` has in their plain form, at few sizes.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from samebits.activation import Activation
from samebits.checks.determinism import calls
from samebits.checks.determinism.layers import (
    FEW,
    FIRST,
    HIDDEN,
    SECOND,
    WHOLE,
    backward,
    forward,
    layer_variant,
    single_slots,
    tile_of,
)
from samebits.checks.determinism.operations import (
    ACTIVATION,
    DEQUANTIZE,
    PERMUTE,
    dequantize_kernel,
)
from samebits.checks.determinism.variant import Variant
from samebits.formats.descriptor import FormatPair
from samebits.ops.hidden_gradient import tuning as hidden_tuning
from samebits.ops.indirect_gemm import tuning as indirect_tuning
from samebits.problem import Problem, ProbPlacement
from samebits.weights import Layout

SITU = Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0)
# Wide enough that the tiles for few rows per expert fill the device.
HELD = replace(FEW, F=2048)
# Families of quantised weights, each with its dtypes.
FORMATS: dict[str, tuple[Problem, tuple[str, ...]]] = {
    "fp8_128x128": (HELD, ("bf16", "fp16")),
    "mxfp8": (HELD, ("bf16",)),
    "mxfp4": (WHOLE, ("bf16", "fp16")),
    "mxfp4_shuffled": (WHOLE, ("bf16", "fp16")),
    "nvfp4": (HELD, ("bf16",)),
}
# Slots of one token, of the entries of the tables, and of dense tiles.
_QUANTIZED_POINTS = (4.0, 40.0, 100.0)


def options() -> Iterator[Variant]:
    """Yield every variant."""
    for held, (problem, dtypes) in FORMATS.items():
        for dtype in dtypes:
            bias = None if problem.gate_up_bias is None else dtype
            whole = replace(
                problem,
                dtype=dtype,
                format=FormatPair.parse(held),
                gate_up_bias=bias,
                down_bias=bias,
            )
            points = (problem.K / problem.E, *(_QUANTIZED_POINTS if dtype == "bf16" else (4.0,)))
            for point in points:
                yield _quantized("fused", held, whole, int(point * problem.E / problem.K))
        whole = replace(problem, format=FormatPair.parse(held))
        yield _quantized("grouped", held, whole, int(40.0 * problem.E / problem.K))
    yield _frozen("mxfp4", replace(WHOLE, format=FormatPair.parse("mxfp4")))
    yield _frozen("frozen", FEW)
    for point in (10.0, 100.0):
        yield _added(backward("main_grad", FEW, point), FEW, int(point * FEW.E / FEW.K))
    situ = replace(FEW, activation=SITU, layout=Layout(up_first=True))
    yield forward("situ", situ, 100.0)
    yield backward("situ", situ, 10.0)
    post = Activation(limit=7.0, limit_position="post")
    yield forward("post", replace(FEW, activation=post), 10.0)
    for kind in ("gelu", "gelu_tanh", "relu"):
        yield forward(kind, replace(FEW, activation=Activation(kind=kind)), 10.0)
    for placement in ProbPlacement:
        normed = replace(FEW, norm_eps=1e-5, placement=placement)
        yield backward(f"norm-{placement.value}", normed, 10.0)
    yield forward("fp32-out", replace(FEW, out_dtype="fp32"), 10.0)
    for topk in (2, 16):
        yield single_slots(f"K={topk}", replace(FEW, K=topk))


def _quantized(backend: str, held: str, problem: Problem, tokens: int) -> Variant:
    """Return the forward with quantised weights: upcast by the tiles, or made dense first."""
    rows = tokens * problem.K
    found = indirect_tuning.quantized_heuristic(rows, problem)
    dense = found is None
    first, second = found or indirect_tuning.heuristic(rows, problem.E, problem.device)
    tiles = {
        "_first_projection_kernel": tile_of(held, problem, first),
        "_second_projection_kernel": tile_of(held, problem, second),
    }
    kernels = [FIRST, SECOND, f"{PERMUTE}_sum_kernel"]
    if backend == "grouped":
        del tiles["_first_projection_kernel"]
        staged = (f"{ACTIVATION}_activation_forward_kernel", f"{PERMUTE}_gather_kernel")
        kernels = [*kernels[1:], *staged]
    if dense:
        kernels.append(f"{DEQUANTIZE}{dequantize_kernel(held)}")
    return layer_variant(backend, held, problem, tokens, kernels, tiles)


def _frozen(family: str, problem: Problem) -> Variant:
    """Return the gradients of the input and the probabilities alone, as LoRA takes them."""
    problem = replace(problem, grad=True)
    tokens = int(10.0 * problem.E / problem.K)
    rows = tokens * problem.K
    found = indirect_tuning.quantized_heuristic(rows, problem)
    first, second = found or indirect_tuning.heuristic(rows, problem.E, problem.device)
    hidden = hidden_tuning.heuristic(rows, problem.E, problem.device)
    dx = indirect_tuning.input_gradient_heuristic(rows, problem.E, problem.device)
    tiles: dict[str, Any] = {
        "_first_projection_kernel": tile_of(family, problem, first),
        "_second_projection_kernel": [tile_of(family, problem, tile) for tile in (second, dx)],
        "_hidden_gradient_kernel": tile_of(family, problem, hidden),
    }
    kernels = [
        f"{HIDDEN}_hidden_gradient_kernel",
        f"{HIDDEN}_probs_gradient_kernel",
        FIRST,
        SECOND,
        *(f"{PERMUTE}{name}" for name in ("_sum_kernel", "_tiles_kernel")),
    ]
    if problem.format is not None:
        kernels.append(f"{DEQUANTIZE}{dequantize_kernel(problem.format.gate_up.key)}")
    return layer_variant("fused", family, problem, tokens, kernels, tiles, frozen=True)


def _added(variant: Variant, problem: Problem, tokens: int) -> Variant:
    """Return a variant whose gradients of the projections are added to fp32 buffers."""
    name = "_weight_gradient_kernel"
    tile = {**variant.config[name], "stored": False, "accumulate": True}
    call = partial(calls.layer, replace(problem, grad=True), tokens, "fused", main_grad=True)
    return replace(variant, config={**variant.config, name: tile}, prepare=call)
