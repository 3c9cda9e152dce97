"""The launches of one call, to be repeated on the tensors of another of the same kind.

A recorded argument is a pointer into an input, into the output, or into memory that the call took
for itself: the last becomes one workspace. Everything else about a launch is kept as it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Buffers start at multiples of this, as the allocator's do: kernels are compiled for alignments.
_ALIGNMENT = 512


class _Described:
    """What a launcher reads of a tensor descriptor; holds no tensor."""

    def __init__(self, address: int, like: Any) -> None:
        self.address = address
        self.base = self
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        # Triton 3.7 added it.
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)

    def data_ptr(self) -> int:
        return self.address


class _Place(NamedTuple):
    """Where a pointer among the arguments of a launch comes from."""

    argument: int
    # Index into the addresses of a call: its tensors, then the workspace, then the output.
    source: int
    offset: int


class _Step(NamedTuple):
    """One launch, ready but for its addresses."""

    run: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    arguments: tuple[Any, ...]
    pointers: tuple[_Place, ...]
    # Descriptors, with the place of what they describe.
    descriptors: tuple[tuple[_Place, _Described], ...]


class Plan(NamedTuple):
    """The launches of one kind of call."""

    steps: tuple[_Step, ...]
    # Bytes that the call takes for itself.
    workspace: int
    out_dtype: torch.dtype
    stream_of: Callable[[int], int]
    current_device: Callable[[], int]

    def play(self, tensors: Sequence[Tensor | None], out: Tensor | None) -> Tensor:
        """Launch on ``tensors``, as they were given to ``plan_of``; return the output.

        Determinism: the recorded kernels, hence the bits of the recorded call.
        """
        x = tensors[0]
        assert x is not None
        if out is None:
            out = x.new_empty(x.shape, dtype=self.out_dtype)
        workspace = x.new_empty(self.workspace, dtype=torch.uint8)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        addresses += (workspace.data_ptr(), out.data_ptr())
        stream = self.stream_of(x.get_device())
        for run, grid, function, metadata, template, pointers, descriptors in self.steps:
            arguments: list[Any] = list(template)
            for argument, source, offset in pointers:
                arguments[argument] = addresses[source] + offset
            for (argument, source, offset), like in descriptors:
                arguments[argument] = _Described(addresses[source] + offset, like)
            # As a JIT function calls it once it has found the kernel (Triton 3.4 to 3.9); without
            # the hooks of profilers.
            run(*grid, stream, function, metadata, None, None, None, *arguments)
        return out


def plan_of(
    tensors: Sequence[Tensor | None], given: Tensor | None, launches: Sequence[Any], out: Tensor
) -> Plan | None:
    """Return the plan of a recorded call; None where a pointer could mean two of its tensors.

    Args:
        tensors: The inputs; the first is x.
        given: The caller's output, if there was one.
        launches: ``samebits.ops._triton.launch.Launch`` objects, in order.
        out: What the call returned.

    Determinism: pure function of addresses.
    """
    # Imported here: the operator must not need Triton.
    from samebits.ops._triton.launch import device_queries

    finder = _Finder(tensors, out)
    steps = []
    for compiled, grid, arguments in launches:
        pointers, descriptors = [], []
        for index, argument in enumerate(arguments):
            described = hasattr(argument, "block_shape")
            tensor = argument.base if described else argument
            if not isinstance(tensor, Tensor):
                continue
            found = finder.find(tensor)
            if found is None:
                return None
            place = _Place(index, *found)
            if described:
                descriptors.append((place, _Described(0, argument)))
            else:
                pointers.append(place)
        moved = {place.argument for place in (*pointers, *(place for place, _ in descriptors))}
        template = tuple(None if i in moved else a for i, a in enumerate(arguments))
        whole = (*grid, 1, 1)[:3]
        handles = (compiled.run, whole, compiled.function, compiled.packed_metadata)
        steps.append(_Step(*handles, template, tuple(pointers), tuple(descriptors)))
    if given is not None and out is not given:
        return None
    return Plan(tuple(steps), finder.workspace, out.dtype, *device_queries())


class _Finder:
    """Say where a tensor of a recorded call lies: in an input, the workspace or the output."""

    def __init__(self, tensors: Sequence[Tensor | None], out: Tensor) -> None:
        self.workspace_index = len(tensors)
        self.given = [
            (index, t.untyped_storage().data_ptr(), t.data_ptr())
            for index, t in (*enumerate(tensors), (self.workspace_index + 1, out))
            if t is not None
        ]
        self.workspace = 0
        # Storage address -> offset in the workspace. The recorded launches keep storages alive.
        self.buffers: dict[int, int] = {}

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (source, offset), or None where two tensors of the call could be meant."""
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        start = storage.data_ptr()
        if any(start == other for _, other, _ in self.given):
            # Callers may cut inputs and output from one storage, and next time from others.
            exact = [index for index, _, place in self.given if place == address]
            return (exact[0], 0) if len(exact) == 1 else None
        if start not in self.buffers:
            self.buffers[start] = self.workspace
            self.workspace += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return self.workspace_index, self.buffers[start] + address - start
