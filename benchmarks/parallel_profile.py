"""Where the time of one layer over ranks goes: its phases on host and device, and what it launches.

``in a row``: calls without a pause, as in training; ``alone``: the device is idle before each. Host
times are without events, which take a few µs each; device times are of the stream that computes.
"""

import statistics
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel_cells import Cell, clock, find_route, sync

from samebits.parallel import departure, exchanged, held, layer, route

# (label, owner, attribute): indented ones run within the one above.
PHASES = (
    ("checks", layer, "checked"),
    ("depart", exchanged, "depart"),
    ("  sort", departure, "sort"),
    ("  gather of counts", departure, "_gather"),
    ("permute", exchanged, "permute"),
    ("wait and counts", departure.Departure, "route"),
    ("out", route.Route, "go"),
    ("gathered out", route.Route, "go_from"),
    ("arrived", exchanged.Exchanged, "_arrived"),
    ("experts", held.HeldExperts, "forward"),
    ("back", route.Route, "back"),
    ("combine", exchanged, "combine"),
    ("take", exchanged, "take"),
    ("experts, backward", held.HeldExperts, "backward"),
)
CALLS = 12
# The first calls of a run are seen and recorded; the device catches up.
SKIPPED = 4
WAITS = ("Synchronize", "cudaStreamWaitEvent", "cudaEventQuery")


class Timeline:
    """When each phase of each call began and ended, in µs after the call."""

    def __init__(self, device, events):
        self.device, self.events = device, events
        self.calls = []

    def now(self):
        if not self.events:
            return time.perf_counter() * 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wrapped(self, label, function):
        def run(*arguments, **options):
            start = self.now()
            result = function(*arguments, **options)
            self.calls[-1].append((label, start, self.now()))
            return result

        return run

    @contextmanager
    def watching(self):
        with ExitStack() as stack:
            for label, owner, name in PHASES:
                function = self.wrapped(label, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, function))
            yield

    def call(self, function):
        self.calls.append([])
        start = self.now()
        function()
        self.calls[-1].append(("call", start, self.now()))

    def since(self, first, then):
        return first.elapsed_time(then) * 1e3 if self.events else then - first

    def table(self):
        """Return label -> [µs after the call's start, µs long], medians; sums where it recurs."""
        found = {}
        for phases in self.calls[SKIPPED:]:
            _, origin, _ = phases[-1]
            spent = {}
            for label, start, stop in phases:
                begun = spent.setdefault(label, [self.since(origin, start), 0.0])
                begun[1] += self.since(start, stop)
            for label, times in spent.items():
                found.setdefault(label, []).append(times)
        return {
            label: [round(statistics.median(column), 1) for column in zip(*times, strict=True)]
            for label, times in found.items()
        }


def timeline(function, device, *, events, alone):
    line = Timeline(device, events)
    with line.watching():
        dist.barrier()
        sync(device)
        for _ in range(CALLS):
            if alone:
                dist.barrier()
                sync(device)
            line.call(function)
        sync(device)
    return line.table()


def counted(function, device):
    """Return how often one call does what, and what its kernels take in µs."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        function()
        sync(device)
    counts, kernels, operators = Counter(), Counter(), Counter()
    for event in profile.events():
        on_device = str(event.device_type) == "DeviceType.CUDA"
        if on_device:
            # Without the ranges that NCCL's operators draw around their kernels.
            if not event.name.startswith("nccl:"):
                kernels[event.name] += event.time_range.elapsed_us()
        elif event.name.startswith(("aten::", "c10d::", "samebits::")):
            counts[event.name.split("::")[0]] += 1
            operators[event.name] += 1
        elif "Launch" in event.name and event.name.startswith("cu"):
            counts["launches"] += 1
        elif event.name.startswith("cudaMemcpy"):
            counts["copies"] += 1
        elif event.name.startswith("cu") and any(wait in event.name for wait in WAITS):
            counts[event.name] += 1
    busiest = {name[:70]: round(spent, 1) for name, spent in kernels.most_common(24)}
    return {
        "counts": dict(counts),
        "operators": dict(operators.most_common()),
        "kernel_us": busiest,
        "busy_us": round(sum(kernels.values())),
    }


def sequence(function, device, calls=6):
    """Return [µs after its first kernel, µs long, kernel] of a call in the middle of some."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(calls):
            function()
        sync(device)
    kernels = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in profile.events()
        if str(event.device_type) == "DeviceType.CUDA" and not event.name.startswith("nccl:")
    )
    # Each call sorts its slots first, and its arrivals later.
    starts = [place for place, kernel in enumerate(kernels) if "_histogram" in kernel[2]]
    half = calls // 2
    middle = kernels[starts[2 * half] : starts[2 * half + 2]] if len(starts) == 2 * calls else []
    return [[round(at - middle[0][0], 1), round(us, 1), name[:40]] for at, us, name in middle]


