"""Repeat the forward or the backward of a training step by its launches alone.

A step costs the host 15 launches; Triton's search for each of them, and what was decided
before it, are the same in every step. Beside ``samebits.backends.repetition``, which repeats a call
of few tokens: here memory counts (``samebits.backends.recorder``). Copies to another dtype or
layout (probabilities in bf16, a gradient in fp32) are made again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.backends.recorder import Pass, Recorder, Tensors
from samebits.backends.repetition import Watch, has_launches, watched

Key = tuple[Any, ...]

# Kinds of passes that are known; past them all are forgotten.
MOST_PASSES = 4096
_PLAIN = (Tensor, torch.nn.Parameter)


class _Seen:
    """What is known of a kind that came once: it is worth recording if it comes again."""


_ONCE = _Seen()
# A string says why a kind cannot be repeated.
_PASSES: dict[Key, Pass | _Seen | str] = {}


def key_of(about: tuple[Any, ...], tensors: Tensors) -> Key | None:
    """Return everything that decides what a pass launches; None where it must take the long way.

    Determinism: pure function of its arguments and of torch's modes.
    """
    x = tensors[0]
    if x is None or not x.is_cuda or x.numel() == 0 or watched() or not has_launches():
        return None
    traits: list[Any] = [*about, x.get_device()]
    for tensor in tensors:
        if tensor is None:
            traits.append(None)
        elif type(tensor) not in _PLAIN:
            return None
        else:
            # Strides of contiguous tensors follow from their shape, or multiply an index of 0.
            strides = True if tensor.is_contiguous() else tensor.stride()
            traits += (tensor.shape, strides, tensor.dtype, tensor.data_ptr() % 16)
    return tuple(traits)


def repeated(
    about: tuple[Any, ...],
    tensors: Tensors,
    function: Callable[[], Tensors],
    *,
    spent: int | None = None,
) -> Tensors:
    """Return ``function()``, which computes on ``tensors``, by its launches alone where known.

    Args:
        about: What decides besides the tensors.
        tensors: Everything that ``function`` reads or is to write; the first is x.
        function: The pass; its results are allocated in it.
        spent: The tensor whose memory ``function`` gives back (``spend``), so that a repetition
            does, too.

    Determinism: that of ``function``.
    """
    key = key_of(about, tensors)
    if key is None:
        return function()
    known = _PASSES.get(key)
    if isinstance(known, Pass):
        if known.current_device() == tensors[0].get_device():
            return known.play(tensors, spent)
        return function()
    if known is _ONCE:
        return _record(key, tensors, function)
    if key not in _PASSES:
        if len(_PASSES) >= MOST_PASSES:
            forget()
        _PASSES[key] = _ONCE
    return function()


def _record(key: Key, tensors: Tensors, function: Callable[[], Tensors]) -> Tensors:
    # Imported here: the operator must not need Triton.
    from samebits.ops._triton.launch import recorded_launches

    recorder = Recorder(tensors)
    with (
        Watch(recorder.allocated, recorder.copied) as watch,
        recorded_launches(recorder.launched) as made,
    ):
        results = function()
    if watch.others:
        _PASSES[key] = f"it did more than to launch: {', '.join(watch.others)}"
    elif not made.complete:
        _PASSES[key] = f"{made.made} launches were made, {len(made.launches)} seen"
    else:
        _PASSES[key] = recorder.result(results)
    return results


def passes() -> list[Pass | str]:
    """Return what was kept of each recorded pass, or why it cannot be repeated."""
    return [known for known in _PASSES.values() if not isinstance(known, _Seen)]


def forget() -> None:
    """Drop every recorded pass."""
    _PASSES.clear()
