"""The launches of one call, to be repeated on the tensors of another of the same kind.

A recorded argument is a pointer into an input, into the output, or into memory that the call took
for itself: the last becomes one workspace. Everything else about a launch is kept as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Buffers start at multiples of this, as the allocator's do: kernels are compiled for alignments.
ALIGNMENT = 512


class _Place(NamedTuple):
    """Where a pointer among the arguments of a launch comes from."""

    argument: int
    # Index into the addresses of a call: its tensors, then the workspace, then the output.
    source: int
    offset: int


class Step(NamedTuple):
    """One launch, ready but for its stream and addresses; see ``direct.Start``."""

    function: Callable[..., Any]
    before: tuple[int, int, int]
    after: tuple[Any, ...]
    whole: bool
    arguments: tuple[Any, ...]
    pointers: tuple[_Place, ...]
    # Descriptors by address, with the place of what they describe.
    descriptors: tuple[tuple[_Place, Mapping[int, Any]], ...]

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """Launch with its pointers at ``addresses``, by source.

        Determinism: the recorded kernel.
        """
        function, before, after, whole, template, pointers, descriptors = self
        arguments = list(template)
        for argument, source, offset in pointers:
            arguments[argument] = addresses[source] + offset
        for (argument, source, offset), made in descriptors:
            arguments[argument] = made[addresses[source] + offset]
        if whole:
            function(*before, stream, *after, arguments)
        else:
            function(*before, stream, *after, *arguments)


class Finder(Protocol):
    """Who knows where the tensors of a recorded call lie."""

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (source, offset), or None where two tensors of the call could be meant."""


class Plan(NamedTuple):
    """The launches of one kind of call."""

    steps: tuple[Step, ...]
    # Bytes that the call takes for itself.
    workspace: int
    out_dtype: torch.dtype
    # The output is made like x.
    like_x: bool
    stream_of: Callable[[int], int]
    current_device: Callable[[], int]

    def play(self, x: Tensor, inputs: Sequence[int], out: Tensor | None) -> Tensor:
        """Launch on the tensors at ``inputs``, in the order of ``plan_of``; return the output.

        Determinism: the recorded kernels, hence the bits of the recorded call.
        """
        if out is None:
            out = torch.empty_like(x) if self.like_x else x.new_empty(x.shape, dtype=self.out_dtype)
        workspace = x.new_empty(self.workspace, dtype=torch.uint8)
        addresses = (*inputs, workspace.data_ptr(), out.data_ptr())
        stream = self.stream_of(x.get_device())
        for step in self.steps:
            step.start(addresses, stream)
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

    if given is not None and out is not given:
        return None
    finder = _Finder(tensors, out)
    steps = [step_of(finder, *launch) for launch in launches]
    known = tuple(step for step in steps if step is not None)
    if len(known) < len(steps):
        return None
    x = tensors[0]
    assert x is not None
    like_x = out.dtype == x.dtype and x.is_contiguous()
    return Plan(known, finder.workspace, out.dtype, like_x, *device_queries())


def step_of(
    finder: Finder, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> Step | None:
    """Return one launch with its pointers found; None where one could mean two tensors."""
    from samebits.ops._triton.direct import start_of

    described = {i: a for i, a in enumerate(arguments) if hasattr(a, "block_shape")}
    function, before, after, whole, made = start_of(compiled, grid, described)
    template: list[Any] = []
    pointers, descriptors = [], []
    for index, argument in enumerate(arguments):
        tensor = argument.base if index in described else argument
        if not isinstance(tensor, Tensor):
            template.append(argument)
            continue
        found = finder.find(tensor)
        if found is None:
            return None
        place = _Place(len(template), *found)
        template.append(None)
        if index in described:
            by_address, rest = made[index]
            descriptors.append((place, by_address))
            template += rest
        else:
            pointers.append(place)
    moved = tuple(pointers), tuple(descriptors)
    return Step(function, before, after, whole, tuple(template), *moved)


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
            self.workspace += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        return self.workspace_index, self.buffers[start] + address - start
