"""Time candidate tiles of FP8 × FP8 products and of what quantises rows, bits first; write JSON.

    python benchmarks/tune_scaled_gemm.py --out FILE [--cells mixtral:16,…] [--seconds 45]

Every candidate's values are compared with those of the tile in use, and with its own in twenty more
launches, before it is timed. A candidate enters the table only from here.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton
from quantized_inputs import random_matrix
from timing import captured, compile_in_processes, replayed

from samebits.activation import Activation
from samebits.formats import FP8, MXFP8, ROWS_FP8
from samebits.ops.permute.reference import tiles
from samebits.ops.quantize import tuning as quantize_tuning
from samebits.ops.quantize.kernel import (
    launch_activation_and_quantize,
    launch_permute_and_quantize,
)
from samebits.ops.scaled_gemm.kernel import launch_scaled_gemm
from samebits.ops.scaled_gemm.tuning import CANDIDATES, TABLE, Config
from samebits.routing import Permutation
from samebits.testing.cases import MODELS
from samebits.weights import Layout

ACTIVATION = Activation()
# What every tile is compared with: the first one that a GPU has run.
PLAIN = Config(block_r=64, block_n=128, num_warps=8, num_stages=3)
TILES = (PLAIN, *(config for _, config in TABLE), *CANDIDATES)
CELLS = (
    "mixtral:4096,mixtral:16,mixtral:256,mixtral:64,mixtral:512,deepseek-v3:4096,deepseek-v3:16,"
    "deepseek-v3:256,deepseek-v3:1024,qwen3-30b:4096,qwen3-30b:16,qwen3-30b:256,qwen3-30b:1024"
)
# Rows and columns of a tile of the activation, warps; columns and warps of the permutation.
ACTIVATIONS = [(1, 1024, 4), (2, 512, 4), (4, 256, 4), (8, 128, 4), (4, 256, 2), (8, 256, 8)]
PERMUTATIONS = [(1024, 4), (2048, 4), (512, 2)]


def quantize_config(rows, columns, warps):
    return quantize_tuning.Config(block_r=rows, block_c=columns, num_warps=warps)


class Inputs:
    """Routings in turn, so that few-token times are not cache hits."""

    def __init__(self, problem, tokens, sets):
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        self.problem, self.sets, self.tables = problem, [], {}
        for _ in range(sets):
            scores = torch.rand(tokens, problem.E, device="cuda", generator=generator)
            permutation = Permutation.of(scores.topk(problem.K).indices, problem.E)
            x = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
            parts = (permutation.slots, permutation.offsets, permutation.inverse)
            self.sets.append((x, *(part.int() for part in parts)))
        self.touched = int((self.sets[0][2].diff() > 0).sum())

    def tiles(self, which, block_r):
        if (which, block_r) not in self.tables:
            _, slots, offsets, _ = self.sets[which]
            self.tables[which, block_r] = tiles(offsets, slots.numel(), block_r)
        return self.tables[which, block_r]

    def permuted(self, which, config=None, row_format=ROWS_FP8, **options):
        x, _, offsets, inverse = self.sets[which]
        return launch_permute_and_quantize(
            x, inverse, self.problem.K, None, offsets[-1:], row_format, config=config, **options
        )

    def activated(self, which, z, config=None, row_format=ROWS_FP8, **options):
        _, _, offsets, _ = self.sets[which]
        return launch_activation_and_quantize(
            z, ACTIVATION, Layout(), None, offsets[-1:], row_format, config=config, **options
        )

    def product(self, which, rows, matrix, config):
        slots, table = self.sets[which][1], self.tiles(which, config.block_r)
        values, scales = rows[which]
        return launch_scaled_gemm(
            values, scales, slots, table, matrix, None, None, torch.bfloat16, config
        )


def timed(function, sets, repeats):
    """Return ms of a call, the median of replays."""
    (ms,) = replayed([captured(function, sets, repeats)], sets * repeats, rounds=3)
    return ms


def _worth_it(config, per_expert):
    """Tell whether a tile is near the number of rows of an expert."""
    rows = config.block_r
    if config.swap and per_expert > 200:
        return False
    return rows / 3 <= max(per_expert, 6) and (rows >= 64 or per_expert <= 2 * rows)


def products(name, tokens, inputs, rows, matrix, stage, results):
    """Time every tile of one projection of one cell; print all, the best first."""
    sets, live = len(inputs.sets), int(inputs.sets[0][2][-1])
    flop = 2 * live * matrix.shape[1] * matrix.shape[2]
    weight_bytes = inputs.touched * matrix.shape[1] * matrix.shape[2]
    expected = inputs.product(0, rows, matrix, PLAIN)[:live]
    repeats = max(1, min(20, int(1e12 / (flop + 150 * weight_bytes))))
    found = []
    for config in TILES:
        if not _worth_it(config, tokens * inputs.problem.K / inputs.problem.E):
            continue
        count = 3 if tokens >= 1024 else 20
        same = all(
            torch.equal(inputs.product(0, rows, matrix, config)[:live], expected)
            for _ in range(count)
        )
        ms = timed(lambda w, c=config: inputs.product(w, rows, matrix, c), sets, repeats)
        found.append({
            "shape": name, "T": tokens, "stage": stage, "tile": asdict(config), "same_bits": same,
            "ms": ms, "tflops": flop / ms / 1e9, "tbs": weight_bytes / ms / 1e9,
        })  # fmt: skip
    results += found
    found.sort(key=lambda row: row["ms"])
    print(f"{name} T={tokens} {stage}: {found[0]['tflops']:.0f} TFLOP/s "
          f"{found[0]['tbs']:.2f} TB/s of weights")  # fmt: skip
    for row in found:
        tile = row["tile"]
        print("   {block_r:>4}x{block_n:<3} w{num_warps} s{num_stages} swap={swap:d} group={group} "
              "specialized={specialized:d}".format(**tile), f"{row['ms']:.4f} ms",
              "" if row["same_bits"] else "OTHER BITS", flush=True)  # fmt: skip


def quantising(name, tokens, inputs, zs, results):
    """Time what quantises rows: codes, and the numbers that MXFP8 rows stand for."""
    problem, sets, live = inputs.problem, len(inputs.sets), int(inputs.sets[0][2][-1])
    repeats = max(1, min(20, 20000 // live))
    for numbers in (False, True):
        held, out = (MXFP8, 2) if numbers else (ROWS_FP8, 1)
        for op, configs, width, columns in (
            ("permute", [(1, *c) for c in PERMUTATIONS], 2 / problem.K, problem.H),
            ("activation", ACTIVATIONS, 4, problem.F),
        ):
            line = []
            for tile in configs:
                options = {"config": quantize_config(*tile), "row_format": held, "numbers": numbers}

                def call(which, op=op, options=options):
                    if op == "permute":
                        return inputs.permuted(which, **options)
                    return inputs.activated(which, zs[which], **options)

                ms = timed(call, sets, repeats)
                line.append(f"{tile} {ms:.4f} ({live * columns * (width + out) / ms / 1e9:.2f})")
                about = {"shape": name, "T": tokens, "op": op, "numbers": numbers, "tile": tile}
                results.append({**about, "ms": ms})
            print(f"{name} T={tokens} {op} {held.name}, ms (TB/s):", "; ".join(line), flush=True)


def measure(name, tokens, weights, results):
    """Time one cell."""
    problem = MODELS[name]
    inputs = Inputs(problem, tokens, 4 if tokens < 1024 else 1)
    sets = range(len(inputs.sets))
    xs = [inputs.permuted(w) for w in sets]
    zs = [inputs.product(w, xs, weights[0], PLAIN) for w in sets]
    hs = [inputs.activated(w, zs[w]) for w in sets]
    products(name, tokens, inputs, xs, weights[0], "first", results)
    products(name, tokens, inputs, hs, weights[1], "second", results)
    if tokens in (16, 4096):
        quantising(name, tokens, inputs, zs, results)


def matrices(problem):
    e, h, f = problem.E, problem.H, problem.F
    return random_matrix(FP8, (e, 2 * f, h), 1), random_matrix(FP8, (e, h, f), 2)


def compile_share(index, count):
    problem = replace(MODELS["mixtral"], H=4096, F=4096, E=2, K=1)
    inputs = Inputs(problem, 2, 1)
    xs = [inputs.permuted(0)]
    matrix = random_matrix(FP8, (2, 512, 4096), 1)
    for config in TILES[index::count]:
        inputs.product(0, xs, matrix, config)
    tuned = [("a", c) for c in ACTIVATIONS] + [("p", (1, *c)) for c in PERMUTATIONS]
    for op, tile in tuned[index::count]:
        for held, numbers in ((ROWS_FP8, False), (MXFP8, True)):
            options = {"config": quantize_config(*tile), "row_format": held, "numbers": numbers}
            if op == "a":
                inputs.activated(0, torch.zeros(2, 8192).to("cuda", torch.bfloat16), **options)
            for topk in (2, 8) if op == "p" else ():
                wide = Inputs(replace(problem, E=8, K=topk), 2, 1)
                wide.permuted(0, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune-scaled-gemm.json")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=45)
    args = parser.parse_args()
    if args.compile_share:
        compile_share(*args.compile_share)
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; this benchmark has nothing to time")
    start = time.time()
    codes = compile_in_processes(__file__)
    print("compiled in", round(time.time() - start), "s", codes, flush=True)
    results, weights, held = [], (), None
    for cell in args.cells.split(","):
        name, tokens = cell.split(":")
        if time.time() - start > args.seconds:
            print("out of time before", cell)
            break
        if name != held:
            weights = ()
            torch.cuda.empty_cache()
            weights, held = matrices(MODELS[name]), name
        measure(name, int(tokens), weights, results)
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        found = {"gpu": torch.cuda.get_device_name(), **versions, "rows": results}
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
