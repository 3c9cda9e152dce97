"""Bytes of tensors: compare them, make a digest of them, fill memory that is taken unwritten."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Functions that return unwritten memory.
_TAKING = (
    (torch, ("empty", "empty_like", "empty_strided")),
    (torch.Tensor, ("new_empty", "new_empty_strided")),
)
_GOLDEN = -0x61C8864680B583EB
_MIXES = ((-0x40A7B892E31B1A47, 27), (-0x6B2FB644ECCEEE15, 31))


@contextmanager
def filled(byte: int) -> Iterator[list[Tensor]]:
    """Fill memory that is taken unwritten with one byte; yield the tensors, in order.

    For processes that belong to a check: torch's functions are replaced for a while.
    """
    taken: list[Tensor] = []

    def replacement(take: Any) -> Any:
        def taking(*arguments: Any, **options: Any) -> Any:
            tensor = take(*arguments, **options)
            if tensor.device.type != "meta" and tensor.numel():
                with torch.no_grad():
                    _storage(tensor).fill_(byte)
                taken.append(tensor)
            return tensor

        return taking

    with ExitStack() as stack:
        for owner, names in _TAKING:
            for name in names:
                changed = replacement(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, changed))
        yield taken


def same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether all tensors have the same bytes, signed zeros and NaN payloads included."""
    if [_form(t) for t in actual] != [_form(t) for t in expected]:
        return False
    return all(torch.equal(_words(a), _words(b)) for a, b in zip(actual, expected, strict=True))


def first_difference(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> str:
    """Return where tensors that are not the ``same`` differ first, and in how many elements."""
    if [_form(t) for t in actual] != [_form(t) for t in expected]:
        return f"{what}s of other shapes"
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        different = differing(a, b)
        if different.numel():
            place = int(different[0])
            pair = " and ".join(_spelled(t, place) for t in (a, b))
            return (
                f"{what} {index}: {len(different)} of {a.numel()} elements, first {place}: {pair}"
            )
    return "nowhere"


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Return the flat places of the elements whose bytes differ; shape and dtype must be alike."""
    size = a.element_size()
    return (_bytes(a).view(-1, size) != _bytes(b).view(-1, size)).any(1).nonzero().reshape(-1)


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a hash of shapes, dtypes and bytes, made on the tensors' device.

    Sums over words, modulo 2^64, of a mix of the word and its place: exact in any order.
    """
    hashed = hashlib.sha256()
    for tensor in tensors:
        words = _words(tensor)
        if words.dtype != torch.int64:
            words = words.to(torch.int64)
        place = torch.arange(1, words.numel() + 1, device=words.device) * _GOLDEN
        sums = [int(_mixed(words + place, *mix).sum()) for mix in _MIXES]
        hashed.update(repr((_form(tensor), sums)).encode())
    return hashed.hexdigest()[:32]


def _mixed(words: Tensor, factor: int, shift: int) -> Tensor:
    # Both steps can be undone, so one word that differs always changes the sum.
    words = words * factor
    return words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))


def _form(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape)


def _storage(tensor: Tensor) -> Tensor:
    """Return all bytes behind a tensor, as a view."""
    whole = torch.zeros(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes in words of eight, where they are as many."""
    flat = _bytes(tensor)
    whole = flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0
    return flat.view(torch.int64) if whole else flat


def _spelled(tensor: Tensor, place: int) -> str:
    flat = tensor.detach().contiguous().view(-1)[place]
    size = flat.element_size()
    text = bytes(_bytes(flat.reshape(1)).tolist())[::-1].hex()
    return f"{flat.item()!r} (0x{text:0>{2 * size}})"
