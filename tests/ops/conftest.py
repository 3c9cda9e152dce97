"""Kernels run in Triton's interpreter where there is no GPU; decided before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Triton decorates its own library with what it finds here when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")  # noqa: TID251
