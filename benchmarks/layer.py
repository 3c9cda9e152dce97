"""Time the whole layer, forward, beside its peers: ms, fraction of the floors, ratio to the best.

    ./run bench --layer --quick                    # ten cells, about a minute
    ./run bench --layer --full --assert benchmarks/targets.toml     # what the targets are about
    ./run bench --layer [--shapes …] [--tokens …] [--routings uniform,zipf,one] [--options]

Each candidate is checked against fp64 first: the worst of eight rows within 6e-3 (peers: 2e-2).
Times are medians of CUDA-graph replays that rotate through several routings, so that few-token
weights do not come from the cache; peers that cannot be captured are launched plainly.
floor = max(FLOP / 790 TFLOP/s, bytes / 4.3 TB/s), bytes = weights of touched experts once +
activations once. staged = the same for each stage on its own, rows padded to tiles of 64, at the
rates that this run measured, + combine + 3 µs a launch; from 4096 tokens on also ("busy") at the
rate of large products in turn with the candidates. Kernels are compiled first, in processes.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import stored_rows
import targets
import torch
from layer_cases import (
    BUSY_TOKENS,
    ROUTINGS,
    TOKENS,
    cells_of,
    exact_rows,
    floor_ms,
    jobs_of,
    large_products,
    rates,
    sets_of,
    staged_ms,
    variants_of,
    weights_of,
    worst_error,
)
from layer_compile import compile_ahead, compile_share
from layer_peers import best_peer, peers_of, speed_of_this_machine
from timing import clocks

from samebits import env
from samebits.experts import experts
from samebits.routing import Routing
from samebits.testing.cases import MODELS

HERE = Path(__file__).parent
OURS = ("fused", "grouped")
# The whole layer is held to 5e-3; a single row spreads around it.
ALLOWED, PEER_ALLOWED = 6e-3, 2e-2
ROUNDS = 5
# A replay lasts about this long.
REPLAY_MS = 4.0
PICKED = 8
# What is run in turn with the candidates of a cell: the rate of its clocks.
PRODUCT = "8192³"


def kernel_hash():
    """Return a hash of every kernel: rows of other kernels cannot be mixed up."""
    files = sorted((HERE.parent / "src" / "samebits" / "ops").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def ours(problem, weights, backend):
    def layer(x, ids, probs):
        return experts(
            x, Routing(ids, probs, problem.experts), weights, problem.activation,
            placement=problem.placement, backend=backend,
        )  # fmt: skip

    return layer


def launched(function, sets, repeats):
    def run():
        for _ in range(repeats):
            for values in sets:
                function(*values)

    return run


def captured(function, sets, repeats):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched(function, sets, repeats)()
    return graph.replay


def timed(run):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def checked(problem, candidates, sets, weights):
    """Return the worst row's error of each candidate, which this also compiles for every set."""
    tokens = sets[0][0].shape[0]
    picked = sorted({round(i * (tokens - 1) / (PICKED - 1)) for i in range(PICKED)})
    exact = exact_rows(problem, sets[0], weights, picked)
    errors = {}
    for name, (function, _) in candidates.items():
        errors[name] = worst_error(function(*sets[0]), exact, picked)
        for values in sets[1:]:
            function(*values)
    return errors


