"""Time every candidate tile of the backward's products, check that all give the same bits.

    python benchmarks/tune_backward.py --out FILE [--shapes qwen3-30b,mixtral] [--tokens 256,4096]

Stages: ``hidden`` (product with down, derivative behind it), ``input`` (dz · gate_up), ``down`` and
``gate_up`` (weight gradients), ``first`` (the forward's first projection, which stores z). A
candidate enters a tuning table only from here.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import triton
from backward_candidates import HIDDEN, candidates
from timing import captured, compile_in_processes, replayed
from tune_indirect_gemm import weights_of

from samebits.activation import Activation
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
        self.dz, self.h, _ = self.run("hidden", HIDDEN[0])
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
        how = "".join(f" {k}" for k in ("tma", "stored") if getattr(c, k))
        return f"{tile} g{c.group} p{c.programs}{how}"
    form = "swap" if c.swap else "rows"
    tile = f"{c.block_r}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages} g{c.group}"
    return f"{form} {tile}"


def measure(name, tokens, weights):
    problem = MODELS[name]
    case = Case(problem, tokens, weights)
    results = []
    for stage in STAGES:
        width = 2 * problem.F if stage in ("input", "gate_up", "first") else problem.F
        flop = 2 * case.total * problem.H * width
        byte = 2 * case.touched * problem.H * width
        found = candidates(stage, case.total / problem.E)
        expected = None
        for config in found:
            about = {"shape": name, "T": tokens, "stage": stage, "config": repr(config)}
            repeats = min(max(1, int(1e12 / max(flop, byte * 150))), 20)
            try:
                value = [v.clone() for v in case.run(stage, config)]
                run = lambda _, c=config, s=stage: case.run(s, c)  # noqa: E731
                (ms,) = replayed([captured(run, 1, repeats)], repeats)
                again = case.run(stage, config)
            except triton.runtime.errors.OutOfResources as error:
                results.append({**about, "error": str(error)[:120]})
                continue
            expected = expected or value
            same = all(
                torch.equal(a, b) and torch.equal(c, b)
                for a, b, c in zip(value, expected, again, strict=True)
            )
            speed = {"tflops": flop / ms / 1e9, "tbs": byte / ms / 1e9}
            results.append({**about, **speed, "short": short(config), "ms": ms, "same_bits": same})
    return results


def compile_share(index, count):
    problem = MODELS["qwen3-30b"]
    weights = weights_of(problem)
    case = Case(problem, 64, weights)
    every = [
        (s, c) for s in STAGES for c in dict.fromkeys((*candidates(s, 100), *candidates(s, 1)))
    ]
    for stage, config in every[index::count]:
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
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    STAGES[:] = args.stages.split(",")
    if args.compile_share:
        compile_share(*args.compile_share)
        return
    start = time.time()
    codes = compile_in_processes(__file__, "--stages", args.stages)
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
            for stage in STAGES:
                good = sorted(
                    (r for r in rows_ if r["stage"] == stage and "ms" in r), key=lambda r: r["ms"]
                )
                bad = [r["short"] for r in good if not r["same_bits"]]
                best = good[0]
                print(
                    f"{name:13} T={tokens:<6}{stage:8}{best['ms']:8.4f} ms "
                    f"{best['tflops']:5.0f} TF "
                    f"{best['tbs']:5.2f} TB/s  {best['short']}  | "
                    + " | ".join(f"{r['ms'] / best['ms']:.2f} {r['short']}" for r in good[1:3])
                    + (f"  OTHER BITS {len(bad)}: {bad[:3]}" if bad else ""),
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
