"""MXFP4 in the order in which kernels multiply it, and back: the tensors of ``mxfp4_shuffled``.

The bits of 64 columns of a row, 32 bytes, are eight words; thread t of four takes the words 2t and
2t + 1. They hold columns 4t … 4t + 3 of each 16, as eight pairs of neighbours. Pair p, of columns
16·(p // 2) + 4t + 2·(p % 2) and the next, has its bits where a shift and a mask or two leave a pair
of bf16 numbers, 2⁻¹²⁶ times as large (``PLACES``). Scales are stored four in a word, those of 128
columns, the words of neighbouring rows side by side: a tile of rows reads one piece of memory.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Columns of the words that four threads take, and of a word of scales.
COLUMNS, SCALED = 64, 128
# For each of the eight pairs: (word, bit) of sign, 2, 1 and 1/2 of its first number; the second has
# them 16 bits on, around the end.
PLACES = (
    ((0, 15), (0, 8), (0, 7), (0, 6)),
    ((0, 12), (0, 5), (0, 4), (0, 3)),
    ((0, 18), (0, 11), (0, 10), (0, 9)),
    ((1, 11), (1, 4), (0, 1), (0, 0)),
    ((1, 15), (1, 8), (1, 7), (1, 6)),
    ((1, 9), (1, 2), (1, 1), (1, 0)),
    ((1, 21), (1, 14), (1, 13), (1, 12)),
    ((1, 10), (1, 3), (0, 14), (0, 13)),
)


def shuffle_values(values: Tensor) -> Tensor:
    """Return ``(E, N, K / 2)`` bytes of two E2M1 codes in the order of the kernels; 64 divides K.

    Determinism: exact.
    """
    return _each(values, _shuffled)


def unshuffle_values(values: Tensor) -> Tensor:
    """Return what ``shuffle_values`` was given.

    Determinism: exact.
    """
    return _each(values, _unshuffled)


def shuffle_scales(scales: Tensor) -> Tensor:
    """Return ``(E, N, K / 32)`` bytes as ``(E, ⌈K/128⌉, N, 4)``, those of no columns 0.

    Determinism: exact.
    """
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[2] % 4))
    experts, rows, columns = padded.shape
    return padded.view(experts, rows, columns // 4, 4).transpose(1, 2).contiguous()


def unshuffle_scales(scales: Tensor, columns: int) -> Tensor:
    """Return what ``shuffle_scales`` was given, of a matrix of K ``columns``.

    Determinism: exact.
    """
    whole = scales.transpose(1, 2).flatten(2)
    return whole[..., : columns // 32].contiguous()


def _each(values: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the bytes of each expert changed, one by one: on the way they take 16 times more."""
    out = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    for before, after in zip(values, out, strict=True):
        after.copy_(change(before.contiguous()))
    return out


def _places() -> Iterator[tuple[tuple[int | slice, ...], int, int, int]]:
    """Yield an index of codes (rows, groups, 2, 2, threads, 2, 2), its bit, and word and place."""
    every = slice(None)
    for pair, places in enumerate(PLACES):
        for high in range(2):
            codes = (every, every, pair // 4, pair // 2 % 2, every, pair % 2, high)
            for bit, (word, place) in zip((3, 2, 1, 0), places, strict=True):
                yield codes, bit, word, (place + 16 * high) % 32


def _shuffled(values: Tensor) -> Tensor:
    rows, groups = values.shape[0], values.shape[1] * 2 // COLUMNS
    packed = values.int()
    codes = torch.stack([packed & 15, packed >> 4], -1).view(rows, groups, 2, 2, 4, 2, 2)
    words = packed.new_zeros(rows, groups, 4, 2)
    for index, bit, word, place in _places():
        words[..., word] |= (codes[index] >> bit & 1) << place
    return words.view(torch.uint8).view(values.shape)


def _unshuffled(values: Tensor) -> Tensor:
    rows, groups = values.shape[0], values.shape[1] * 2 // COLUMNS
    words = values.view(torch.int32).view(rows, groups, 4, 2)
    codes = words.new_zeros(rows, groups, 2, 2, 4, 2, 2)
    for index, bit, word, place in _places():
        codes[index] |= (words[..., word] >> place & 1) << bit
    low, high = codes.unbind(-1)
    return (low | high << 4).to(torch.uint8).view(values.shape)
