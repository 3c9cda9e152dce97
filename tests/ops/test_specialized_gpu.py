"""The second projection by warps of two kinds: the bits of the other kernel, launch for launch."""

from dataclasses import replace

import pytest
import torch

from samebits.ops.indirect_gemm.kernel import launch_second_projection
from samebits.ops.indirect_gemm.tuning import INPUT_GRADIENT_TABLE, TABLE, Config, Specialized
from samebits.ops.permute.kernel import launch_metadata
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

PLAIN = replace(TABLE[-1].second, specialized=None)
# Longest contractions have nothing to do with bits: every size is asked of every tile.
EVERY = sorted(
    {
        replace(config.specialized, most=1 << 20)
        for config in (*(e.second for e in TABLE), *(c for _, c in INPUT_GRADIENT_TABLE))
        if config.specialized is not None
    },
    key=repr,
)
# Rows, experts, contraction, columns: tails of each, experts of few rows and of none.
SIZES = (
    (1000, 7, 2880, 2880),
    (3000, 33, 72, 264),
    (20000, 8, 768, 2048),
)


def _rows(total: int, contraction: int, dtype: torch.dtype) -> torch.Tensor:
    h = torch.randn(total, contraction, device="cuda").to(dtype)
    h[::7] = 0
    h[3::11] *= 1e-3
    return h


def _metadata(total: int, experts: int):
    # The lowest experts have most of the rows, some of the others none.
    ids = (torch.rand(total, 1, device="cuda") ** 3 * experts).long()
    return launch_metadata(ids, experts, PLAIN.block_r)


def _with(specialized: Specialized) -> Config:
    return replace(PLAIN, specialized=specialized)


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from samebits.ops.indirect_gemm.specialized import kernel

    launched: list[str] = []
    inner = kernel.launch_specialized

    def noted(*args) -> None:
        launched.append("specialized")
        inner(*args)

    monkeypatch.setattr(kernel, "launch_specialized", noted)
    return launched


@pytest.mark.parametrize("specialized", EVERY, ids=repr)
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_bits_are_those_of_the_kernel_that_all_others_are_compared_with(
    size: tuple[int, ...],
    dtype: torch.dtype,
    orientation: str,
    specialized: Specialized,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total, experts, contraction, columns = size
    torch.manual_seed(total)
    meta, h = _metadata(total, experts), _rows(total, contraction, dtype)
    w = (torch.randn(experts, columns, contraction, device="cuda") * contraction**-0.5).to(dtype)
    if orientation == "in_out":
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(experts, columns, device="cuda").to(dtype)
    probs = torch.rand(total, device="cuda")
    launched = _watched(monkeypatch)

    for options in ((None, None), (bias, probs)):
        expected = launch_second_projection(h, meta.slots, meta.tiles, w, *options, PLAIN)
        for _ in range(3):
            y = launch_second_projection(h, meta.slots, meta.tiles, w, *options, _with(specialized))
            assert_bitwise_equal(y, expected)

    assert len(launched) == 6


def test_rows_beside_nan_keep_their_bits() -> None:
    torch.manual_seed(0)
    meta, h = _metadata(1000, 5), _rows(1000, 512, torch.bfloat16)
    w = torch.randn(5, 512, 512, device="cuda").bfloat16()
    config = _with(EVERY[0])
    expected = launch_second_projection(h, meta.slots, meta.tiles, w, None, None, config)
    kept = torch.arange(1000, device="cuda") % 3 != 0
    h[~kept] = float("nan")

    y = launch_second_projection(h, meta.slots, meta.tiles, w, None, None, config)

    assert_bitwise_equal(y[kept], expected[kept])
    assert y[~kept].isnan().all()


def test_rows_of_no_tile_stay_unwritten() -> None:
    ids = torch.full((300, 1), -1, device="cuda")
    ids[:130] = 1
    meta, h = launch_metadata(ids, 3, PLAIN.block_r), _rows(300, 128, torch.bfloat16)
    w = torch.randn(3, 256, 128, device="cuda").bfloat16()
    graph, config = torch.cuda.CUDAGraph(), _with(EVERY[0])
    launch_second_projection(h, meta.slots, meta.tiles, w, None, None, config)
    with torch.cuda.graph(graph):
        y = launch_second_projection(h, meta.slots, meta.tiles, w, None, None, config)
    y.fill_(7.0)

    graph.replay()

    assert (y[130:] == 7.0).all()
    assert not (y[:130] == 7.0).all(1).any()


@pytest.mark.parametrize("what", ["columns", "storage", "fp32"])
def test_what_no_box_can_hold_goes_to_the_other_kernel(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if what == "fp32" else torch.bfloat16
    columns = 260 if what == "columns" else 256
    meta, h = _metadata(100, 3), _rows(100, 136, torch.bfloat16)
    w = torch.randn(3, columns, 136, device="cuda").bfloat16()
    if what == "storage":
        w = torch.randn(3, columns, 137, device="cuda").bfloat16()[..., 1:]
    launched = _watched(monkeypatch)

    y = launch_second_projection(
        h, meta.slots, meta.tiles, w, None, None, _with(EVERY[0]), dtype=dtype
    )

    expected = launch_second_projection(
        h, meta.slots, meta.tiles, w, None, None, PLAIN, dtype=dtype
    )
    assert_bitwise_equal(y, expected)
    assert launched == []
