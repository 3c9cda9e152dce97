"""Time the whole layer with other tiles of both projections in place of those of the table.

    python benchmarks/layer_candidates.py --out FILE [--cells mixtral:1024,qwen3-30b:4096]
        [--candidates "grid,group 32"] [--seconds 60]

A candidate is timed only where its output has the bits of the table's. All of a cell are replayed
in turn, so that clocks hit them alike. Kernels are compiled first, in processes.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import triton
from layer_cases import cells_of, sets_of, weights_of
from timing import captured, clocks, compile_in_processes, replayed

from samebits.backends import fused, matrices, passes, repetition
from samebits.experts import experts
from samebits.routing import Routing
from samebits.testing.cases import MODELS
from samebits.warmup import warmup

Change = dict[str, int]
# One program for each tile, in the order of the hardware.
_GRID = {"num_stages": 4, "programs": 1 << 20}
# Changes of the table's tiles, of the first projection and of the second.
CANDIDATES: dict[str, tuple[Change, Change]] = {
    "table": ({}, {}),
    "grid": (_GRID | {"short": 64}, _GRID | {"short": 64}),
    "grid, first": (_GRID | {"short": 64}, {}),
    "grid, second": ({}, _GRID | {"short": 64}),
    "grid, second whole": (_GRID | {"short": 64}, _GRID | {"short": 0}),
    "grid, short 32": (_GRID | {"short": 32}, _GRID | {"short": 32}),
    "second short 64": ({}, {"short": 64}),
    "first whole": ({"short": 0, "num_stages": 3}, {}),
    "group 32": ({"short": 0, "num_stages": 3, "group": 32}, {"num_stages": 3, "group": 32}),
}
CELLS = "mixtral:1024,qwen3-30b:4096,llama4-scout:4096,llama4-scout:1024,qwen3-30b:1024,mixtral:256"


@contextmanager
def using(first: Change, second: Change) -> Iterator[None]:
    """Let every forward use tiles with these changes."""

    def tiles_of(problem, call):
        one, other, upcast = matrices.tiles_of(problem, call)
        return replace(one, **first), replace(other, **second), upcast

    # Recorded launches are those of other tiles.
    for recorded in (repetition, passes):
        recorded.forget()
    with mock.patch.object(fused, "tiles_of", tiles_of):
        yield
    for recorded in (repetition, passes):
        recorded.forget()


def measure(name, tokens, weights, chosen):
    problem = MODELS[name]
    sets = sets_of(problem, tokens, "uniform")

    def layer(which):
        x, ids, probs = sets[which]
        routing = Routing(ids, probs, problem.experts)
        return experts(x, routing, weights, problem.activation, backend="fused")

    rows, graphs = [], []
    expected = [layer(which).clone() for which in range(len(sets))]
    for label in chosen:
        row = {"shape": name, "T": tokens, "candidate": label}
        rows.append(row)
        with using(*CANDIDATES[label]):
            try:
                # A race shows now and then.
                row["same_bits"] = all(
                    torch.equal(layer(which), expected[which])
                    for which in range(len(sets))
                    for _ in range(5)
                )
            except triton.runtime.errors.OutOfResources as error:
                row["error"] = str(error)[:120]
                continue
            if row["same_bits"]:
                graphs.append((row, captured(layer, len(sets), 2)))
    times = replayed([graph for _, graph in graphs], 2 * len(sets), rounds=9)
    for (row, _), ms in zip(graphs, times, strict=True):
        row["ms"] = ms
    return rows


def compile_share(cells, chosen, index, count):
    work = [(label, cell) for cell in cells for label in chosen]
    for label, (name, tokens) in work[index::count]:
        with using(*CANDIDATES[label]):
            try:
                warmup(MODELS[name], [tokens], backend="fused")
            except triton.runtime.errors.OutOfResources:
                continue


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("layer-candidates.json"))
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--candidates", default=",".join(CANDIDATES))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cells, chosen = cells_of(arguments.cells), arguments.candidates.split(",")
    if arguments.compile_share:
        compile_share(cells, chosen, *arguments.compile_share)
        return
    start = time.time()
    how = ["--cells", arguments.cells, "--candidates", arguments.candidates]
    print("compiled", compile_in_processes(__file__, *how), round(time.time() - start), "s")
    rows, held = [], (None, None)
    with torch.no_grad():
        for name, tokens in cells:
            if time.time() - start > arguments.seconds:
                print("out of time before", name, tokens)
                break
            if held[0] != name:
                held = None, None
                torch.cuda.empty_cache()
                held = name, weights_of(MODELS[name])
            found = measure(name, tokens, held[1], chosen)
            rows += found
            base = next((row["ms"] for row in found if row["candidate"] == "table"), None)
            for row in sorted(found, key=lambda row: row.get("ms", 1e9)):
                said = row.get("error") or ("" if row["same_bits"] else "OTHER BITS")
                if "ms" in row:
                    said = f"{row['ms']:9.4f} ms" + (f" {row['ms'] / base:6.3f}" if base else "")
                print(f"{name:13} T={tokens:<6} {row['candidate']:30} {said}", flush=True)
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            about |= {"triton": triton.__version__, "clocks": clocks(), "rows": rows}
            arguments.out.write_text(json.dumps(about, indent=0) + "\n")
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
