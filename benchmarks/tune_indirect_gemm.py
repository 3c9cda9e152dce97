"""Time every candidate tile of the two projections, check that all give the same bits, write JSON.

    python benchmarks/tune_indirect_gemm.py --out FILE [--shapes qwen3-30b,mixtral] [--tokens 1,16]

A candidate enters the tuning table only from here: where it is fastest and has the bits of the
others. Weights of different experts are read in turn, so that few-token times are not cache hits.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import triton
from timing import captured, compile_in_processes, replayed

from samebits.activation import Activation
from samebits.ops.indirect_gemm.kernel import launch_first_projection, launch_second_projection
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.reference import tiles
from samebits.routing import Permutation
from samebits.testing.cases import MODELS
from samebits.weights import ExpertWeights

ACTIVATION = Activation()


def rows(block_r, block_n, block_k, warps, stages, group=8, short=0):
    area = block_r * block_n
    programs = 132 if area >= 128 * 256 else 264 if area >= 64 * 128 else 528
    return Config(
        block_r=block_r, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages,
        group=group, programs=programs, short=short,
    )  # fmt: skip


def streamed(block_r, block_n, block_k, warps, stages, swap, short=0, group=1):
    return Config(
        block_r=block_r, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages,
        swap=swap, group=group, programs=1 << 20, short=short,
    )  # fmt: skip


ROWS = [
    rows(128, 256, 64, 8, 3),
    rows(128, 256, 64, 8, 3, 16),
    rows(128, 256, 64, 8, 4),
    rows(128, 256, 64, 8, 4, 16),
    rows(128, 128, 64, 4, 4),
    rows(128, 128, 64, 8, 4),
    rows(64, 256, 64, 4, 4),
    rows(64, 256, 64, 8, 4),
    rows(64, 128, 64, 4, 4),
]
# The last tile of an expert with fewer rows.
SHORT = [
    rows(128, 256, 64, 8, 3, 16, short=64),
    rows(128, 256, 64, 8, 4, short=64),
    rows(128, 128, 64, 4, 4, short=64),
    *(streamed(128, 256, 64, 8, 4, True, rest, group) for rest in (32, 64) for group in (1, 4, 8)),
]
SWAPPED = {
    16: [
        (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 8, 4), (128, 128, 4, 3), (128, 128, 4, 4),
        (128, 128, 8, 4), (128, 256, 4, 2), (128, 256, 8, 3), (256, 64, 8, 4), (256, 128, 8, 3),
    ],
    32: [
        (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 64, 8, 4), (128, 128, 4, 3),
        (128, 128, 8, 4), (128, 128, 8, 5), (256, 64, 8, 4), (256, 128, 8, 3),
    ],
    64: [
        (128, 64, 4, 4), (128, 64, 8, 5), (128, 128, 4, 3), (128, 128, 8, 4), (128, 128, 8, 3),
        (256, 64, 8, 4), (256, 64, 4, 4),
    ],
    128: [(256, 64, 8, 4)],
}  # fmt: skip
SMALL = [
    streamed(16, n, k, 4, stages, swap=False)
    for n, k, stages in [(32, 128, 5), (32, 256, 4), (64, 128, 5)]
]
# Weights through pointers.
POINTED = [
    replace(streamed(*shape, swap=True), tma=False)
    for shape in [(16, 128, 128, 4, 3), (16, 64, 256, 4, 3), (32, 128, 128, 8, 4)]
]


def candidates(rows_per_expert):
    swapped = {
        r: [streamed(r, *shape, swap=True) for shape in shapes] for r, shapes in SWAPPED.items()
    }
    if rows_per_expert <= 6:
        return [*swapped[16], *SMALL, *POINTED[:2]]
    if rows_per_expert <= 24:
        return [*swapped[16], *swapped[32], *SMALL, *POINTED]
    if rows_per_expert <= 40:
        return [*swapped[32], *swapped[64]]
    if rows_per_expert <= 300:
        return [*swapped[128], ROWS[2], *ROWS[-3:], *SHORT]
    return [*ROWS[:4], *SHORT[:2], SHORT[5]]


class Case:
    def __init__(self, problem, tokens, weights, sets):
        self.problem, self.tokens, self.weights = problem, tokens, weights
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        self.sets = []
        for _ in range(sets):
            scores = torch.rand(tokens, problem.E, device="cuda", generator=generator)
            ids = scores.topk(problem.K).indices
            permutation = Permutation.of(ids, problem.E)
            x = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
            self.sets.append((x, permutation.slots.int(), permutation.offsets.int()))
        self.tables = {}
        offsets = self.sets[0][2]
        self.touched = int((offsets.diff() > 0).sum())

    def tiles(self, which, block_r):
        key = which, block_r
        if key not in self.tables:
            _, slots, offsets = self.sets[which]
            self.tables[key] = tiles(offsets, slots.numel(), block_r)
        return self.tables[key]

    def first(self, which, config):
        x, slots, _ = self.sets[which]
        return launch_first_projection(
            x, slots, self.tiles(which, config.block_r), self.weights, ACTIVATION, None, config,
            topk=self.problem.K, gather=True, save=False,
        )[0]  # fmt: skip

    def second(self, which, config, h):
        _, slots, _ = self.sets[which]
        table = self.tiles(which, config.block_r)
        return launch_second_projection(
            h[which], slots, table, self.weights.down, None, None, config
        )


def short(c):
    form, path = "swap" if c.swap else "rows", "" if c.tma else " pointers"
    tile = f"{c.block_r}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages} g{c.group}"
    tile += f" short {c.short}" if c.short else ""
    return f"{form} {tile}{path}"


def measure(name, tokens, weights):
    problem = MODELS[name]
    sets = 4 if tokens <= 1024 else 1
    case = Case(problem, tokens, weights, sets)
    slots = tokens * problem.K
    found = candidates(slots / problem.E)
    reference_h = [case.first(w, found[0]) for w in range(sets)]
    live = int(case.sets[0][2][-1])
    reference_y = case.second(0, found[0], reference_h)
    results = []
    for stage in ("first", "second"):
        about = {"shape": name, "T": tokens, "stage": stage}
        rows_of_weights = 2 * problem.F if stage == "first" else problem.F
        flop = 2 * slots * problem.H * rows_of_weights
        byte = 2 * case.touched * problem.H * rows_of_weights
        repeats = min(max(1, int(1e12 / max(flop, byte * 150)) // sets), 50)
        graphs, captures = [], []
        for config in found:
            try:
                if stage == "first":
                    value, expected = case.first(0, config), reference_h[0]
                    run = lambda w, config=config: case.first(w, config)  # noqa: E731
                else:
                    value, expected = case.second(0, config, reference_h), reference_y
                    run = lambda w, config=config: case.second(w, config, reference_h)  # noqa: E731
                same = bool(torch.equal(value[:live], expected[:live]))
                graphs.append(captured(run, sets, repeats))
            except triton.runtime.errors.OutOfResources as error:
                results.append({**about, "config": repr(config), "error": str(error)[:120]})
                continue
            tile = {"config": repr(config), "block_r": config.block_r, "short": short(config)}
            captures.append({**about, **tile, "same_bits": same})
        for row, ms in zip(captures, replayed(graphs, repeats * sets), strict=True):
            speed = {"ms": ms, "tflops": flop / ms / 1e9, "tbs": byte / ms / 1e9}
            results.append(row | speed)
    return results


def weights_of(problem):
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape, scale):
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        for part in out:
            part.copy_(torch.randn(part.shape, device="cuda", generator=generator) * scale)
        return out

    return ExpertWeights(
        gate_up=draw(problem.E, 2 * problem.F, problem.H, scale=problem.H**-0.5),
        down=draw(problem.E, problem.H, problem.F, scale=problem.F**-0.5),
    )


def compile_share(index, count):
    problem = MODELS["qwen3-30b"]
    small = ExpertWeights(
        gate_up=torch.zeros(2, 512, 512, device="cuda", dtype=torch.bfloat16),
        down=torch.zeros(2, 512, 256, device="cuda", dtype=torch.bfloat16),
    )
    every = list(dict.fromkeys(c for n in (1, 20, 40, 100, 1000) for c in candidates(n)))
    x = torch.zeros(4, 512, device="cuda", dtype=torch.bfloat16)
    permutation = Permutation.of(torch.zeros(4, 2, dtype=torch.int64, device="cuda"), 2)
    for config in every[index::count]:
        table = tiles(permutation.offsets, 8, config.block_r)
        slots = permutation.slots.int()
        try:
            h, _ = launch_first_projection(
                x, slots, table, small, ACTIVATION, None, config,
                topk=problem.K, gather=True, save=False,
            )  # fmt: skip
            launch_second_projection(h, slots, table, small.down, None, None, config)
        except triton.runtime.errors.OutOfResources:
            continue


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096,16384")
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=450)
    args = parser.parse_args()
    if args.compile_share:
        compile_share(*args.compile_share)
        return
    start = time.time()
    codes = compile_in_processes(__file__)
    print("compiled in", round(time.time() - start), "s", codes, flush=True)
    results = []
    for name in args.shapes.split(","):
        weights = weights_of(MODELS[name])
        for tokens in map(int, args.tokens.split(",")):
            if time.time() - start > args.seconds:
                print("out of time before", name, tokens)
                break
            rows_ = measure(name, tokens, weights)
            results += rows_
            for block_r in sorted({r["block_r"] for r in rows_ if "ms" in r}):
                timed_rows = [r for r in rows_ if r.get("block_r") == block_r and "ms" in r]
                best = [
                    min((r for r in timed_rows if r["stage"] == stage), key=lambda r: r["ms"])
                    for stage in ("first", "second")
                ]
                total = sum(r["ms"] for r in best)
                chosen = " | ".join(r["short"] for r in best)
                print(f"    block_r {block_r:4} {total:8.4f} ms  {chosen}", flush=True)
            for stage in ("first", "second"):
                good = [r for r in rows_ if r["stage"] == stage and "ms" in r]
                bad = [r["config"] for r in good if not r["same_bits"]]
                best = min(good, key=lambda r: r["ms"])
                print(
                    f"{name:13} T={tokens:<6}{stage:7}{best['ms']:8.4f} ms "
                    f"{best['tflops']:5.0f} TF {best['tbs']:5.2f} TB/s  {best['short']}"
                    + (f"  OTHER BITS {len(bad)}: {bad[:2]}" if bad else ""),
                    flush=True,
                )
            versions = {"torch": torch.__version__, "triton": triton.__version__}
            found = {"gpu": torch.cuda.get_device_name(), **versions, "rows": results}
            Path(args.out).write_text(json.dumps(found))
        del weights
        torch.cuda.empty_cache()
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
