"""Quantised weights in the backends' launches, in the interpreter: the numbers of dense ones.

Every sum is one of small multiples of a power of two, hence exact in any order: the interpreter
does not add as the hardware does. Bits on a GPU are in ``test_quantized_gpu.py``.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.backends import BACKENDS
from samebits.backends.call import DIFFERENTIABLE, Call, call_of
from samebits.backends.matrices import tiles_of
from samebits.formats import (
    FP8,
    MXFP4,
    MXFP4_SHUFFLED,
    MXFP8,
    NVFP4,
    WeightFormat,
    dequantize,
)
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.ops.indirect_gemm import tuning
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Routing
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = [
    pytest.mark.interpret,
    # Rows past the last expert's hold whatever memory held; they are multiplied, never stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

RELU = Activation(kind="relu")
SMALL = Problem(H=64, F=64, E=3, K=2, dtype="fp16", device="sm_90", activation=RELU)
FORMATS = (FP8, MXFP8, MXFP4, NVFP4, MXFP4_SHUFFLED)
LAYOUTS = (Layout(), Layout(interleave=1), Layout(interleave=32, up_first=True))
SMALL_TILE = tuning.Config(
    block_r=8, block_n=64, block_k=32, num_warps=2, num_stages=2, swap=True, programs=3
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tuning.Entry(10.0, SMALL_TILE, SMALL_TILE)
    words = replace(SMALL_TILE, block_k=128)
    shuffled = tuning.Entry(10.0, words, words)
    few = dict.fromkeys(tuning.QUANTIZED_FEW, entry) | {"mxfp4_shuffled": shuffled}
    monkeypatch.setattr(tuning, "QUANTIZED_TABLE", {name: (tile,) for name, tile in few.items()})
    monkeypatch.setattr(tuning, "QUANTIZED_FEW", few)
    dense = replace(SMALL_TILE, tma=False)
    monkeypatch.setattr(tuning, "heuristic", lambda *_: (dense, dense))
    from samebits.ops.grouped_gemm import tuning as grouped_tuning

    monkeypatch.setattr(grouped_tuning, "config_of", lambda *_: dense)


def matrix(held: WeightFormat, shape: tuple[int, int, int], seed: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    sizes = held.shapes(shape)

    def drawn(name: str, low: int, high: int) -> Tensor:
        return torch.randint(low, high, sizes[name], generator=generator).to(torch.uint8)

    if held.values == "e2m1":
        values = drawn("values", 0, 256)
    else:
        values = drawn("values", -3, 4).to(torch.int8).float().to(torch.float8_e4m3fn)
    if held.scales == "e8m0":
        scales = drawn("scales", 125, 127)
    else:
        scales = (drawn("scales", 1, 3).float() / 4).to(held.scale_dtype)
    factor = torch.full((shape[0],), 0.5) if held.global_scale else None
    return QuantizedMatrix(
        format=held, columns=shape[2], values=values, scales=scales, global_scale=factor
    )


def weights(problem: Problem, held: WeightFormat) -> QuantizedWeights:
    shape = (problem.E, problem.activation.columns * problem.F, problem.H)
    return QuantizedWeights(
        gate_up=matrix(held, shape, 1),
        down=matrix(held, (problem.E, problem.H, problem.F), 2),
        dtype=torch.float16,
        down_bias=torch.arange(problem.E * problem.H).reshape(problem.E, -1).half() % 5,
        layout=problem.layout,
    )


def both(problem: Problem, held: WeightFormat) -> tuple[tuple[Problem, Call], tuple[Problem, Call]]:
    """Return the call over quantised weights, and over those that they stand for."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (3, problem.H), generator=generator).half()
    ids = torch.rand(3, problem.E - 1, generator=generator).topk(problem.K).indices
    probs = torch.full((3, problem.K), 0.5)
    stored = weights(problem, held)
    quantized = replace(problem, format=stored.format, down_bias="fp16")
    routing = Routing(ids, probs)
    dense = call_of(x, routing, dequantize(stored), None)
    return (quantized, call_of(x, routing, stored, None)), (replace(quantized, format=None), dense)


@pytest.mark.parametrize(
    ("held", "layout"),
    [
        *zip(FORMATS, (*LAYOUTS, Layout(), Layout()), strict=True),
        (MXFP4_SHUFFLED, Layout(interleave=1)),
    ],
    ids=str,
)
def test_fused_upcasts(held: WeightFormat, layout: Layout) -> None:
    problem = replace(SMALL, layout=layout)
    stored, dense = both(problem, held)

    out, z = BACKENDS["fused"].forward(*stored, save=True)

    assert tiles_of(*stored)[2]
    expected, expected_z = BACKENDS["fused"].forward(*dense, save=True)
    assert_bitwise_equal(z, expected_z)
    assert_bitwise_equal(out, expected)


