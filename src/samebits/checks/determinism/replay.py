"""Repeat one call in every way that may change its bits, and compare bytes.

    load     beside products, copies and small kernels of other streams, at times beside itself
    memory   with other old contents of the memory that it takes
    graph    captured in a CUDA graph, replayed under load
    repeat   alone: the only kind, with memory, where there is no CUDA device

``load`` and ``graph`` compare results and all memory that the call took; ``memory`` results alone.
"""

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.checks.compile.compare import named_tensors
from samebits.checks.determinism.evidence import Record
from samebits.checks.determinism.launches import mismatch, observed
from samebits.checks.determinism.memory import digest, filled, first_difference, same
from samebits.checks.determinism.variant import Variant
from samebits.checks.result import FOREIGN_ERRORS

# All bytes 0xFF: NaN in every float, -1 in every integer.
_FILL = 0xFF
# Zeros, large numbers, small negative ones, ordinary ones.
_OTHER_FILLS = (0x00, 0x7F, 0xA5, 0x3C)
_MEMORY_ROUNDS = 2
# Set before inputs are made, so that every process makes the same.
SEED = 1234
_GRAPH_SHARE = 4

Call = Callable[[], Any]


class Outcome(NamedTuple):
    """What a call returned, and all memory that it took unwritten and did not give back."""

    results: list[Tensor]
    memory: list[Tensor]

    def same(self, other: "Outcome", *, results_only: bool = False) -> bool:
        """Return whether the bytes are the other's."""
        if not same(self.results, other.results):
            return False
        return results_only or same(self.memory, other.memory)

    def kept(self) -> "Outcome":
        """Return a copy that no later call can write to."""
        return Outcome([t.clone() for t in self.results], [t.clone() for t in self.memory])

    def first_difference(self, other: "Outcome") -> str:
        """Return where the bytes differ from the other's."""
        if not same(self.results, other.results):
            return first_difference(self.results, other.results, "result")
        return first_difference(self.memory, other.memory, "memory")


class Tally:
    """Replays by kind, how many differed from the first call, and where the first of them did."""

    def __init__(self, first: Outcome) -> None:
        self.first = first
        self.replays: dict[str, int] = {}
        self.different: dict[str, int] = {}
        self.note = ""
        # What is being done now.
        self.kind = ""

    def add(self, kind: str, *outcomes: Outcome, results_only: bool = False) -> None:
        """Count one replay, of one call or of several beside each other."""
        wrong = [o for o in outcomes if not o.same(self.first, results_only=results_only)]
        self.replays[kind] = self.replays.get(kind, 0) + 1
        self.different[kind] = self.different.get(kind, 0) + bool(wrong)
        if wrong and not self.note:
            where = wrong[0].first_difference(self.first)
            self.note = f"{kind} {self.replays[kind]}: {where}"


def run(call: Call, byte: int = _FILL) -> Outcome:
    """Make the call once, on the current stream, its memory filled with one byte."""
    with filled(byte) as memory:
        results = [t.detach() for t in named_tensors(call()).values()]
    # Detached: a tensor with a graph keeps the nodes that add gradients, and with them the stream
    # of this call for every later one. And a backward gives the memory of what it has read back,
    # whoever holds the tensor.
    return Outcome(results, [t.detach() for t in memory if t.untyped_storage().nbytes()])


class Replayed(NamedTuple):
    """The record of one variant, and whether an error ended its replays."""

    record: Record
    # The process may be the worse for it: a broken capture, a lost device.
    broken: bool


def replay(variant: Variant, device: torch.device, root: Path, *, replays: int) -> Replayed:
    """Return the record of one variant, without its hash; what stopped its replays is its note.

    Args:
        variant: What is replayed.
        device: Where.
        root: Folder of the registry's kernels.
        replays: How often under load; a quarter of that as a graph.

    Determinism: that is what it measures.
    """
    launched: dict[str, Any] = {}
    made = note = ""
    tally = None
    broken = False
    try:
        torch.manual_seed(SEED)
        call = variant.prepare(device)
        # As a user calls it: some code keeps what it found out in a first call, or in a second.
        with observed(root) as seen:
            call()
        call()
        first = run(call)
        launched = {kernel.rpartition(":")[2]: each[0] for kernel, each in seen.items()}
        made = digest(first.results)
        note = mismatch(variant, seen) if variant.expected == "same" else ""
        if not first.results:
            note = "it returns no tensors"
        if not note:
            tally = Tally(first.kept())
            _replays(variant, call, device, replays, tally)
    except FOREIGN_ERRORS as error:
        broken = True
        note = told(error)
        if tally:
            note = f"{tally.kind}: {note}"
    return Replayed(
        Record(
            hash="",
            digest=made,
            replays=tally.replays if tally else {},
            different=tally.different if tally else {},
            note=(tally.note if tally else "") or note,
            launched=launched,
        ),
        broken,
    )


def told(error: BaseException) -> str:
    """Return an error in a line: its kind, its first line, where it was raised."""
    text = str(error).partition("\n")[0][:200]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def _replays(
    variant: Variant, call: Call, device: torch.device, replays: int, tally: Tally
) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        load = Load(device)
        tally.kind = "load"
        _under_load(call, load, replays, tally)
        if variant.graph:
            tally.kind = "graph"
            _as_graph(call, load, max(1, replays // _GRAPH_SHARE), tally)
        load.wait()
    else:
        tally.kind = "repeat"
        for _ in range(replays):
            tally.add("repeat", run(call))
    tally.kind = "memory"
    for byte in _OTHER_FILLS * _MEMORY_ROUNDS:
        tally.add("memory", run(call, byte), results_only=True)


class Load:
    """Work on other streams: products, copies, many small kernels, in changing amounts."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(3)]
        self._matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
        self._product = torch.empty_like(self._matrix)
        self._source = torch.ones(1 << 25, device=device)
        self._copy = torch.empty_like(self._source)
        self._small = torch.ones(1 << 12, device=device)
        torch.cuda.synchronize(device)

    def start(self, index: int) -> None:
        """Queue some work; how much follows from ``index``."""
        if index % 8 == 0:
            self.wait()
        products, copies, small = self._streams
        with torch.cuda.stream(products):
            for _ in range(1 + index % 3):
                torch.mm(self._matrix, self._matrix, out=self._product)
        with torch.cuda.stream(copies):
            for _ in range(1 + index // 3 % 4):
                self._copy.copy_(self._source)
        with torch.cuda.stream(small):
            for _ in range(4 * (index % 5)):
                self._small.mul_(1.0)

    def wait(self) -> None:
        """Wait until the work is done."""
        for stream in self._streams:
            stream.synchronize()


def _under_load(call: Call, load: Load, replays: int, tally: Tally) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for index in range(replays):
        load.start(index)
        outcomes = []
        beside_itself = 1 + index % 2
        for stream in streams[:beside_itself]:
            with torch.cuda.stream(stream):
                outcomes.append(run(call))
        for stream in streams[:beside_itself]:
            stream.synchronize()
        tally.add("load", *outcomes)


def _as_graph(call: Call, load: Load, replays: int, tally: Tally) -> None:
    load.wait()
    torch.cuda.synchronize()
    # ``torch.cuda.graph`` would collect garbage and empty the allocator each time.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            captured = run(call)
        except BaseException:
            # The capture is broken: that it cannot be ended would hide why.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    for index in range(replays):
        load.start(index)
        graph.replay()
        tally.add("graph", captured)
