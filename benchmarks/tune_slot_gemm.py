"""Time every candidate tile of the projections of single slots; check that all give the same bits.

    python benchmarks/tune_slot_gemm.py --out FILE [--shapes qwen3-30b,mixtral] [--tokens 1,2]

Each launch alone, then both with the second started early or not, beside the sorted path.
Experts are chosen anew for each call of a replay: their weights do not come from the cache.
"""

import argparse
import json
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch
import triton
from layer_cases import sets_of, weights_of
from timing import captured, compile_in_processes, replayed

from samebits.backends import BACKENDS
from samebits.backends.call import Call
from samebits.backends.operator import problem_of
from samebits.backends.options import Options
from samebits.ops.slot_gemm import tuning
from samebits.ops.slot_gemm.kernel import launch_slot_hidden, launch_token_output
from samebits.ops.slot_gemm.tuning import Config, Tiles
from samebits.problem import Problem, ProbPlacement
from samebits.testing.cases import MODELS


def config(block_n, block_k, warps, stages):
    return Config(block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages)


HIDDEN = [config(*shape) for shape in [(128, 128, 4, 4), (128, 128, 8, 4), (64, 128, 2, 6)]]
# By K: so many tiles of weights are loaded side by side.
OUTPUT = {
    8: [
        (16, 128, 2, 5), (16, 128, 4, 5), (16, 128, 4, 6), (16, 64, 2, 9), (16, 64, 4, 9),
        (16, 256, 4, 3), (32, 64, 4, 6), (32, 128, 4, 4),
    ],
    4: [
        (16, 128, 2, 6), (16, 128, 4, 6), (16, 256, 4, 4), (16, 64, 2, 10), (32, 64, 4, 7),
        (32, 128, 4, 4), (32, 128, 4, 6), (64, 64, 4, 5),
    ],
    2: [
        (16, 256, 2, 6), (16, 256, 4, 5), (32, 128, 4, 7), (32, 256, 4, 4), (32, 256, 4, 5),
        (64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 8),
    ],
    1: [(32, 256, 4, 5), (64, 256, 4, 4), (64, 128, 4, 6), (128, 128, 4, 4), (128, 64, 4, 6)],
}  # fmt: skip
OUTPUT = {topk: [config(*shape) for shape in shapes] for topk, shapes in OUTPUT.items()}
PLACEMENT = ProbPlacement.FC2_OUTPUT


def short(c):
    return f"{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages}"


class Case:
    def __init__(self, name, tokens, weights):
        self.problem, self.weights = MODELS[name], weights
        self.sets = sets_of(self.problem, tokens, "uniform")
        self.outs = [torch.empty_like(x) for x, _, _ in self.sets]

    def hidden(self, which, tile, early=False):
        x, ids, probs = self.sets[which]
        return launch_slot_hidden(
            x, ids, self.weights, self.problem.activation, probs, PLACEMENT, tile, early=early
        )

    def output(self, which, h, tiles):
        _, ids, probs = self.sets[which]
        return launch_token_output(
            h, ids, self.weights.down, None, probs, PLACEMENT, self.outs[which], tiles
        )

    def both(self, which, tiles):
        return self.output(which, self.hidden(which, tiles.hidden, tiles.early), tiles)

    def sorted(self, which):
        x, ids, probs = self.sets[which]
        call = Call(x, ids, probs, self.weights.gate_up, self.weights.down, None, None, None, None)
        options = Options(
            self.problem.activation, PLACEMENT, self.problem.layout, None, None, "fused"
        )
        problem = problem_of(options, call, self.problem.experts, 0, grad=False)
        chosen, tuning.heuristic = tuning.heuristic, lambda *_: None
        try:
            return BACKENDS["fused"].forward(problem, call, save=False)[0]
        finally:
            tuning.heuristic = chosen


