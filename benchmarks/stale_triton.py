"""Functions that launch their own Triton kernels with a Python number, for audits on a GPU."""

import torch
import triton
import triton.language as tl


@triton.jit
def _scale_kernel(x_pointer, out_pointer, scale, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + at, mask=at < n)
    tl.store(out_pointer + at, x * scale, mask=at < n)


@triton.jit
def _limit_kernel(x_pointer, out_pointer, n, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + at, mask=at < n)
    tl.store(out_pointer + at, tl.minimum(x, LIMIT), mask=at < n)


def launch_bare(x, s):
    """The number reaches the kernel as it is."""
    out = torch.empty_like(x)
    _scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, s, x.numel(), BLOCK=1024)
    return out


def launch_expression(x, s):
    """An expression of the number reaches the kernel, and the number a tensor operation."""
    x, out = x * s, torch.empty_like(x)
    _scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, s + 0.1, x.numel(), BLOCK=1024)
    return out


def launch_constant(x, s):
    """The number is a constant of the kernel, which is compiled for its value."""
    x, out = x * s, torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    _limit_kernel[grid](x, out, x.numel(), LIMIT=s / 2, BLOCK=1024)
    return out
