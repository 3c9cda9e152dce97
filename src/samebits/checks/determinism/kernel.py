"""Planted faults: kernels whose bits depend on which program runs first, or on old memory.

    sum_atomic     out[c] = Σ_i x[i, c]               by atomics, in the order in which programs come
    last_writer    out[c] = the sign, or the NaN payload, of the program that writes last
    early_reader   out[p] = Σ of what other programs have written so far, without waiting for them
    old_memory     out[i] = scratch[i]                 which nobody wrote

The replays of `samebits check determinism` must see each: a harness that never saw a race proves
nothing where it sees none. Fp32; a program owns one block of 128 columns, or one row.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128


@triton.jit
def _sum_atomic_kernel(x_ptr, out_ptr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + tl.program_id(0) * COLUMNS + columns)
    tl.atomic_add(out_ptr + columns, x)


@triton.jit
def _last_writer_kernel(x_ptr, out_ptr, PAYLOAD: tl.constexpr, CELLS: tl.constexpr):
    # Values that compare equal, or that compare with nothing: only their bytes differ.
    program = tl.program_id(0) // CELLS
    # From far apart in memory, so that it takes longer now and then; adds 0.
    late = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * 1024)
    program += tl.where(late > 0.0, 1, 0)
    bits = (program % 2) << 31
    if PAYLOAD:
        bits = 0x7FC00000 + program
    tl.store(out_ptr + tl.program_id(0) % CELLS, bits.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _early_reader_kernel(x_ptr, shared_ptr, out_ptr, PROGRAMS: tl.constexpr):
    program = tl.program_id(0)
    tl.store(shared_ptr + program, tl.load(x_ptr + program))
    others = tl.arange(0, PROGRAMS)
    tl.store(out_ptr + program, tl.sum(tl.load(shared_ptr + others), 0))


@triton.jit
def _old_memory_kernel(scratch_ptr, out_ptr, COLUMNS: tl.constexpr):
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out_ptr + place, tl.load(scratch_ptr + place))


def prepare_sum_atomic(device: torch.device) -> Callable[[], Tensor]:
    """Return the call that adds rows by atomics."""
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(_programs(device, 8192), COLUMNS, device=device, generator=generator)

    def call() -> Tensor:
        out = torch.zeros(COLUMNS, device=device)
        _sum_atomic_kernel[(x.shape[0],)](
            x, out, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False
        )
        return out

    return call


def prepare_last_writer(device: torch.device, *, payload: bool) -> Callable[[], Tensor]:
    """Return the call in which programs overwrite each other's zeros, or NaNs."""
    # Neighbours in the grid write to one cell.
    cells = _programs(device, 32)
    x = torch.zeros(cells * cells * cells * 1024, device=device)

    def call() -> Tensor:
        out = torch.zeros(cells, device=device)
        _last_writer_kernel[(cells * cells * cells,)](
            x, out, PAYLOAD=payload, CELLS=cells, num_warps=1, enable_fp_fusion=False
        )
        return out

    return call


def prepare_early_reader(device: torch.device) -> Callable[[], Tensor]:
    """Return the call whose programs read what others may not have written."""
    programs = _programs(device, 1024)
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.rand(programs, device=device, generator=generator)

    def call() -> Tensor:
        shared = torch.zeros(programs, device=device)
        out = torch.empty(programs, device=device)
        _early_reader_kernel[(programs,)](
            x, shared, out, PROGRAMS=programs, num_warps=1, enable_fp_fusion=False
        )
        return out

    return call


def prepare_old_memory(device: torch.device) -> Callable[[], Tensor]:
    """Return the call that reads memory nobody wrote."""
    blocks = _programs(device, 64)

    def call() -> Tensor:
        scratch = torch.empty(blocks * COLUMNS, device=device)
        out = torch.empty_like(scratch)
        _old_memory_kernel[(blocks,)](
            scratch, out, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False
        )
        return out

    return call


def _programs(device: torch.device, count: int) -> int:
    # The interpreter runs programs one after the other: races need a GPU, few programs do there.
    return count if device.type == "cuda" else 4
