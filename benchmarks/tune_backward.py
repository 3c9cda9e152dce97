"""Time every candidate tile of the backward's products, check that all give the same bits.

    python benchmarks/tune_backward.py --out FILE [--shapes qwen3-30b,mixtral] [--tokens 256,4096]

Stages: ``hidden`` (product with down, derivative behind it), ``input`` (dz · gate_up), ``down`` and
``gate_up`` (weight gradients), ``first`` (the forward's first projection, which stores z). A
candidate enters a tuning table only from here. ``--specialized`` times tiles of specialised warps
beside the tile of the other kernel, for ``down`` and ``gate_up``.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path

import torch
import triton
from backward_candidates import candidates, specialized
from layer import kernel_hash
from timing import captured, compile_in_processes, replayed
from tune_indirect_gemm import weights_of

from samebits.activation import Activation
from samebits.ops.hidden_gradient import tuning as hidden_tuning
from samebits.ops.hidden_gradient.kernel import launch_hidden_gradient
from samebits.ops.indirect_gemm.kernel import launch_first_projection, launch_second_projection
from samebits.ops.permute.kernel import launch_metadata, launch_permute, launch_tiles
from samebits.ops.weight_gradient.kernel import launch_order, launch_weight_gradient
from samebits.ops.weight_gradient.tuning import Config as Outer
from samebits.testing.cases import MODELS
from samebits.weights import Layout

ACTIVATION = Activation()


class Case:
    """One step of training; ``run(stage, config)`` returns what the stage writes."""

    def __init__(self, problem, tokens, weights):
        self.problem, self.weights = problem, weights
        generator = torch.Generator(device="cuda").manual_seed(tokens)

        def draw(*shape):
            return torch.randn(shape, device="cuda", generator=generator).bfloat16()

        scores = torch.rand(tokens, problem.E, device="cuda", generator=generator)
        self.ids = scores.topk(problem.K).indices
        self.total = self.ids.numel()
        self.probs = torch.rand(tokens, problem.K, device="cuda", generator=generator)
        meta = launch_metadata(self.ids, problem.E, 128)
        self.slots, self.offsets, self.order = meta.slots, meta.offsets, launch_order(meta.offsets)
        self.touched = int((meta.offsets.diff() > 0).sum())
        self.dy = launch_permute(draw(tokens, problem.H), meta.inverse, problem.K, None)
        self.x = launch_permute(draw(tokens, problem.H), meta.inverse, problem.K, None)
        self.z = torch.empty(self.total, 2 * problem.F, device="cuda", dtype=torch.bfloat16)
        self.z.normal_(generator=generator)
        self.tables = {}
        first = hidden_tuning.heuristic(self.total, problem.E, "sm_90")
        self.dz, self.h, _ = self.run("hidden", first)
        self.grads = {
            name: torch.empty_like(getattr(weights, name)) for name in ("down", "gate_up")
        }

    def run(self, stage, config):
        if stage in ("down", "gate_up"):
            a, b = (self.dy, self.h) if stage == "down" else (self.dz, self.x)
            grad = self.grads[stage]
            return (launch_weight_gradient(a, b, self.offsets, self.order, grad, config),)
        block_r = config.block_r
        if block_r not in self.tables:
            self.tables[block_r] = launch_tiles(self.offsets, self.total, block_r)
        table = self.tables[block_r]
        if stage == "hidden":
            return launch_hidden_gradient(
                self.dy, self.weights.down, self.z, self.slots, table, self.probs, ACTIVATION,
                Layout(), config, topk=self.problem.K, gather=False,
                want_dz=True, want_h=True, want_partial=True,
            )  # fmt: skip
        if stage == "first":
            return launch_first_projection(
                self.x, self.slots, table, self.weights, ACTIVATION, None, config,
                topk=self.problem.K, gather=False, save=True,
            )  # fmt: skip
        matrices = self.weights.gate_up.transpose(1, 2)
        return (launch_second_projection(self.dz, self.slots, table, matrices, None, None, config),)


STAGES = ["hidden", "input", "down", "gate_up", "first"]


def short(c):
    if isinstance(c, Outer):
        tile = f"{c.block_m}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages}"
        if c.specialized is not None:
            s = c.specialized
            tile = f"{s.block_m}x{s.block_n}x{s.block_k} s{s.num_stages}"
            return f"specialized {tile} g{s.group} p{s.programs}"
        how = "".join(f" {k}" for k in ("tma", "stored") if getattr(c, k))
        return f"{tile} g{c.group} p{c.programs}{how}"
    form = "swap" if c.swap else "rows"
    tile = f"{c.block_r}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages} g{c.group}"
    return f"{form} {tile} short {c.short}"


def judged(stage, problem, slots, *, only_specialized):
    if only_specialized:
        return specialized(slots, problem.E)
    return candidates(stage, slots / problem.E)


def measure(name, tokens, weights, *, only_specialized):
    problem = MODELS[name]
    case = Case(problem, tokens, weights)
    results = []
    for stage in STAGES:
        width = 2 * problem.F if stage in ("input", "gate_up", "first") else problem.F
        flop = 2 * case.total * problem.H * width
        byte = 2 * case.touched * problem.H * width
        repeats = min(max(1, int(1e12 / max(flop, byte * 150))), 20)
        # Nothing reads what a graph writes.
        timed, pool = [], torch.cuda.graph_pool_handle()
        expected = None
        for config in judged(stage, problem, case.total, only_specialized=only_specialized):
            row = {"shape": name, "T": tokens, "stage": stage, "config": repr(config)}
            results.append(row)
            try:
                value = [v.clone() for v in case.run(stage, config)]
            except triton.runtime.errors.OutOfResources as error:
                row["error"] = str(error)[:120]
                continue
            run = lambda _, c=config, s=stage: case.run(s, c)  # noqa: E731
            graph = captured(run, 1, repeats, pool)
            again = case.run(stage, config)
            expected = expected or value
            same = all(
                torch.equal(a, b) and torch.equal(c, b)
                for a, b, c in zip(value, expected, again, strict=True)
            )
            row |= {"short": short(config), "same_bits": same}
            timed.append((row, graph))
        # Small differences are to be seen: one round after the other, each with every tile.
        times = replayed([graph for _, graph in timed], repeats)
        for (row, _), ms in zip(timed, times, strict=True):
            row |= {"ms": ms, "tflops": flop / ms / 1e9, "tbs": byte / ms / 1e9}
    return results


def compile_share(index, count, args):
    """Compile every ``count``-th binary: they differ by tile, not by shape."""
    problem = MODELS["qwen3-30b"]
    weights = weights_of(problem)
    case = Case(problem, 64, weights)
    cells = product(map(MODELS.get, args.shapes.split(",")), map(int, args.tokens.split(",")))
    slots = [(cell, tokens * cell.K) for cell, tokens in cells]
    every = [
        (stage, config)
        for stage in STAGES
        for cell, total in slots
        for config in judged(stage, cell, total, only_specialized=args.specialized)
    ]
    for stage, config in list(dict.fromkeys(every))[index::count]:
        try:
            case.run(stage, config)
        except triton.runtime.errors.OutOfResources:
            continue


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune_backward.json")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="256,1024,4096,16384")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--specialized", action="store_true", help="of weight gradients, only")
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    STAGES[:] = ["down", "gate_up"] if args.specialized else args.stages.split(",")
    if args.compile_share:
        compile_share(*args.compile_share, args)
        return
    command = " ".join(["python benchmarks/tune_backward.py", *sys.argv[1:]])
    start = time.time()
    codes = compile_in_processes(__file__, *sys.argv[1:])
    print("compiled in", round(time.time() - start), "s", codes, flush=True)
    results = []
    for name in args.shapes.split(","):
        weights = weights_of(MODELS[name])
        for tokens in map(int, args.tokens.split(",")):
            if time.time() - start > args.seconds:
                print("out of time before", name, tokens)
                break
            rows_ = measure(name, tokens, weights, only_specialized=args.specialized)
            results += rows_
            for stage in STAGES:
                found = [r for r in rows_ if r["stage"] == stage and "ms" in r]
                bad = [r["short"] for r in found if not r["same_bits"]]
                # All over the other kernel, or the best three.
                ordered = sorted(found, key=lambda r: r["ms"])[:3]
                first, *others = found if args.specialized else ordered
                print(
                    f"{name:13} T={tokens:<6}{stage:8}{first['ms']:8.4f} ms "
                    f"{first['tflops']:5.0f} TF "
                    f"{first['tbs']:5.2f} TB/s  {first['short']}  | "
                    + " | ".join(f"{r['ms'] / first['ms']:.3f} {r['short']}" for r in others)
                    + (f"  OTHER BITS {len(bad)}: {bad[:3]}" if bad else ""),
                    flush=True,
                )
            found = {
                "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                "triton": triton.__version__, "kernels": kernel_hash(), "command": command,
                "rows": results,
            }  # fmt: skip
            Path(args.out).write_text(json.dumps(found))
        del weights
        torch.cuda.empty_cache()
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