def measure(cell, problem, weights, arguments, measured):
    """Return the row of one cell: (shape, T, routing, variant)."""
    shape, tokens, routing, variant = cell
    sets = sets_of(problem, tokens, routing)
    floor = floor_ms(problem, tokens, sets)
    candidates = {name: (ours(problem, weights, name), True) for name in arguments.backends}
    if variant == "plain":
        candidates |= peers_of(problem, tokens, weights, arguments.peers)
    errors = checked(problem, candidates, sets, weights)
    wrong = {n: e for n, e in errors.items() if not e <= (ALLOWED if n in OURS else PEER_ALLOWED)}
    repeats = max(1, min(25, int(REPLAY_MS / floor) // len(sets)))
    torch.cuda.synchronize()
    runs = {
        name: (captured if graph else launched)(function, sets, repeats)
        for name, (function, graph) in candidates.items()
        if name not in wrong
    }
    if tokens >= BUSY_TOKENS:
        product, flop = large_products(floor * repeats * len(sets))
        runs[PRODUCT] = captured(product, [()], 1)
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(timed(run) / (repeats * len(sets)))
    ms = {name: statistics.median(found) for name, found in times.items()}
    row = {
        "shape": shape, "T": tokens, "routing": routing, "variant": variant,
        "floor_ms": floor, "staged_ms": staged_ms(problem, tokens, sets, measured),
        "ms": ms, "error": errors, "wrong": sorted(wrong),
    }  # fmt: skip
    if PRODUCT in ms:
        rate = flop / (ms.pop(PRODUCT) * repeats * len(sets))
        busy = replace(measured, flop_per_ms=rate)
        row |= {"busy": rate, "staged_busy_ms": staged_ms(problem, tokens, sets, busy)}
    return row


def line(row, speed):
    label = f"{row['shape']:13} T={row['T']:<6}{row['routing']:8}{row['variant']:10}"
    mine = [row["ms"][name] for name in OURS if name in row["ms"]]
    if row["wrong"] or not mine:
        return label + " WRONG: " + ", ".join(f"{n} {row['error'][n]:.1e}" for n in row["wrong"])
    name, peer = best_peer(row, speed)
    times = "  ".join(f"{key} {value:.4f}" for key, value in row["ms"].items())
    best = min(mine)
    busy = f" (busy {row['staged_busy_ms'] / best:.2f})" if "staged_busy_ms" in row else ""
    return (
        f"{label}{best:9.4f} ms  floor {row['floor_ms'] / best:.2f}"
        f"  staged {row['staged_ms'] / best:.2f}{busy}  x{best / peer:.2f} of {name} | {times}"
    )


def summary(rows, speed):
    """Print what the targets ask for."""

    def mean(values):
        values = [v for v in values if not math.isnan(v)]
        return math.exp(statistics.mean(map(math.log, values))) if values else math.nan

    plain = [
        r for r in rows
        if r["routing"] == "uniform" and r["variant"] == "plain" and set(OURS) & set(r["ms"])
    ]  # fmt: skip
    best = {id(r): min(r["ms"][n] for n in OURS if n in r["ms"]) for r in plain}
    groups = {
        "all cells": plain,
        "T = 16 and 64": [r for r in plain if r["T"] in (16, 64)],
        "T >= 4096": [r for r in plain if r["T"] >= 4096],
    }
    print(f"\nthis machine over that of the recorded peers: {speed:.3f}")
    for name, group in groups.items():
        if group:
            floor = mean([r["floor_ms"] / best[id(r)] for r in group])
            staged = mean([r["staged_ms"] / best[id(r)] for r in group])
            peer = mean([best[id(r)] / best_peer(r, speed)[1] for r in group])
            print(
                f"{name:14} ({len(group):2}): fraction of floor {floor:.3f}, of staged "
                f"{staged:.3f}; over the best peer {peer:.3f}"
            )


def written(path, rows, measured, began):
    """Write what was measured so far; return it."""
    whole = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": env.version_of("triton"), "transformers": env.version_of("transformers"),
        "kernels": kernel_hash(), "rates": vars(measured), "speed": speed_of_this_machine(rows),
        "seconds": round(time.time() - began), "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(whole, indent=0) + "\n")
    return whole


def missed(arguments, whole):
    """Return a line for each result of ours that is wrong, and for each target that is missed."""
    found = [
        f"{row['shape']} T={row['T']} {row['routing']} {row['variant']}: wrong result"
        for row in whole["rows"]
        if set(row["wrong"]) & set(OURS)
    ]
    if arguments.targets:
        asked = [t for t in targets.read(arguments.targets) if t["op"] == "layer"]
        found += targets.misses(asked, stored_rows.cells(whole))
    return found


def parser():
    made = argparse.ArgumentParser(
        prog="./run bench --layer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--shapes", default=",".join(MODELS))
    made.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    made.add_argument("--routings", default="uniform", help=",".join(ROUTINGS))
    made.add_argument("--cells", type=cells_of, help="for example qwen3-30b:1,mixtral:1024")
    made.add_argument("--quick", action="store_true", help="ten cells, torch's product as peer")
    made.add_argument("--full", action="store_true", help="every cell, options, other routings")
    made.add_argument("--options", action="store_true", help="also the models' own options")
    made.add_argument("--backends", default="fused,grouped")
    made.add_argument("--peers", default=None, help="torch,transformers,liger,sonic; none")
    made.add_argument("--out", type=Path, default=HERE / "results" / "layer.json")
    made.add_argument("--assert", dest="targets", type=Path, help="a TOML file of targets")
    made.add_argument("--seconds", type=float, default=math.inf, help="skip cells after so long")
    made.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    made.add_argument("--compile-options", action="store_true", help=argparse.SUPPRESS)
    return made


def main(argv=None):
    """Return 0, or 1 where a result of ours is wrong or a target is missed."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv)
    backends = arguments.backends.split(",")
    short = arguments.quick or arguments.full
    arguments.peers = (arguments.peers or ("torch" if short else "torch,transformers")).split(",")
    arguments.backends = backends
    jobs = jobs_of(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; this benchmark has nothing to time")
    if arguments.compile_share:
        compile_share(jobs, backends, arguments.compile_options, *arguments.compile_share)
        return 0
    began = time.time()
    rest = compile_ahead(argv, any(variant != "plain" for _, variant, _ in jobs))
    measured = rates()
    print(
        f"{torch.cuda.get_device_name()}  cuBLAS {measured.flop_per_ms / 1e9:.0f} TFLOP/s  "
        f"copy {measured.byte_per_ms / 1e9:.2f} TB/s  clocks {clocks()}  kernels {kernel_hash()}  "
        f"compiled in {time.time() - began:.0f} s", flush=True,
    )  # fmt: skip
    whole = {"rows": (rows := [])}
    with torch.no_grad():
        for shape, variant, cells in jobs:
            if time.time() - began > arguments.seconds:
                print(f"out of time before {shape} {variant} {cells}")
                continue
            if variant != "plain":
                rest()
            problem = variants_of(shape)[variant]
            weights = weights_of(problem)
            for routing, tokens in cells:
                cell = (shape, tokens, routing, variant)
                if time.time() - began > arguments.seconds:
                    print(f"out of time before {cell}")
                    continue
                rows.append(measure(cell, problem, weights, arguments, measured))
                print(line(rows[-1], speed_of_this_machine(rows)), flush=True)
                # At once: a run that is ended keeps what it has.
                whole = written(arguments.out, rows, measured, began)
            del weights
            torch.cuda.empty_cache()
    summary(rows, speed_of_this_machine(rows))
    print(f"{round(time.time() - began)} s; rows in {arguments.out}")
    failures = missed(arguments, whole)
    for failure in failures:
        print(f"MISS {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
