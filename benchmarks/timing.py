"""Interleaved timing of candidates; the copy ceiling of the device; its clocks."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from case import Candidate, Inputs

# Sets of buffers are rotated until they are several times what a cache holds.
_ROTATED_BYTES = 256 << 20
_MOST_SETS = 8
# A graph replay should last this long, at this speed.
_REPLAY_MS = 1.5
_BYTES_PER_MS = 4e9
_LEAST_CALL_MS = 0.004
_MOST_CALLS = 200


def sets_for(moved: int) -> int:
    """Return how many sets of buffers keep inputs out of the cache."""
    return max(1, min(_MOST_SETS, _ROTATED_BYTES // max(moved, 1)))


def _calls(moved: int, sets: int) -> int:
    """Return how often a replay goes through all sets."""
    ms = max(moved / _BYTES_PER_MS, _LEAST_CALL_MS) * sets
    return max(1, min(_MOST_CALLS // sets, round(_REPLAY_MS / ms)))


def _graph(
    function: Candidate, sets: Sequence[Inputs], repeats: int, pool: Any
) -> torch.cuda.CUDAGraph:
    for inputs in sets:
        function(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(repeats):
            for inputs in sets:
                function(inputs)
    graph.replay()
    return graph


def _replay_ms(replay: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def _host_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def time_candidates(
    candidates: dict[str, Candidate], sets: Sequence[Inputs], moved: int, device: str, rounds: int
) -> dict[str, list[float]]:
    """Return the ms of one call of each candidate, one value per round.

    Each round times every candidate once, so that clocks and neighbours hit all of them alike. On a
    GPU a candidate is a CUDA graph of many calls; on a CPU it is called once per set.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    if device == "cuda":
        repeats = _calls(moved, len(sets))
        # Nothing reads a result, so that all graphs can write to the same memory.
        pool = torch.cuda.graph_pool_handle()
        graphs = {name: _graph(call, sets, repeats, pool) for name, call in candidates.items()}
        for _ in range(rounds):
            for name, graph in graphs.items():
                times[name].append(_replay_ms(graph.replay) / (repeats * len(sets)))
        return times
    for _ in range(rounds):
        for name, call in candidates.items():
            # A loop, not a comprehension: nothing may be kept of a call.
            times[name].append(_host_ms(lambda c=call: [c(s) and None for s in sets]) / len(sets))
    return times


def copy_ceiling(device: str, size: int) -> float:
    """Return the bytes per ms, read and written, of a large device copy: the ceiling of the run."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    copy()
    measure = _replay_ms if device == "cuda" else _host_ms
    return 2 * size / statistics.median(measure(copy) for _ in range(15))


def clocks() -> str | None:
    """Return SM clock, memory clock, power and temperature of the GPUs, or None where unknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def compile_in_processes(*command: str) -> list[int]:
    """Run a script that compiles share ``i`` of ``n`` for ``--compile-share i n``; all shares.

    Returns their exit statuses.
    """
    processes = min(12, os.cpu_count() or 1)
    share = [sys.executable, *command, "--compile-share"]
    workers = [subprocess.Popen([*share, str(i), str(processes)]) for i in range(processes)]
    return [worker.wait() for worker in workers]


def captured(
    function: Callable[[int], Any], sets: int, repeats: int, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Return a graph of ``repeats`` calls with the number of each set of inputs.

    Graphs of one ``pool`` write to the same memory: for results that nothing reads.
    """
    for which in range(sets):
        function(which)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(repeats):
            for which in range(sets):
                function(which)
    graph.replay()
    return graph


def replayed(graphs: Sequence[torch.cuda.CUDAGraph], calls: int, rounds: int = 5) -> list[float]:
    """Return the median ms of a call of each graph; each round replays every graph once."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for found, graph in zip(times, graphs, strict=True):
            found.append(_replay_ms(graph.replay) / calls)
    return [statistics.median(found) for found in times]
