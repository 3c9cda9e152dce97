"""The grouped product in the interpreter; which calls torch's product may serve."""

import pytest
import torch

from samebits.ops.grouped_gemm.kernel import launch_grouped_gemm
from samebits.ops.grouped_gemm.reference import grouped_gemm
from samebits.ops.grouped_gemm.tuning import config_of, prefers_torch, torch_has_the_bits
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.kernel import launch_metadata
from samebits.testing.numerics import assert_within_budget

pytestmark = [
    pytest.mark.interpret,
    # Rows past the last expert's hold whatever memory held; they are multiplied, never stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

TILE = Config(block_r=16, block_n=32, block_k=16, num_warps=4, num_stages=2, programs=3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns", "contraction"), [(40, 63, 37), (17, 7, 24)])
def test_equals_the_reference(rows: int, columns: int, contraction: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 5, (rows, 1), generator=generator)
    probs = torch.rand(rows, 1, generator=generator)
    values = torch.randn(rows, contraction, generator=generator)
    w = torch.randn(5, columns, contraction, generator=generator)
    bias = torch.randn(5, columns, generator=generator) if biased else None
    metadata = launch_metadata(ids, 5, TILE.block_r)
    live = int(metadata.offsets[-1])
    factor = probs.reshape(-1)[metadata.slots[:live].long()]

    y = launch_grouped_gemm(values, metadata, w, bias, probs, TILE, "sm_80")

    assert 0 < live < rows
    plain, exact = (
        grouped_gemm(
            values.to(dtype), metadata.offsets, w.to(dtype),
            None if bias is None else bias.to(dtype), factor.to(dtype),
        )
        for dtype in (torch.float32, torch.float64)
    )  # fmt: skip
    assert_within_budget(y[:live], plain, exact, torch.float32)


def test_torch_serves_only_what_it_computes_with_the_same_bits() -> None:
    rows = torch.zeros(8, 64, dtype=torch.bfloat16)
    w = torch.zeros(2, 32, 64, dtype=torch.bfloat16)
    transposed = torch.zeros(2, 64, 32, dtype=torch.bfloat16).transpose(1, 2)
    odd = torch.zeros(2, 32, 66, dtype=torch.bfloat16)[:, :, :64]

    assert torch_has_the_bits(rows, w, None, "sm_90")
    assert torch_has_the_bits(rows, transposed, None, "sm_90")
    refused = [
        (rows, w, None, "sm_80"),
        (rows, w, None, "sm_100"),
        (rows.half(), w.half(), None, "sm_90"),
        (rows, w, torch.zeros(2, 32), "sm_90"),
        (rows, odd, None, "sm_90"),
        (rows, w[:, :, ::2], None, "sm_90"),
        (rows, w[:, :, 1:], None, "sm_90"),
        (rows[:, :63].contiguous(), w, None, "sm_90"),
        (rows, w[:1].expand(2000, -1, -1), None, "sm_90"),
    ]
    assert not any(torch_has_the_bits(*arguments) for arguments in refused)


def test_few_rows_run_in_the_kernel_whatever_torch_could() -> None:
    assert not prefers_torch(100 * 8, 8)
    assert prefers_torch(100 * 8 + 1, 8)


def test_tiles_are_those_of_the_second_projection() -> None:
    assert config_of(0, 8, "sm_80", "bf16") == config_of(10**6, 8, "sm_80", "bf16")
    assert config_of(4, 8, "sm_90", "bf16") != config_of(10**6, 8, "sm_90", "bf16")
    assert config_of(10**6, 8, "sm_90", "fp32").block_r <= 64
