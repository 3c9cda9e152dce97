"""Time the activation over the model shapes as a fraction of the copy floor; check equal bits.

    python benchmarks/tune_activation.py [--shapes …] [--tokens …] [--candidates] [--out FILE]

Prints one line per cell for the heuristic tile (and each candidate with ``--candidates``, which
must have its bits). The floor is every byte that has to move once, at ``--bandwidth`` TB/s.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from samebits.activation import Activation
from samebits.ops.activation import Operands, Wanted
from samebits.ops.activation.kernel import launch_activation_backward, launch_activation_forward
from samebits.ops.activation.tuning import candidates
from samebits.testing.cases import MODELS
from samebits.weights import Layout

GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
HALVES, PAIRS = Layout(), Layout(interleave=1)
# name: activation, layout, row probabilities, bias of each expert.
VARIANTS = {
    "plain": (Activation(), HALVES, False, False),
    "clamped": (Activation(limit=7.0), HALVES, False, False),
    "alpha-offset": (GPT_OSS, HALVES, False, False),
    "interleaved": (Activation(), PAIRS, False, False),
    "interleave-32": (Activation(), Layout(interleave=32), False, False),
    "weighted": (Activation(limit=7.0), HALVES, True, False),
    "gpt-oss": (GPT_OSS, PAIRS, False, True),
    "gpt-oss-weighted": (GPT_OSS, PAIRS, True, True),
}


def operands_of(problem, tokens, probs, bias):
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    rows = tokens * problem.K

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    chosen = torch.randint(0, problem.E, (rows,), device="cuda", generator=generator)
    counts = torch.bincount(chosen, minlength=problem.E)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    operands = Operands(
        z=draw(rows, 2 * problem.F) * 3,
        bias=draw(problem.E, 2 * problem.F) if bias else None,
        offsets=offsets if bias else None,
        row_probs=torch.rand(rows, device="cuda") if probs else None,
    )
    return operands, draw(rows, problem.F)


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def timed(function, moved):
    """Return the median ms of a call in a graph of enough calls to last some milliseconds."""
    function()
    repeats = max(4, int(2e10 / moved))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    graph.replay()
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
    return statistics.median(times)


def measure(shape, tokens, variant, backward, tried, bandwidth):
    activation, layout, probs, bias = VARIANTS[variant]
    operands, dh = operands_of(MODELS[shape], tokens, probs, bias)
    wanted = Wanted(dp=probs, dbias=bias)

    def call(config=None):
        if backward:
            return launch_activation_backward(dh, operands, activation, layout, wanted, config)
        return (launch_activation_forward(operands, activation, layout, config),)

    expected = call()
    moved = nbytes(*operands, *expected) + (nbytes(dh) if backward else 0)
    found = candidates(dh.shape[1], 2, backward=backward) if tried else []
    for config in [None, *found]:
        same = all(a is b or torch.equal(a, b) for a, b in zip(call(config), expected, strict=True))
        ms = timed(lambda config=config: call(config), moved)
        yield {
            "op": "activation", "shape": shape, "T": tokens, "variant": variant,
            "pass": "backward" if backward else "forward", "config": str(config),
            "ms": ms, "floor": moved / (bandwidth * 1e9) / ms, "MB": moved / 1e6, "same_bits": same,
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--candidates", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=4.28)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            for variant in options.variants.split(","):
                for backward in (False, True):
                    for row in measure(
                        shape, tokens, variant, backward, options.candidates, options.bandwidth
                    ):
                        rows.append(row)
                        bits = "" if row["same_bits"] else " OTHER BITS"
                        config = row["config"] if options.candidates else ""
                        print(
                            f"{shape:13} {tokens:6} {variant:17} {row['pass']:8}"
                            f" {row['ms']:8.4f} ms {row['floor']:.2f} of floor{bits} {config}",
                            flush=True,
                        )
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
