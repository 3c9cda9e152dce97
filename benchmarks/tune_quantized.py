"""Time candidate tiles of the projections over quantised weights, check their bits, write JSON.

    python benchmarks/tune_quantized.py --out FILE [--formats fp8,mxfp4]

The bits of every candidate are compared with the dense kernel on the dequantised matrices, which is
also what speed-ups are counted against. A candidate enters the table only from here.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from quantized_inputs import dense, random_matrix, random_weights
from timing import captured, compile_in_processes, replayed

from samebits.activation import Activation
from samebits.formats import FP8, MXFP4, MXFP4_SHUFFLED, MXFP8, NVFP4
from samebits.ops.dequantize.kernel import launch_dequantize
from samebits.ops.dequantize.tuning import Config as CopyConfig
from samebits.ops.indirect_gemm import kernel as used
from samebits.ops.indirect_gemm.tuning import Config, heuristic, supports_upcast
from samebits.ops.permute.reference import tiles
from samebits.routing import Permutation
from samebits.testing.cases import MODELS
from samebits.weights import Layout

ACTIVATION = Activation()
FORMATS = {f.name: f for f in (FP8, MXFP8, MXFP4, MXFP4_SHUFFLED, NVFP4)}
# block_r, block_n, block_k, warps, stages.
TILES = [
    (8, 64, 128, 2, 4),
    (8, 64, 256, 2, 3),
    (8, 128, 128, 2, 4),
    (8, 64, 128, 1, 4),
    (16, 64, 128, 2, 4),
    (16, 128, 128, 2, 4),
    (8, 32, 256, 2, 3),
    (8, 32, 128, 2, 4),
    (32, 128, 128, 2, 3),
]
# The same for shuffled words, of which every warp has rows of its own.
SHUFFLED_TILES = [
    (8, 128, 128, 2, 4),
    (8, 128, 128, 2, 3),
    (8, 128, 256, 2, 3),
    (8, 128, 256, 4, 3),
    (16, 128, 128, 2, 4),
    (16, 128, 256, 4, 3),
    (8, 256, 128, 4, 4),
    (8, 64, 256, 2, 4),
    (8, 64, 512, 4, 3),
    (8, 64, 256, 4, 4),
]
# What is timed unless arguments say otherwise.
CELLS = {
    "fp8": {"mixtral": (1, 4, 16, 64), "gpt-oss-120b": (16,), "deepseek-v3": (4, 16)},
    "mxfp4": {"mixtral": (1, 4, 16, 64), "gpt-oss-120b": (4, 16, 64), "deepseek-v3": (16,)},
    "mxfp4_shuffled": {
        "mixtral": (1, 4, 16, 64),
        "gpt-oss-120b": (1, 4, 16, 256),
        "deepseek-v3": (16,),
    },
    "mxfp8": {"mixtral": (16,)},
    "nvfp4": {"mixtral": (16,)},
}
# Formats that are timed with others.
OTHERS = {"mxfp8": TILES[:5:4], "mxfp4_shuffled": SHUFFLED_TILES, "nvfp4": TILES[:5:4]}
COPIES = [(16, 512, 4), (32, 256, 4), (8, 1024, 4), (16, 512, 8), (64, 128, 4)]


def config(block_r, block_n, block_k, warps, stages):
    return Config(
        block_r=block_r, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages,
        swap=True, group=1, programs=1 << 20,
    )  # fmt: skip


def tiles_of(held, parts=1):
    """Return the candidates that can multiply such weights, whose rows are in so many parts."""
    found = OTHERS.get(held.name, TILES)
    return [tile for tile in found if supports_upcast(config(*tile), held, parts)]


class Inputs:
    """Routings in turn, so that few-token times are not cache hits."""

    def __init__(self, problem, tokens, sets):
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        self.problem, self.sets, self.tables = problem, [], {}
        for _ in range(sets):
            scores = torch.rand(tokens, problem.E, device="cuda", generator=generator)
            permutation = Permutation.of(scores.topk(problem.K).indices, problem.E)
            x = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
            self.sets.append((x, permutation.slots.int(), permutation.offsets.int()))
        self.touched = int((self.sets[0][2].diff() > 0).sum())

    def tiles(self, which, block_r):
        if (which, block_r) not in self.tables:
            _, slots, offsets = self.sets[which]
            self.tables[which, block_r] = tiles(offsets, slots.numel(), block_r)
        return self.tables[which, block_r]

    def first(self, which, weights, config, kernels=used):
        x, slots, _ = self.sets[which]
        return kernels.launch_first_projection(
            x, slots, self.tiles(which, config.block_r), weights, ACTIVATION, None, config,
            topk=self.problem.K, gather=True, save=False,
        )[0]  # fmt: skip

    def second(self, which, h, matrix, config, kernels=used):
        _, slots, _ = self.sets[which]
        table = self.tiles(which, config.block_r)
        return kernels.launch_second_projection(h[which], slots, table, matrix, None, None, config)

    def run(self, stage, hs, which, weights, config, kernels=used):
        """Compute one of the projections; the second of the rows ``hs``, one for each set."""
        if stage == "first":
            return self.first(which, weights, config, kernels)
        return self.second(which, hs, weights.down, config, kernels)


def timed(function, sets, repeats):
    """Return ms of a call, the median of replays."""
    (ms,) = replayed([captured(function, sets, repeats)], sets * repeats)
    return ms


def measure(name, tokens, weights, expected, results):
    """Time both projections of one cell, for every tile; print the best."""
    problem, held = MODELS[name], weights.gate_up.format
    inputs = Inputs(problem, tokens, 4)
    plain = heuristic(tokens * problem.K, problem.E, "sm_90")
    hs = [inputs.first(w, expected, plain[0]) for w in range(4)]
    ys = inputs.second(0, hs, expected.down, plain[1])
    live = int(inputs.sets[0][2][-1])
    for stage in ("first", "second"):
        matrix = getattr(weights, "gate_up" if stage == "first" else "down")
        numbers = inputs.touched * matrix.shape[1] * matrix.shape[2]
        repeats = min(max(1, int(8e9 / numbers)), 20)
        run = partial(inputs.run, stage, hs)
        tile_of_dense = plain[stage == "second"]
        base = timed(lambda w, f=run, c=tile_of_dense: f(w, expected, c), 4, repeats)
        rows = []
        for tile in tiles_of(held, 2 if stage == "first" else 1):
            candidate = config(*tile)
            per_expert = tokens * problem.K / problem.E
            if not tile[0] / 8 <= max(per_expert, 2) <= 2 * tile[0]:
                continue
            value = run(0, weights, candidate)
            same = bool(torch.equal(value[:live], (hs[0] if stage == "first" else ys)[:live]))
            again = all(torch.equal(run(0, weights, candidate), value) for _ in range(20))
            ms = timed(lambda w, f=run, c=candidate: f(w, weights, c), 4, repeats)
            rows.append(
                {
                    "shape": name, "T": tokens, "format": held.key, "stage": stage, "tile": tile,
                    "ms": ms, "dense_ms": base, "same_bits": same, "repeats": again,
                    "tbs": numbers * held.bits / 8 / ms / 1e9,
                }
            )  # fmt: skip
        results += rows
        best = min(rows, key=lambda r: r["ms"])
        dense_tbs = numbers * 2 / base / 1e9
        print(
            f"{name:13}{held.key:12} T={tokens:<3}{stage:7} {base / best['ms']:5.2f}x of {base:.4f}"
            f" ms ({dense_tbs:.2f} TB/s) -> {best['ms']:.4f} ms, {best['tbs']:.2f} TB/s, best "
            f"{best['tile']}; " + " ".join(f"{r['ms']:.4f}" for r in rows)
            + ("" if all(r["same_bits"] and r["repeats"] for r in rows) else "  OTHER BITS ")
            + " ".join(str(r["tile"]) for r in rows if not (r["same_bits"] and r["repeats"])),
            flush=True,
        )  # fmt: skip


def copies(name, weights, results):
    """Time the dequantising pass over whole matrices."""
    matrix = weights.gate_up
    numbers = matrix.values.numel() * matrix.format.value.per_byte
    expected = None
    for block_n, block_k, warps in COPIES:
        tile = CopyConfig(block_n=block_n, block_k=block_k, num_warps=warps)
        value = launch_dequantize(matrix, torch.bfloat16, None, tile)
        if expected is None:
            expected = torch.cat([matrix.select([e]).dequantize(torch.bfloat16) for e in (0, 1)])
        same = bool(torch.equal(value[:2].view(torch.int16), expected.view(torch.int16)))
        del value
        ms = timed(lambda _, t=tile: launch_dequantize(matrix, torch.bfloat16, None, t), 1, 2)
        moved = numbers * (2 + matrix.format.bits / 8)
        print(f"copy {name} {matrix.format.key} {block_n}x{block_k} w{warps} {ms:.3f} ms "
              f"{moved / ms / 1e9:.2f} TB/s same={same}", flush=True)  # fmt: skip
        about = {"shape": name, "format": matrix.format.key, "copy": [block_n, block_k, warps]}
        results.append({**about, "ms": ms, "same_bits": same})


def layouts_and_scales(results):
    """Compare bits where the fast way ends: other layouts, scales of 4 and more, NaN, tails."""
    for held in FORMATS.values():
        # Contractions that end within a step, and within a word of scales.
        sizes = {"H": 192, "F": 64} if held.shuffled else {"H": 224, "F": 96}
        small = replace(MODELS["mixtral"], E=5, **sizes)
        for layout in (Layout(), Layout(interleave=1)):
            weights = random_weights(held, small, layout)
            if held.scales == "e8m0":
                for matrix in (weights.gate_up, weights.down):
                    # The first bytes of a row, or of its first 128 columns.
                    scales = matrix.scales[:, 0] if held.shuffled else matrix.scales
                    scales[1, 3, 0], scales[2, 5, 1], scales[3, 7, 0] = 0, 140, 255
            expected = dense(weights)
            whole = torch.equal(
                expected.down.nan_to_num(7.0),
                weights.down.dequantize(torch.bfloat16).nan_to_num(7.0),
            )
            inputs = Inputs(small, 7, 1)
            plain = heuristic(14, 5, "sm_90")
            hs = [inputs.first(0, expected, plain[0])]
            ys = inputs.second(0, hs, expected.down, plain[1])
            live = int(inputs.sets[0][2][-1])
            for tile in tiles_of(held, 2)[:5:4]:
                h = inputs.first(0, weights, config(*tile))
                y = inputs.second(0, hs, weights.down, config(*tile))
                pairs = ((h, hs[0]), (y, ys))
                same = [
                    bool(torch.equal(a[:live].nan_to_num(7.0), b[:live].nan_to_num(7.0)))
                    for a, b in pairs
                ]
                results.append(
                    {"format": held.key, "layout": layout.key, "tile": tile, "same": same}
                )
                if not (all(same) and whole):
                    print("DIFFERS", held, layout, tile, same, whole, flush=True)
    print("layouts, wide scales, NaN, tails: compared", len(results), flush=True)


def compile_share(index, count):
    problem = replace(MODELS["mixtral"], H=256, F=256, E=2)
    jobs = [(held, tile) for held in FORMATS.values() for tile in tiles_of(held)]
    for held, tile in jobs[index::count]:
        for layout in (Layout(), Layout(interleave=1)):
            if layout != Layout() and tile not in tiles_of(held, 2)[:5:4]:
                continue
            weights, inputs = random_weights(held, problem, layout), Inputs(problem, 2, 1)
            if tile in tiles_of(held, 2):
                inputs.first(0, weights, config(*tile))
            h = torch.zeros(4, problem.F, device="cuda", dtype=torch.bfloat16)
            inputs.second(0, [h], weights.down, config(*tile))
    for held in list(FORMATS.values())[index % 5 :: 5][:1]:
        for block_n, block_k, warps in COPIES:
            matrix = random_matrix(held, (2, 256, 1024), 0)
            launch_dequantize(
                matrix, torch.bfloat16, None,
                CopyConfig(block_n=block_n, block_k=block_k, num_warps=warps),
            )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--formats", default=",".join(CELLS))
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=80)
    args = parser.parse_args()
    if args.compile_share:
        compile_share(*args.compile_share)
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; this benchmark has nothing to time")
    start = time.time()
    codes = compile_in_processes(__file__)
    print("compiled in", round(time.time() - start), "s", codes, flush=True)
    results = []
    layouts_and_scales(results)
    for key in args.formats.split(","):
        for name, tokens in CELLS[key].items():
            if time.time() - start > args.seconds:
                print("out of time before", key, name)
                break
            weights = random_weights(FORMATS[key], MODELS[name])
            if name == "mixtral" or key.startswith("mxfp4"):
                copies(name, weights, results)
            expected = dense(weights)
            for count in tokens:
                measure(name, count, weights, expected, results)
            del weights, expected
            torch.cuda.empty_cache()
            versions = {"torch": torch.__version__, "triton": triton.__version__}
            found = {"gpu": torch.cuda.get_device_name(), **versions, "rows": results}
            Path(args.out).write_text(json.dumps(found))
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
