"""Which calls over quantised weights have a tile that upcasts, and which tile."""

from dataclasses import replace

import pytest

from samebits.activation import Activation
from samebits.formats import MXFP4, MXFP4_SHUFFLED, WeightFormat
from samebits.formats.descriptor import FormatPair
from samebits.ops.indirect_gemm.tuning import (
    QUANTIZED_FEW,
    QUANTIZED_TABLE,
    quantized_heuristic,
    supports_upcast,
)
from samebits.problem import Problem
from samebits.weights import Layout

pytestmark = pytest.mark.reference


def pair(held: WeightFormat) -> FormatPair:
    return FormatPair(gate_up=held, down=held)


MIXTRAL = Problem(
    H=4096, F=14336, E=8, K=2, dtype="bf16", device="sm_90", format=pair(MXFP4)
)  # fmt: skip


def test_tiles_follow_the_slots_of_an_expert() -> None:
    table, few = QUANTIZED_TABLE["mxfp4"], QUANTIZED_FEW["mxfp4"]

    assert quantized_heuristic(2, MIXTRAL) == (few.first, few.second)
    # 8 · 28672 / 128 programs fill the device, 8 · 4096 / 64 do not.
    assert quantized_heuristic(32, MIXTRAL) == (table[0].first, few.second)
    assert quantized_heuristic(320, MIXTRAL) == (table[1].first, table[1].second)
    assert quantized_heuristic(321, MIXTRAL) is None


@pytest.mark.parametrize(
    "other",
    [
        {"device": "sm_80"},
        {"device": "sm_100"},
        {"dtype": "fp32"},
        {"format": None},
        {"format": pair(WeightFormat(name="fp8", block=(1, 48)))},
        # Blocks of 56 rows end within a tile.
        {"layout": Layout(interleave=56)},
    ],
    ids=str,
)
def test_other_calls_make_their_weights_dense(other: dict[str, object]) -> None:
    assert quantized_heuristic(32, replace(MIXTRAL, **other)) is None


def test_layouts_whose_parts_a_tile_can_read() -> None:
    for layout in (Layout(), Layout(interleave=1), Layout(interleave=64), Layout(interleave=128)):
        assert quantized_heuristic(32, replace(MIXTRAL, layout=layout)) is not None
    plain = replace(MIXTRAL, activation=Activation(kind="relu2", gated=False))
    assert quantized_heuristic(32, plain) is not None


def test_few_programs_of_shuffled_weights() -> None:
    table, few = QUANTIZED_TABLE["mxfp4_shuffled"], QUANTIZED_FEW["mxfp4_shuffled"]
    problem = replace(MIXTRAL, format=pair(MXFP4_SHUFFLED))

    assert quantized_heuristic(2, problem) == (few.first, few.second)
    assert quantized_heuristic(8, problem) == (table[0].first, table[0].second)
    assert quantized_heuristic(1024, problem) == (table[2].first, table[2].second)
    assert quantized_heuristic(1032, problem) is None


def test_shuffled_weights_have_rows_for_every_warp() -> None:
    tile = QUANTIZED_TABLE["mxfp4_shuffled"][0].second

    assert tile.num_warps == 4
    assert supports_upcast(tile, MXFP4_SHUFFLED)
    assert not supports_upcast(tile, MXFP4)
    many = QUANTIZED_TABLE["mxfp4_shuffled"][-1].first
    assert not many.swap
    assert not supports_upcast(many, MXFP4)
    assert not supports_upcast(replace(many, num_warps=2), MXFP4_SHUFFLED)
    for other in ({"num_warps": 16}, {"block_k": 64}, {"block_n": 32}):
        assert not supports_upcast(replace(tile, **other), MXFP4_SHUFFLED)
    assert supports_upcast(tile, MXFP4_SHUFFLED, 2)
    assert not supports_upcast(replace(tile, block_n=64), MXFP4_SHUFFLED, 2)


def test_every_tile_of_the_tables_may_upcast_every_format() -> None:
    for name, table in QUANTIZED_TABLE.items():
        held = WeightFormat(name=name, block=(128, 128) if name == "fp8" else None)
        for entry in (*table, QUANTIZED_FEW[name]):
            assert entry.first.block_r == entry.second.block_r
            assert supports_upcast(entry.first, held, 2)
            assert supports_upcast(entry.second, held)
