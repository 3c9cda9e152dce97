"""The ways to decode E2M1 of benchmarks/tune_e2m1.py: interpreted, and by their instructions."""

import operator
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.formats import MXFP4
from samebits.formats.packing import quantize_matrix
from samebits.testing.numerics import assert_bitwise_equal

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import e2m1_ways
from e2m1_ways import e2m1_muls, e2m1_paired, shuffled

pytestmark = pytest.mark.interpret

# Of E8M0: from where half of 2^(e - 127) is a normal number, to the largest that both ways take.
SCALES = (*range(3, 128, 2), 128)


@triton.jit
def _muls_kernel(words_ptr, exponents_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + places).to(tl.uint32)
    first, second = e2m1_muls(words, tl.load(exponents_ptr + places).to(tl.uint32))
    tl.store(out_ptr + 2 * places, first.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * places + 1, second.to(tl.int32, bitcast=True))


@triton.jit
def _paired_kernel(words_ptr, scales_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    y = tl.load(words_ptr + 2 * places).to(tl.uint32, bitcast=True)
    z = tl.load(words_ptr + 2 * places + 1).to(tl.uint32, bitcast=True)
    # Four threads have the two scales of 64 columns.
    first = tl.load(scales_ptr + places // 4 * 2).to(tl.uint32)
    second = tl.load(scales_ptr + places // 4 * 2 + 1).to(tl.uint32)
    pairs = e2m1_paired(y, z, first, second)
    for pair in tl.static_range(8):
        tl.store(out_ptr + 8 * places + pair, pairs[pair].to(tl.int32, bitcast=True))


def _bytes_chosen(low: Tensor, high: Tensor, chosen: Tensor) -> Tensor:
    whole, out = low | high << 32, torch.zeros_like(low)
    for place in range(4):
        out = out | (whole >> 8 * (int(chosen) >> 4 * place & 7) & 0xFF) << 8 * place
    return out


def _and_or(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    assert int(table) == (0xF0 & 0xCC) | 0xAA
    return a & b | c


def _numbers(pairs: Tensor) -> Tensor:
    return pairs.to(torch.int32).view(torch.bfloat16).view(*pairs.shape, 2)


def _times(a: Tensor, b: Tensor) -> Tensor:
    product = (_numbers(a).double() * _numbers(b).double()).bfloat16()
    return product.view(torch.int32)[..., 0].long()


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "and.b32": operator.and_,
    "shl.b32": operator.lshift,
    "shr.u32": operator.rshift,
    "sub.u32": operator.sub,
    "mul.lo.u32": operator.mul,
    "shf.r.wrap.b32": lambda low, high, count: (low | high << 32) >> count,
    "prmt.b32": _bytes_chosen,
    "lop3.b32": _and_or,
    "mul.rn.bf16x2": _times,
}


def _executed(text: str, *operands: Tensor) -> Tensor:
    """Return the pairs that PTX makes of 32-bit operands, which follow its results by number."""
    lines = [line.strip(" ;").partition(" ") for line in text.splitlines()]
    results = sum(rest.startswith("$") for _, _, rest in lines)
    held = {f"${results + place}": words for place, words in enumerate(operands)}
    for name, _, rest in lines:
        if name in INSTRUCTIONS:
            target, *given = rest.split(", ")
            values = [held[g] if g in held else torch.tensor(int(g, 0)) for g in given]
            held[target] = INSTRUCTIONS[name](*values) & 0xFFFFFFFF
        else:
            assert name in ("{", "}", ".reg")
    pairs = torch.stack([held[f"${place}"] for place in range(results)], -1)
    return torch.where(pairs < 1 << 31, pairs, pairs - (1 << 32)).to(torch.int32)


def _powers(exponents: Tensor) -> Tensor:
    return (exponents.long() + 126) * 0x00800080


@pytest.fixture(scope="module")
def stored():
    """Rows of random codes, 64 columns each with two scales."""
    generator = torch.Generator().manual_seed(0)
    matrix = quantize_matrix(torch.zeros(1, len(SCALES), 64), MXFP4)
    codes = torch.randint(256, matrix.values.shape, generator=generator, dtype=torch.uint8)
    matrix.values.copy_(codes)
    first = torch.tensor(SCALES, dtype=torch.uint8)
    matrix.scales.copy_(torch.stack([first, first.roll(1)], 1)[None])
    return matrix


def _muls_interpreted(words: Tensor, exponents: Tensor) -> Tensor:
    out = torch.empty(words.numel(), 2, dtype=torch.int32)
    _muls_kernel[(1,)](words, exponents, out, BLOCK=words.numel())
    return out


def _muls_executed(words: Tensor, exponents: Tensor) -> Tensor:
    return _executed(e2m1_ways._MULS.value, words.long(), _powers(exponents))


@pytest.mark.parametrize("decode", [_muls_interpreted, _muls_executed])
def test_words_are_decoded_by_two_products(stored, decode) -> None:
    words = stored.values.view(torch.int16).to(torch.int32).reshape(-1) & 0xFFFF
    exponents = stored.scales.to(torch.int32).reshape(-1).repeat_interleave(8)

    out = decode(words, exponents)

    # Columns (k, k + 2) and (k + 1, k + 3).
    found = out.view(torch.bfloat16).view(-1, 2, 2).transpose(1, 2)
    expected = stored.dequantize(torch.bfloat16)
    assert_bitwise_equal(found.reshape(expected.shape), expected)


def _paired_interpreted(words: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty(words.numel() // 2, 8, dtype=torch.int32)
    _paired_kernel[(1,)](words, scales.to(torch.int32), out, BLOCK=words.numel() // 2)
    return out


def _paired_executed(words: Tensor, scales: Tensor) -> Tensor:
    y, z = (words.long() & 0xFFFFFFFF).view(-1, 2).unbind(1)
    first, second = _powers(scales).view(-1, 2).repeat_interleave(4, 0).unbind(1)
    return _executed(e2m1_ways._PAIRED.value, y, z, first, second)


@pytest.mark.parametrize("decode", [_paired_interpreted, _paired_executed])
def test_shuffled_words_are_decoded_in_pairs(stored, decode) -> None:
    words = shuffled(stored).contiguous()

    out = decode(words, stored.scales)

    # Row, thread, half of 64 columns, instruction, which pair, half of it.
    found = out.view(torch.bfloat16).view(-1, 4, 2, 2, 2, 2).permute(0, 2, 3, 1, 4, 5)
    expected = stored.dequantize(torch.bfloat16)
    assert_bitwise_equal(found.reshape(expected.shape), expected)
