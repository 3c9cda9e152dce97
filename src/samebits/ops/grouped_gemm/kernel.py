"""``y[r, :] = D(Σ_i rows[r, i] · w[e, :, i] + bias[e, :] [· p])``, one launch.

The kernel is that of the second projection (``samebits.ops.indirect_gemm.kernel``): its rows are
contiguous too, and one kernel has one set of bits.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from samebits.formats.matrix import QuantizedMatrix
from samebits.ops.grouped_gemm.tuning import prefers_torch, torch_has_the_bits
from samebits.ops.indirect_gemm.kernel import launch_second_projection
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.tuning import Metadata


def launch_grouped_gemm(
    rows: Tensor,
    metadata: Metadata,
    w: Tensor | QuantizedMatrix,
    bias: Tensor | None,
    probs: Tensor | None,
    config: Config,
    device: str,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``y``, ``(R, N)``; rows of no expert stay unwritten.

    Args:
        rows: ``(R, K)``, contiguous, sorted by expert.
        metadata: Of the rows, with tiles of ``config.block_r``.
        w: ``(E, N, K)``, any strides; quantised ones need a tile that upcasts.
        bias: ``(E, N)``, any strides.
        probs: ``(T, K)`` by slot, factor of the bias alone.
        config: Tile of the kernel.
        device: As in ``Problem``.
        dtype: Of y; None is that of the rows.

    Determinism: one accumulator per element, contraction ascending; the same bits for every config,
    and for torch's product where that runs.
    """
    dense = not isinstance(w, QuantizedMatrix)
    wanted = dense and dtype is None and prefers_torch(rows.shape[0], w.shape[0])
    if wanted and torch_has_the_bits(rows, w, bias, device):
        return grouped_mm(rows, w.transpose(1, 2), offs=metadata.offsets[1:])
    return launch_second_projection(
        rows, metadata.slots, metadata.tiles, w, bias, probs, config, dtype=dtype
    )