@pytest.mark.parametrize(
    ("backend", "placement"),
    [
        ("fused", ProbPlacement.FC1_INPUT),
        ("fused", ProbPlacement.FC2_INPUT),
        ("grouped", ProbPlacement.FC2_INPUT),
    ],
    ids=str,
)
def test_every_placement(backend: str, placement: ProbPlacement) -> None:
    stored, dense = both(replace(SMALL, placement=placement), MXFP4)

    out, _ = BACKENDS[backend].forward(*stored, save=False)

    assert_bitwise_equal(out, BACKENDS[backend].forward(*dense, save=False)[0])


def test_scale_padding_of_shuffled_words_has_no_meaning() -> None:
    # 64 columns are half a word of scales, and less than a step.
    (problem, call), dense = both(SMALL, MXFP4_SHUFFLED)
    assert call.gate_up_scales is not None
    assert call.down_scales is not None
    call.gate_up_scales[..., 2:] = 0xFF
    call.down_scales[..., 2:] = 0xFF

    out, _ = BACKENDS["fused"].forward(problem, call, save=False)

    assert_bitwise_equal(out, BACKENDS["fused"].forward(*dense, save=False)[0])


@pytest.mark.parametrize("backend", ["fused", "grouped"])
def test_many_rows_of_shuffled_words(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = replace(SMALL_TILE, block_r=64, block_k=64, num_warps=4, swap=False)
    monkeypatch.setitem(tuning.QUANTIZED_TABLE, "mxfp4_shuffled", (tuning.Entry(10.0, rows, rows),))
    monkeypatch.setitem(tuning.QUANTIZED_FEW, "mxfp4_shuffled", tuning.Entry(0.0, rows, rows))
    stored, dense = both(SMALL, MXFP4_SHUFFLED)

    out, _ = BACKENDS[backend].forward(*stored, save=False)

    assert tiles_of(*stored)[0] == rows
    assert_bitwise_equal(out, BACKENDS[backend].forward(*dense, save=False)[0])


@pytest.mark.parametrize("columns", [64, 70])
def test_what_no_tile_takes_is_made_dense(columns: int) -> None:
    # 70 columns are no whole words; fp32 operands have no matrix unit.
    problem = replace(SMALL, H=columns, dtype="fp16" if columns == 70 else "fp32")
    stored, dense = both(problem, MXFP4)
    if columns == 64:
        stored, dense = ((p, c._replace(x=c.x.float())) for p, c in (stored, dense))
        wide = dense[1]
        dense = dense[0], wide._replace(gate_up=wide.gate_up.float(), down=wide.down.float())

    out, _ = BACKENDS["fused"].forward(*stored, save=False)

    assert not tiles_of(*stored)[2]
    assert_bitwise_equal(out, BACKENDS["fused"].forward(*dense, save=False)[0])


@pytest.mark.parametrize("held", [FP8], ids=str)
def test_gradients_around_frozen_weights(held: WeightFormat) -> None:
    (problem, call), (dense_problem, dense) = both(SMALL, held)
    _, z = BACKENDS["fused"].forward(problem, call, save=True)
    dout = call.x.flip(0)
    wanted = tuple(name in ("x", "topk_probs", "down_bias") for name in DIFFERENTIABLE)

    grads = BACKENDS["fused"].backward(problem, call, z, dout, wanted, {})

    expected = BACKENDS["fused"].backward(dense_problem, dense, z, dout, wanted, {})
    for name in ("x", "topk_probs", "down_bias"):
        assert_bitwise_equal(getattr(grads, name), getattr(expected, name))
    assert grads.gate_up is None


def test_experts_without_rows_are_not_read() -> None:
    (problem, call), _ = both(SMALL, MXFP4)
    expected, _ = BACKENDS["fused"].forward(problem, call, save=False)
    scales = [call.gate_up_scales, call.down_scales]
    # The last expert is nobody's choice.
    poisoned = [s.clone() for s in scales if s is not None]
    for s in poisoned:
        s[-1] = 0xFF

    poisoned_call = call._replace(gate_up_scales=poisoned[0], down_scales=poisoned[1])
    out, _ = BACKENDS["fused"].forward(problem, poisoned_call, save=False)

    assert_bitwise_equal(out, expected)


def test_tiles_that_may_not_upcast() -> None:
    four_warps = replace(SMALL_TILE, num_warps=4)

    assert tuning.supports_upcast(SMALL_TILE, FP8)
    assert not tuning.supports_upcast(four_warps, FP8)
    assert not tuning.supports_upcast(SMALL_TILE, WeightFormat(name="fp8", block=(1, 48)))
