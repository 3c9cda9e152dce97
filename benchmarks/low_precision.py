"""Time the layer over quantised weights beside the same layer over dense bf16 ones.

    python benchmarks/low_precision.py --out FILE [--cells mixtral:mxfp4:16,…] [--assert TARGETS]

Both are captured in CUDA graphs that rotate through several routings; the bits are compared first.
floor = max(FLOP / 790 TFLOP/s, bytes / 4.3 TB/s), bytes = quantised weights of touched experts once
+ activations once. Rows are JSON lines: ours, and ``dense``.

Formats fp8-rows and mxfp8-rows quantise activations too (W8A8). Their numbers are others than the
dense layer's, so that the distance is printed, and bits are compared from call to call. FP8 numbers
are multiplied as they are, at twice the FLOP/s.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import targets
import torch
import triton
from case import OURS
from layer_cases import BYTES, FLOPS, sets_of
from quantized_inputs import dense, random_weights
from timing import compile_in_processes

from samebits import warmup
from samebits.experts import experts
from samebits.formats import FP8, MXFP4, MXFP4_SHUFFLED, MXFP8, NVFP4, ROWS_FP8
from samebits.formats.descriptor import FormatPair
from samebits.routing import Routing
from samebits.testing.cases import MODELS

FORMATS = {f.name: f for f in (FP8, MXFP8, MXFP4, MXFP4_SHUFFLED, NVFP4)}
# Of the activations, by what a cell calls its format; weights are in the format of the first word.
ROW_FORMATS = {"fp8-rows": ROWS_FP8, "mxfp8-rows": MXFP8}
# What quantised activations may change, as a share of the output.
FARTHEST = 0.125
DECODE = [
    (shape, key, tokens)
    for key in ("fp8", "mxfp4", "mxfp4_shuffled", "mxfp8")
    for shape in ("mixtral", "gpt-oss-120b", "deepseek-v3")
    for tokens in (1, 4, 16)
]
PREFILL = [
    (shape, key, 4096)
    for key in ("fp8", "mxfp4", "mxfp4_shuffled")
    for shape in ("mixtral", "gpt-oss-120b", "deepseek-v3")
]
# A replay lasts about this long.
REPLAY_MS = 6.0


ROWS = [
    (shape, key, tokens)
    for key in ROW_FORMATS
    for shape in ("mixtral", "deepseek-v3")
    for tokens in (16, 4096)
]


def format_of(key):
    """Return the format of the weights."""
    return FORMATS[key.removesuffix("-rows")]


def problem_of(shape, key):
    held, rows = format_of(key), ROW_FORMATS.get(key)
    pair = FormatPair(gate_up=held, down=held)
    return replace(MODELS[shape], format=pair, row_format=rows)


def backend_of(problem):
    """Return the backend that is timed."""
    return "fused" if problem.row_format is None else "grouped"


def floor_ms(problem, sets):
    """Return the bound that no layer passes: arithmetic, or touched quantised weights once."""
    touched = statistics.mean(int(ids.unique().numel()) for _, ids, _ in sets)
    tokens, hidden, columns = sets[0][0].shape[0], problem.H, problem.F
    held = problem.format.gate_up
    byte = 3 * touched * hidden * columns * held.bits / 8 + 4 * tokens * hidden
    flops = 2 * FLOPS if problem.row_format == ROWS_FP8 else FLOPS
    return max(6 * tokens * problem.K * hidden * columns / flops, byte / BYTES) * 1e3


def captured(problem, weights, sets):
    """Return a graph of one call for each set, and the output of the first."""

    def layer(x, ids, probs):
        return experts(
            x, Routing(ids, probs), weights, problem.activation,
            backend=backend_of(problem), row_format=problem.row_format,
        )  # fmt: skip

    out = layer(*sets[0])
    again = layer(*sets[0])
    assert torch.equal(out, again), "two calls gave different bits"
    for values in sets[1:]:
        layer(*values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for values in sets:
            layer(*values)
    return graph, out


def interleaved(graphs, calls):
    """Return the median ms of one call of each graph, measured in turn."""
    times = [[] for _ in graphs]
    counts = []
    for graph in graphs:
        graph.replay()
        counts.append(max(1, int(REPLAY_MS / _elapsed(graph, 1))))
    for _ in range(7):
        for found, graph, count in zip(times, graphs, counts, strict=True):
            found.append(_elapsed(graph, count) / (count * calls))
    return [statistics.median(found) for found in times]


def _elapsed(graph, count):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def measure(shape, key, tokens, stored, plain):
    """Return the rows of one cell: ours, and the dense layer's."""
    problem = problem_of(shape, key)
    sets = sets_of(problem, tokens, "uniform")
    without = replace(problem, format=None, row_format=None)
    (graph, out), (other, expected) = (
        captured(problem, stored, sets),
        captured(without, plain, sets),
    )
    same = bool(torch.equal(out, expected))
    distance = float((out.float() - expected.float()).norm() / expected.float().norm())
    if problem.row_format is not None:
        same = distance < FARTHEST
    ms, dense_ms = interleaved((graph, other), len(sets))
    floor = floor_ms(problem, sets)
    about = {"op": "low_precision", "shape": shape, "format": key, "T": tokens}
    ours = about | {"candidate": OURS, "fraction": floor / ms, "floor_ms": floor}
    if same:
        ours["ms"] = ms
    print(
        f"{shape:13} {key:14} T={tokens:<5} {ms:8.4f} ms  dense {dense_ms:8.4f} ms  "
        f"{dense_ms / ms:5.2f}x  {floor / ms:.2f} of the floor"
        + ("" if problem.row_format is None else f"  distance {distance:.1e}")
        + ("" if same else "  OTHER BITS"),
        flush=True,
    )
    return [ours, about | {"candidate": "dense", "ms": dense_ms}]


