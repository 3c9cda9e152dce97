"""Which product runs: torch's grouped matrix product, or the kernel; both have the same bits."""

import torch
from torch import Tensor

from samebits.ops.indirect_gemm.tuning import Config, heuristic

# Fewer slots per expert than this are bound by reading weights, where the kernel's tiles stream.
TORCH_FROM_SLOTS_PER_EXPERT = 100.0
# torch takes no more groups.
_MOST_EXPERTS = 1024


def config_of(total: int, experts: int, device: str, dtype: str) -> Config:
    """Return the tile for ``total`` slots over ``experts`` experts: that of the second projection.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    _, config = heuristic(max(total, 1), experts, device)
    return config.for_fp32() if dtype == "fp32" else config


def torch_has_the_bits(rows: Tensor, w: Tensor, bias: Tensor | None, device: str) -> bool:
    """Return whether ``torch.nn.functional.grouped_mm`` is known to compute the same, without sync.

    On sm_90, in bf16, one fp32 accumulator over the ascending contraction was found on every shape
    tried (tests/backends/test_grouped_device.py repeats it). Other dtypes loop over the groups,
    waiting for the host; strides and addresses must be multiples of 16 bytes; a bias would be added
    after a rounding.

    Determinism: pure function of addresses, strides and dtypes.
    """
    if device != "sm_90" or rows.dtype != torch.bfloat16 or bias is not None:
        return False
    if w.shape[0] > _MOST_EXPERTS:
        return False
    aligned = (rows.data_ptr() | w.data_ptr()) % 16 == 0
    stride_e, stride_n, stride_k = w.stride()
    # Rows or columns of a matrix are contiguous; whichever is not has the stride that counts.
    if stride_k == 1:
        strides, enough = (stride_e, stride_n), stride_n >= w.shape[2]
    else:
        strides, enough = (stride_e, stride_k), stride_n == 1 and stride_k >= w.shape[1]
    return aligned and enough and not any(s % 8 for s in (*strides, rows.stride(0)))


def prefers_torch(total: int, experts: int) -> bool:
    """Return whether torch's product is the faster one for ``total`` slots, where it may run."""
    return total > TORCH_FROM_SLOTS_PER_EXPERT * experts
