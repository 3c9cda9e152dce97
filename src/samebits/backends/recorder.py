"""Record the launches of a pass, and play them again: see ``samebits.backends.passes``.

Each buffer is taken before the first launch that has it among its arguments and given back after
the last, and nothing of a recorded pass is kept alive.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.backends.plan import ALIGNMENT, Step, step_of
from samebits.backends.repetition import Copy

Tensors = tuple[Any, ...]

# Bytes up to which a buffer costs more time to take than memory to keep.
_SMALL = 1 << 18


class _Made(NamedTuple):
    """A tensor that a pass allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """From its first element to its last."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (reach + 1) * self.dtype.itemsize

    def make(self, like: Tensor) -> Tensor:
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)


class _Again(NamedTuple):
    """A copy, made again of a tensor of the pass at hand."""

    function: Callable[..., Tensor]
    # An input's index, or behind them a buffer's.
    source: int
    rest: tuple[Any, ...]
    options: dict[str, Any]
    # The buffer that it makes.
    result: int


def _made_like(tensor: Tensor) -> _Made:
    return _Made(tuple(tensor.shape), tensor.stride(), tensor.dtype)


# A buffer by its number, and what is allocated for it.
_Taken = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Pass(NamedTuple):
    """The launches of one kind of pass, each with the buffers to take before and to drop after."""

    steps: tuple[tuple[Step | _Again, tuple[_Taken, ...], tuple[int, ...]], ...]
    # How many there are.
    buffers: int
    # Small buffers and their places in one that lives as long as the pass; its bytes.
    small: tuple[tuple[int, int], ...]
    room: int
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
        addresses += [0] * self.buffers
        memory: list[Any] = [None] * self.buffers
        over = -1 if spent is None else self.last[spent]
        stream = self.stream_of(x.get_device())
        if self.room:
            together = x.new_empty(self.room, dtype=torch.uint8)
            start = together.data_ptr()
            for buffer, offset in self.small:
                addresses[first + buffer] = start + offset
        make = x.new_empty_strided
        for index, (step, taken, dropped) in enumerate(self.steps):
            for buffer, shape, strides, dtype in taken:
                # Nothing else may hold it: it is dropped from here.
                memory[buffer] = make(shape, strides, dtype=dtype)
                addresses[first + buffer] = memory[buffer].data_ptr()
            if isinstance(step, Step):
                step.start(addresses, stream)
            else:
                function, source, rest, options, made = step
                of = tensors[source] if source < first else memory[source - first]
                memory[made] = function(of, *rest, **options)
                addresses[first + made] = memory[made].data_ptr()
                del of
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
        self._made = [None if t is None else _made_like(t) for t in tensors]
        self._buffers: list[_Made] = []
        # Start of the storage of each buffer -> the last buffer that was allocated there.
        self._there: dict[int, int] = {}
        # Of each buffer and input: first and last step that has it among its arguments.
        self._spans: dict[int, tuple[int, int]] = {}
        self._steps: list[Step | _Again] = []
        # The launch with a pointer to nothing that is known.
        self._lost: str | None = None

    def allocated(self, tensor: Tensor) -> None:
        """Hear of an allocation."""
        if tensor.numel():
            start = tensor.untyped_storage().data_ptr()
            # An input that was there has been spent.
            self._inputs = [place for place in self._inputs if place[1] != start]
            self._there[start] = len(self._buffers)
            self._buffers.append(_made_like(tensor))

    def copied(self, copy: Copy) -> bool:
        """Hear of a copy; return False where it is not one of a whole input or buffer."""
        found = self._place(copy.source)
        if found is None or found[1] or not copy.result.numel():
            return False
        if copy.result.device != copy.source.device:
            return False
        (source, _), like = found, _made_like(copy.source)
        whole = (*self._made, *self._buffers)[source]
        if like != whole:
            return False
        self._use(source)
        self.allocated(copy.result)
        result = len(self._buffers) - 1
        self._use(self._count + result)
        self._steps.append(_Again(copy.function, source, copy.rest, copy.options, result))
        return True

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (source, offset) of an argument of the next launch; see ``plan.Finder``."""
        found = self._place(tensor)
        if found is not None:
            self._use(found[0])
        return found

    def _use(self, source: int) -> None:
        step = len(self._steps)
        first, _ = self._spans.get(source, (step, step))
        self._spans[source] = first, step

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
            made = _made_like(tensor)
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
        copies = [step for step in self._steps if isinstance(step, _Again)]
        made_by_copies = {step.result for step in copies}
        # What is copied, or a copy, has to be a tensor of its own.
        alone = made_by_copies | {step.source - self._count for step in copies}
        small, room = self._together(spans.keys() - returned - alone)
        for buffer, _ in small:
            del spans[buffer]
        steps = []
        for index, step in enumerate(self._steps):
            begun = (b for b, (f, _) in spans.items() if f == index and b not in made_by_copies)
            taken = tuple((b, *self._buffers[b]) for b in begun)
            dropped = tuple(
                b for b, (_, last) in spans.items() if last == index and b not in returned
            )
            steps.append((step, taken, dropped))
        ends = (self._spans.get(source) for source in range(self._count))
        last = tuple(None if end is None else end[1] for end in ends)
        return Pass(
            tuple(steps),
            len(self._buffers),
            tuple(small),
            room,
            tuple(found),
            last,
            *device_queries(),
        )

    def _together(self, buffers: set[int]) -> tuple[list[tuple[int, int]], int]:
        """Return the places of the small ones in one buffer, and its bytes."""
        small, room = [], 0
        for buffer in buffers:
            size = self._buffers[buffer].bytes
            if size <= _SMALL:
                small.append((buffer, room))
                room += -(-size // ALIGNMENT) * ALIGNMENT
        return small, room

    def _place(self, tensor: Tensor) -> tuple[int, int] | None:
        start, address = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if any(start == storage for _, storage, _ in self._inputs):
            # Inputs may be cut from one storage, and next time from others.
            exact = [index for index, _, place in self._inputs if place == address]
            return (exact[0], 0) if len(exact) == 1 else None
        buffer = self._there.get(start)
        return None if buffer is None else (self._count + buffer, address - start)