def measure(name, tokens, weights):
    case = Case(name, tokens, weights)
    problem, sets = case.problem, len(case.sets)
    expected = [case.sorted(which).clone() for which in range(sets)]
    repeats = max(4, min(40, int(3e9 / (tokens * problem.K * 6 * problem.H * problem.F)) // sets))
    slots = tokens * problem.K
    found = []

    def note(stage, what, function, byte, same):
        (ms,) = replayed([captured(function, sets, repeats)], repeats * sets)
        row = {"shape": name, "T": tokens, "stage": stage, "tile": what, "ms": ms}
        found.append(row | {"tbs": byte / ms / 1e9, "same_bits": same})
        return ms

    byte = 2 * slots * problem.H * problem.F
    note("sorted", "", case.sorted, 3 * byte, True)
    reference = [case.hidden(which, HIDDEN[0]).clone() for which in range(sets)]
    best = {}
    for stage, tiles in (("hidden", HIDDEN), ("output", OUTPUT[problem.K])):
        for tile in tiles:
            late = Tiles(tile, tile, early=False)
            if stage == "hidden":
                run = lambda which, tile=tile: case.hidden(which, tile)  # noqa: E731
                wanted, size = reference[0], 2 * byte
            else:
                run = lambda which, late=late: case.output(which, reference[which], late)  # noqa: E731
                wanted, size = expected[0], byte
            try:
                same = bool(torch.equal(run(0), wanted))
                best[note(stage, short(tile), run, size, same)] = (stage, tile)
            except triton.runtime.errors.OutOfResources as error:
                found.append({"shape": name, "T": tokens, "stage": stage, "tile": short(tile),
                              "error": str(error)[:80]})  # fmt: skip
    ranked = [best[ms] for ms in sorted(best)]
    firsts, seconds = ([t for s, t in ranked if s == stage][:2] for stage in ("hidden", "output"))
    for hidden, output, early in product(firsts[:1], seconds, (False, True)):
        tiles = Tiles(hidden, output, early=early)
        run = lambda which, tiles=tiles: case.both(which, tiles)  # noqa: E731
        same = all(bool(torch.equal(run(w), expected[w])) for w in range(sets) for _ in range(5))
        what = f"{short(hidden)} | {short(output)} {'early' if early else 'late'}"
        note("both", what, run, 3 * byte, same)
    return found


def compile_share(index, count):
    """Compile what ``measure`` launches, but for sizes that are known when it runs."""
    # With a tail of every contraction, as gpt-oss has (K = 4), and without.
    for size, topk in ((1024, 8), (1024, 2), (1024, 1), (1088, 4)):
        problem = Problem(H=size, F=size, E=8, K=topk, dtype="bf16")
        weights = weights_of(problem)
        x = torch.zeros(1, size, device="cuda", dtype=torch.bfloat16)
        h = torch.zeros(topk, size, device="cuda", dtype=torch.bfloat16)
        ids, probs = torch.arange(topk, device="cuda")[None], torch.ones(1, topk, device="cuda")
        for tile, early in [*product(HIDDEN + OUTPUT[topk], (False, True))][index::count]:
            with suppress(triton.runtime.errors.OutOfResources):
                if tile in OUTPUT[topk]:
                    tiles = Tiles(tile, tile, early=early)
                    launch_token_output(
                        h, ids, weights.down, None, probs, PLACEMENT, torch.empty_like(x), tiles
                    )
                elif topk > 2:
                    launch_slot_hidden(
                        x, ids, weights, problem.activation, probs, PLACEMENT, tile, early=early
                    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="tune-slot.json")
    parser.add_argument(
        "--shapes", default="qwen3-30b,gpt-oss-120b,llama4-scout,mixtral,deepseek-v3"
    )
    parser.add_argument("--tokens", default="1,2")
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    if arguments.compile_share:
        compile_share(*arguments.compile_share)
        return
    start = time.time()
    codes = compile_in_processes(__file__)
    print("compiled in", round(time.time() - start), "s", codes, flush=True)
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        for name in arguments.shapes.split(","):
            if time.time() - start > arguments.seconds:
                print("out of time before", name, tokens)
                break
            weights = weights_of(MODELS[name])
            found = measure(name, tokens, weights)
            rows += found
            wrong = [(r["stage"], r["tile"]) for r in found if not r.get("same_bits", True)]
            for stage in ("sorted", "hidden", "output", "both"):
                good = sorted(
                    (r for r in found if r["stage"] == stage and "ms" in r), key=lambda r: r["ms"]
                )
                for row in good[:3]:
                    print(
                        f"{name:13} T={tokens} {stage:7}{row['ms']:8.4f} ms {row['tbs']:5.2f} TB/s"
                        f"  {row['tile']}", flush=True,
                    )  # fmt: skip
            if wrong:
                print("OTHER BITS", wrong)
            del weights
            torch.cuda.empty_cache()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"triton": triton.__version__, "rows": rows}
    Path(arguments.out).write_text(json.dumps(about, indent=0) + "\n")
    print("total", round(time.time() - start), "s")


if __name__ == "__main__":
    main()