def host_of(function, device, calls=20):
    """Return the host's µs of a call whose work it does not wait for."""
    times = []
    for _ in range(calls):
        dist.barrier()
        sync(device)
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    sync(device)
    return round(statistics.median(times), 1)


def with_own_rows_copied(cell, rows):
    """Send as ``Route.go`` does, but copy what stays here instead of sending it to itself."""
    here, own = cell.ranks.rank, cell.route
    sent, received = list(own.sent), list(own.received)
    start, arrived = sum(sent[:here]), sum(received[:here])
    out = rows.new_empty(sum(received), rows.shape[1])
    mine = rows[start : start + sent[here]]
    # The others' parts are neighbours of each other only on the first and last of two ranks.
    rest = rows[sent[0] : sum(sent)] if here == 0 else rows[:start]
    there = out[received[0] :] if here == 0 else out[:arrived]
    sent[here] = received[here] = 0
    work = dist.all_to_all_single(there, rest, received, sent, async_op=True)
    out[arrived : arrived + mine.shape[0]].copy_(mine)
    work.wait()
    return out


def go_elsewhere(cell, rows):
    """Send as ``Route.go`` does, but on the stream of the transport."""
    own = cell.route
    out = rows.new_empty(sum(own.received), rows.shape[1])
    rows = rows[: sum(own.sent)]
    dist.all_to_all_single(out, rows, own.received, own.sent, async_op=True).wait()
    return out


def singly(cell):
    """Return ms of each thing alone, and µs that the host takes to ask for it."""
    route_, device = cell.route, cell.device
    rows = cell.dout.new_zeros(route_.inverse.shape[0], cell.dout.shape[1])
    mine = torch.zeros(cell.ranks.num_experts + 3, dtype=torch.int32, device=device)
    told = mine.new_empty(cell.size * mine.shape[0])

    def gather():
        departure._gather(told, mine, group=cell.ranks.group)

    def gather_and_wait():
        gather()
        told.tolist()

    parts = {
        "fill of one number": lambda: mine[:1].fill_(0),
        "gather of counts": gather,
        "gather of counts, waited for": gather_and_wait,
        "route": lambda: find_route(cell.ranks, cell.ids),
        "go": lambda: route_.go(rows, keep=False),
        "go, on a stream of NCCL's": lambda: go_elsewhere(cell, rows),
        "layer": cell.layer,
        "compute": cell.compute,
    }
    if cell.size == 2:
        parts["go, own rows copied"] = lambda: with_own_rows_copied(cell, rows)
    return {
        name: {"ms": clock(part, device), "host_us": host_of(part, device)}
        for name, part in parts.items()
    }


def profile_cell(shape, tokens, device, group, transport):
    """Return everything about one cell; collective."""
    cell = Cell(shape, tokens, device, group, transport)
    with torch.no_grad():
        found = {"forward": profile_pass(cell.layer, device), "singly": singly(cell)}
    cell.grad(True)

    def step():
        cell.grad(True)
        cell.layer().backward(cell.dout)

    found["step"] = profile_pass(step, device)
    about = {"shape": shape, "tokens": tokens, "transport": transport, "rank": cell.ranks.rank}
    return about | found


def profile_pass(function, device):
    kinds = [False, True] if device.type == "cuda" else [False]
    found = {
        f"{'device' if events else 'host'}, {'alone' if alone else 'in a row'}": timeline(
            function, device, events=events, alone=alone
        )
        for alone in (False, True)
        for events in kinds
    }
    if device.type == "cuda":
        found["sequence"] = sequence(function, device)
    return found | {"launched": counted(function, device)}


def lines_of(row):
    """Return the tables of a profile as text."""
    about = f"{row['shape']} T={row['tokens']} {row['transport']}, rank {row['rank']}"
    lines = [f"{about}, µs: start + length"]
    for name in ("forward", "step"):
        others = ("launched", "sequence")
        tables = {key: table for key, table in row[name].items() if key not in others}
        lines.append(f"  {name:22}" + "".join(f"{key:>22}" for key in tables))
        order = sorted(
            {label for table in tables.values() for label in table},
            key=lambda label: next(t[label][0] for t in tables.values() if label in t),
        )
        for label in order:
            cells = [tables[key].get(label, ["", ""]) for key in tables]
            lines.append(f"  {label:22}" + "".join(f"{a!s:>12} +{b!s:>8}" for a, b in cells))
        for start, long, kernel in row[name].get("sequence", []):
            lines.append(f"    {start:9} +{long:8} {kernel}")
        launched = row[name]["launched"]
        lines.append(f"  {launched['counts']}, device busy {launched['busy_us']} µs")
        lines += [f"    {spent:9} {kernel}" for kernel, spent in launched["kernel_us"].items()]
        lines.append("    " + ", ".join(f"{n} {name}" for name, n in launched["operators"].items()))
    for name, part in row["singly"].items():
        lines.append(f"  {name:30} {part['ms']:8.3f} ms, host {part['host_us']:8.1f} µs")
    return "\n".join(lines)
