"""Time ways to decode MXFP4 in the projections of few tokens; check their bits; write JSON.

    python benchmarks/tune_e2m1.py --out FILE [--seconds 80]

Beside the way that is used: those of ``quantized_candidates``, all on one list of tiles. Bits are
compared with the dense kernel on the dequantised matrices, which is what speed-ups are counted
against. Two ways have no weights: what they take is not the decoding's. For many rows: tiles that
upcast, beside a pass that makes the matrix dense and the dense product.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import quantized_candidates
import torch
import triton
from quantized_inputs import dense, random_weights
from timing import compile_in_processes
from tune_quantized import Inputs, config, timed

from samebits.formats import MXFP4
from samebits.ops.dequantize.kernel import launch_dequantize
from samebits.ops.indirect_gemm import kernel as used
from samebits.ops.indirect_gemm.tuning import heuristic
from samebits.testing.cases import MODELS

WAY_TILES = [
    (8, 128, 128, 2, 4),
    (8, 64, 256, 2, 3),
    (8, 64, 128, 2, 4),
    (8, 32, 512, 2, 3),
    (8, 32, 256, 2, 4),
    (8, 128, 256, 2, 3),
    (8, 32, 256, 1, 4),
]
# How many of these tiles each way has: of contractions that are a multiple of 512, and of others.
WAYS = {"used": (5, 3), "muls": (3, 2), "paired": (7, 3)}
WAY_CELLS = {"mixtral": (16, 1, 4), "gpt-oss-120b": (16, 4), "deepseek-v3": (16,)}
# Without weights, in the first cell alone.
WITHOUT = [(way, tile) for way in ("nothing", "unscaled") for tile in WAY_TILES[:2]]

# Many rows: tiles that upcast beside making the matrix dense and multiplying.
ROW_TILES = [(128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 3)]
ROW_CELLS = ("mixtral", "gpt-oss-120b")
ROW_TOKENS = 4096


def jobs_of(wide):
    """Return the ways and tiles for contractions that are a multiple of 512, or are not."""
    return [(way, tile) for way, counts in WAYS.items() for tile in WAY_TILES[: counts[not wide]]]


def is_for(stage, tile):
    """Return whether each warp has 16 rows of its own; first tiles are split in two."""
    return tile[1] // (2 if stage == "first" else 1) >= 16 * tile[3]


def measure_ways(name, tokens, stored, expected, results):
    """Time every way to decode on every tile of one cell; print the best of each way."""
    problem, inputs = MODELS[name], Inputs(MODELS[name], tokens, 4)
    plain = heuristic(tokens * problem.K, problem.E, "sm_90")
    hs = [inputs.first(w, expected, plain[0]) for w in range(4)]
    ys = inputs.second(0, hs, expected.down, plain[1])
    live = int(inputs.sets[0][2][-1])
    for stage, dense_tile in zip(("first", "second"), plain, strict=True):
        run = partial(inputs.run, stage, hs)
        matrix = getattr(stored["used"], "gate_up" if stage == "first" else "down")
        numbers = inputs.touched * matrix.shape[1] * matrix.shape[2]
        repeats = min(max(1, int(4e9 / numbers)), 10)
        base = timed(lambda w, f=run, c=dense_tile: f(w, expected, c), 4, repeats)
        jobs = jobs_of(matrix.shape[2] % 512 == 0)
        if (name, tokens) == ("mixtral", 16):
            jobs += WITHOUT
        jobs = [(way, tile) for way, tile in jobs if is_for(stage, tile)]
        rows = []
        for way, tile in jobs:
            kernels = used if way == "used" else quantized_candidates.kernels(way)
            weights, candidate = stored.get(way, stored["used"]), config(*tile)
            job = weights, candidate, kernels
            value = run(0, *job)
            same = bool(torch.equal(value[:live], (hs[0] if stage == "first" else ys)[:live]))
            again = all(torch.equal(run(0, *job), value) for _ in range(10))
            ms = timed(lambda w, f=run, j=job: f(w, *j), 4, repeats)
            about = {"shape": name, "T": tokens, "format": "mxfp4", "stage": stage, "tile": tile}
            about |= {"way": way, "same_bits": same, "repeats": again}
            rows.append({**about, "ms": ms, "dense_ms": base, "weights_per_us": numbers / ms / 1e3})
        results += rows
        print(f"{name} T={tokens} {stage}: dense {base:.4f} ms")
        for way in dict.fromkeys(row["way"] for row in rows):
            of_way = [row for row in rows if row["way"] == way]
            best = min(of_way, key=lambda r: r["ms"])
            wrong = [r["tile"] for r in of_way if not (r["same_bits"] and r["repeats"])]
            print(
                f"  {way:9}{base / best['ms']:5.2f}x {best['ms']:.4f} ms {best['tile']}; "
                + " ".join(f"{r['ms']:.4f}" for r in of_way)
                + (f"  OTHER BITS {wrong}" if wrong and way in WAYS else ""),
                flush=True,
            )


def row_tile(tile):
    return replace(config(*tile), group=8)


def measure_rows(name, weights, expected, results):
    """Time many rows: upcast, beside a pass that makes the matrix dense and its product."""
    problem, kernels = MODELS[name], quantized_candidates.kernels("rows")
    inputs = Inputs(problem, ROW_TOKENS, 1)
    plain = heuristic(ROW_TOKENS * problem.K, problem.E, "sm_90")
    hs = [inputs.first(0, expected, plain[0])]
    ys = inputs.second(0, hs, expected.down, plain[1])
    live = int(inputs.sets[0][2][-1])
    for stage in ("first", "second"):
        run = partial(inputs.run, stage, hs, 0)
        matrix = weights.gate_up if stage == "first" else weights.down
        base = timed(lambda _, f=run, c=plain[stage == "second"]: f(expected, c), 1, 3)
        made = timed(lambda _, m=matrix: launch_dequantize(m, torch.bfloat16), 1, 3)
        line = f"{name} T={ROW_TOKENS} {stage}: dense {base:.3f} ms, made dense {made:.3f} ms;"
        for tile in ROW_TILES:
            job = weights, row_tile(tile), kernels
            value = run(*job)
            same = bool(torch.equal(value[:live], (hs[0] if stage == "first" else ys)[:live]))
            again = all(torch.equal(run(*job), value) for _ in range(5))
            ms = timed(lambda _, f=run, j=job: f(*j), 1, 3)
            about = {"shape": name, "T": ROW_TOKENS, "format": "mxfp4", "stage": stage}
            about |= {"way": "rows", "tile": tile, "same_bits": same, "repeats": again, "ms": ms}
            results.append({**about, "dense_ms": base, "pass_ms": made})
            line += f" {tile} {ms:.3f}" + ("" if same and again else " OTHER BITS")
        print(line, flush=True)


def ways(results, seconds):
    """Time the ways to decode MXFP4 until ``seconds`` of the clock."""
    for name, counts in WAY_CELLS.items():
        if time.time() > seconds:
            print("out of time before", name)
            break
        weights = random_weights(MXFP4, MODELS[name])
        expected = dense(weights)
        stored = {way: quantized_candidates.stored_for(way, weights) for way in ("used", "paired")}
        if name in ROW_CELLS:
            measure_rows(name, weights, expected, results)
        for count in counts:
            if time.time() < seconds:
                measure_ways(name, count, stored, expected, results)
        del weights, expected, stored
        torch.cuda.empty_cache()


def compile_share(index, count):
    """Compile this process's share of the ways and tiles."""
    # What a kernel is compiled for: mixtral and deepseek-v3, then gpt-oss-120b.
    jobs = [(*job, 1024) for job in jobs_of(True) + WITHOUT]
    jobs += [(*job, 192) for job in jobs_of(False)]
    for way, tile, size in jobs[index::count]:
        problem = replace(MODELS["mixtral"], H=size, F=size, E=2)
        weights, inputs = random_weights(MXFP4, problem), Inputs(problem, 2, 1)
        kernels = used if way == "used" else quantized_candidates.kernels(way)
        if is_for("first", tile):
            inputs.first(0, weights, config(*tile), kernels)
        h = torch.zeros(4, size, device="cuda", dtype=torch.bfloat16)
        inputs.second(0, [h], weights.down, config(*tile), kernels)
    rows = [(tile, size) for tile in ROW_TILES for size in (1024, 192)]
    for tile, size in rows[index::count]:
        problem = replace(MODELS["mixtral"], H=size, F=size, E=2)
        weights, inputs = random_weights(MXFP4, problem), Inputs(problem, 2, 1)
        kernels = quantized_candidates.kernels("rows")
        h = inputs.first(0, weights, row_tile(tile), kernels)
        inputs.second(0, [h], weights.down, row_tile(tile), kernels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=80)
    args = parser.parse_args()
    if args.compile_share:
        compile_share(*args.compile_share)
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; this benchmark has nothing to time")
    start = time.time()
    codes = compile_in_processes(__file__, "--out", str(args.out))
    print("compiled in", round(time.time() - start), "s", codes, flush=True)
    results = []
    ways(results, start + args.seconds)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found = {"gpu": torch.cuda.get_device_name(), **versions, "rows": results}
    args.out.write_text(json.dumps(found))
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
