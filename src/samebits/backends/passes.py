"""Repeat the forward or the backward of a training step by its launches alone.

A step costs the host some 17 launches; Triton's search for each of them, and what was decided
before it, are the same in every step. Beside ``samebits.backends.repetition``, which repeats a call
of few tokens: here memory counts. Each buffer is taken before the first launch that has it among
its arguments and given back after the last, and nothing of a recorded pass is kept alive.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.backends.plan import Step, step_of
from samebits.backends.repetition import Watch, watched

Tensors = tuple[Any, ...]
Key = tuple[Any, ...]

# Kinds of passes that are known; past them all are forgotten.
MOST_PASSES = 4096
_PLAIN = (Tensor, torch.nn.Parameter)


class _Made(NamedTuple):
    """A tensor that a pass allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self, like: Tensor) -> Tensor:
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)


class Pass(NamedTuple):
    """The launches of one kind of pass, each with the buffers to take before and to drop after."""

    steps: tuple[tuple[Step, tuple[int, ...], tuple[int, ...]], ...]
    buffers: tuple[_Made, ...]
    # What to return: the index of a buffer, or a tensor without elements.
    results: tuple[int | _Made | None, ...]
    # The step after which an input is not read again.
    last: tuple[int | None, ...]
    stream_of: Callable[[int], int]
    current_device: Callable[[], int]

    def play(self, tensors: Tensors, spent: int | None) -> Tensors:
        """Launch on ``tensors``, as they were given to ``Recorder``; return the results.

        ``spent`` is the index of the tensor whose memory is given back after its last use.

        Determinism: the recorded kernels, hence the bits of the recorded pass.
        """
        x = tensors[0]
        assert x is not None
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        first = len(addresses)
        addresses += [0] * len(self.buffers)
        memory: list[Tensor | None] = [None] * len(self.buffers)
        over = -1 if spent is None else self.last[spent]
        stream = self.stream_of(x.get_device())
        for index, (step, taken, dropped) in enumerate(self.steps):
            for buffer in taken:
                tensor = memory[buffer] = self.buffers[buffer].make(x)
                addresses[first + buffer] = tensor.data_ptr()
            step.start(addresses, stream)
            for buffer in dropped:
                memory[buffer] = None
            if index == over:
                assert spent is not None
                spend(tensors[spent])
        return tuple(
            memory[r] if isinstance(r, int) else None if r is None else r.make(x)
            for r in self.results
        )


def spend(tensor: Tensor | None) -> None:
    """Give back the memory of ``tensor``, whoever holds it.

    Determinism: no arithmetic.
    """
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


class Recorder:
    """Turn the launches of a pass, one by one, into what can be repeated."""

    def __init__(self, tensors: Tensors) -> None:
        self._inputs = [
            (index, t.untyped_storage().data_ptr(), t.data_ptr())
            for index, t in enumerate(tensors)
            if t is not None
        ]
        self._count = len(tensors)
        self._buffers: list[_Made] = []
        # Start of the storage of each buffer -> the last buffer that was allocated there.
        self._there: dict[int, int] = {}
        # Of each buffer and input: first and last step that has it among its arguments.
        self._spans: dict[int, tuple[int, int]] = {}
        self._steps: list[Step] = []
        # The launch with a pointer to nothing that is known.
        self._lost: str | None = None

    def allocated(self, tensor: Tensor) -> None:
        """Hear of an allocation."""
        if tensor.numel():
            start = tensor.untyped_storage().data_ptr()
            # An input that was there has been spent.
            self._inputs = [place for place in self._inputs if place[1] != start]
            self._there[start] = len(self._buffers)
            self._buffers.append(_Made(tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (source, offset) of an argument of the next launch; see ``plan.Finder``."""
        found = self._place(tensor)
        if found is not None:
            step = len(self._steps)
            first, _ = self._spans.get(found[0], (step, step))
            self._spans[found[0]] = first, step
        return found

    def launched(self, launch: Any) -> None:
        """Keep a launch (``samebits.ops._triton.launch.Launch``)."""
        if self._lost is not None:
            return
        step = step_of(self, *launch)
        if step is None:
            self._lost = f"launch {len(self._steps)} has memory of unknown origin"
        else:
            self._steps.append(step)

    def result(self, results: Tensors) -> Pass | str:
        """Return the recorded pass, or why it cannot be repeated."""
        # Imported here: the operator must not need Triton.
        from samebits.ops._triton.launch import device_queries

        if self._lost is not None:
            return self._lost
        found: list[int | _Made | None] = []
        for tensor in results:
            if tensor is None:
                found.append(None)
                continue
            made = _Made(tuple(tensor.shape), tensor.stride(), tensor.dtype)
            buffer = self._there.get(tensor.untyped_storage().data_ptr())
            if tensor.numel() == 0:
                found.append(made)
            elif buffer is None or self._buffers[buffer] != made or buffer in found:
                return f"result {len(found)} is no buffer of its own"
            else:
                found.append(buffer)
        returned = {buffer for buffer in found if isinstance(buffer, int)}
        spans = {s - self._count: span for s, span in self._spans.items() if s >= self._count}
        if not returned <= spans.keys():
            return "a result is written by no launch"
        steps = []
        for index, step in enumerate(self._steps):
            taken = tuple(b for b, (first, _) in spans.items() if first == index)
            dropped = tuple(
                b for b, (_, last) in spans.items() if last == index and b not in returned
            )
            steps.append((step, taken, dropped))
        ends = (self._spans.get(source) for source in range(self._count))
        last = tuple(None if end is None else end[1] for end in ends)
        return Pass(tuple(steps), tuple(self._buffers), tuple(found), last, *device_queries())

    def _place(self, tensor: Tensor) -> tuple[int, int] | None:
        start, address = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if any(start == storage for _, storage, _ in self._inputs):
            # Inputs may be cut from one storage, and next time from others.
            exact = [index for index, _, place in self._inputs if place == address]
            return (exact[0], 0) if len(exact) == 1 else None
        buffer = self._there.get(start)
        return None if buffer is None else (self._count + buffer, address - start)


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
    if x is None or not x.is_cuda or x.numel() == 0 or watched():
        return None
    traits: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            traits.append(None)
        elif type(tensor) not in _PLAIN:
            return None
        else:
            place = (tensor.get_device(), tensor.data_ptr() % 16)
            traits += (tensor.shape, tensor.stride(), tensor.dtype, place)
    return (*about, *traits)


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
    with Watch(recorder.allocated) as watch, recorded_launches(recorder.launched) as made:
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