def cells_of(text):
    """Return (shape, format, T) of ``mixtral:mxfp4:16,gpt-oss-120b:fp8:1``."""
    found = [part.split(":") for part in text.split(",")]
    return [(shape, key, int(tokens)) for shape, key, tokens in found]


def compile_share(cells, index, count):
    jobs = [(problem_of(shape, key), tokens) for shape, key, tokens in cells]
    plain = {"format": None, "row_format": None}
    jobs += dict.fromkeys((replace(problem, **plain), tokens) for problem, tokens in jobs)
    for problem, tokens in jobs[index::count]:
        warmup(problem, [tokens], backend=backend_of(problem))


def main(argv=None):
    """Return 0, or 1 where bits differ or a target is missed."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=cells_of, default=DECODE + PREFILL + ROWS)
    parser.add_argument("--assert", dest="targets", type=Path, help="a TOML file of targets")
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.compile_share:
        compile_share(arguments.cells, *arguments.compile_share)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; this benchmark has nothing to time")
    began = time.time()
    compile_in_processes(__file__, *argv)
    print(torch.cuda.get_device_name(), f"compiled in {time.time() - began:.0f} s", flush=True)
    rows = []
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    versions["triton"] = triton.__version__
    with torch.no_grad():
        for shape, key in dict.fromkeys(cell[:2] for cell in arguments.cells):
            stored = random_weights(format_of(key), MODELS[shape])
            plain = dense(stored)
            for cell in arguments.cells:
                if cell[:2] == (shape, key):
                    rows += [r | versions for r in measure(*cell, stored, plain)]
            del stored, plain
            torch.cuda.empty_cache()
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"total {time.time() - began:.0f} s")
    found = [f"{r['shape']} {r['format']} T={r['T']}: other bits" for r in rows if "ms" not in r]
    if arguments.targets:
        asked = [t for t in targets.read(arguments.targets) if t["op"] == "low_precision"]
        found += targets.misses(asked, rows)
    for text in found:
        print("MISSED", text)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
