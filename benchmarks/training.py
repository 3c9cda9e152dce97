"""Time forward + backward of the layer (dx, dW, dprobs) beside its peers; memory and host time too.

    python benchmarks/training.py --out FILE [--shapes …] [--tokens …] [--routings uniform,half]

Gradients are compared with fp64 first, on one expert and one token. Up to 1024 tokens a step is a
CUDA graph, above it is launched plainly. floor = max(18·R·H·F / 790 TFLOP/s, bytes / 4.3 TB/s):
touched weights read twice and their gradients written, tokens in and out of both passes.
``memory``: peak beyond parameters, gradients and inputs. ``host``: time of a step for which nothing
waits. Routing ``half``: half of all slots on one expert; ``one``: every token's first choice is.
Routings other than uniform, gpt-oss' options (``--options``) and ``recompute=True``
(``--recompute``) are timed last, for ``--extra-shapes`` and ``--extra-tokens``. Without peers of
this run, recorded ones count at their own machine's speed. ``--kernels`` adds each kernel's time in
a step. The file is written after every cell; no cell starts after ``--seconds``.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from layer import captured, kernel_hash, launched, timed
from layer_cases import sets_of, weights_of
from timing import clocks, compile_in_processes
from training_peers import FAULTS, RECORDED, peers_of
from training_steps import (
    check,
    compile_pass,
    floor_ms,
    half_on_one,
    host_ms,
    host_parts,
    kernels_of,
    memory_of,
    step_of,
)

from samebits import env
from samebits.activation import Activation
from samebits.backends import passes
from samebits.experts import experts
from samebits.routing import Routing
from samebits.testing.cases import MODELS
from samebits.weights import Layout

HERE = Path(__file__).parent
RECORD = HERE / "peers_training_h200.json"
ROUNDS, STEPS_MS = 5, 8.0
OPTIONS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)


def problem_of(shape, options):
    """Return the problem of a cell; with ``options`` one with gpt-oss' layout and biases."""
    problem = MODELS[shape]
    if options is None:
        return problem
    layout = Layout(interleave=1)
    return replace(
        problem, layout=layout, gate_up_bias="bf16", down_bias="bf16", activation=options
    )


def measure(shape, tokens, routing, variant, weights, peers, *, checked, kernels):
    options = OPTIONS if variant == "gpt-oss" else None
    problem = problem_of(shape, options)
    sets = sets_of(problem, tokens, "uniform" if routing == "half" else routing)
    if routing == "half":
        sets = half_on_one(problem, sets)
    generator = torch.Generator(device="cuda").manual_seed(7)
    dout = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
    leaves = list(weights.named_tensors().values())

    def ours(x, ids, probs):
        routing, recompute = Routing(ids, probs, problem.E), variant == "recompute"
        activation = problem.activation
        return experts(x, routing, weights, activation, backend="fused", recompute=recompute)

    layers = {"fused": ours} | (peers_of(problem, weights, peers) if peers else {})
    floor = floor_ms(problem, tokens, sets)
    repeats = max(1, min(10, int(STEPS_MS / floor) // len(sets)))
    calls = max(5, min(20, int(100 / floor)))
    errors, memory, host, runs, steps, failed = {}, {}, {}, {}, {}, {}
    passes.forget()
    for name, layer in layers.items():
        step = step_of(layer, leaves, dout)
        try:
            results = step(*sets[0])
            if options is None and checked:
                errors[name] = check(weights, sets[0], results, dout)
            del results
            memory[name] = memory_of(step, sets[0])
            host[name] = host_ms(step, sets[0], calls)
            # Peers with a host sync, or that choose tiles in a call, cannot be captured.
            graph = tokens <= 1024 and name in ("fused", "torch grouped_mm")
            runs[name] = (captured if graph else launched)(step, sets, repeats)
            runs[name]()
        except FAULTS as error:
            if name == "fused":
                raise
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            runs.pop(name, None)
            torch.cuda.empty_cache()
            continue
        steps[name] = step
    long_ways = [why for why in passes.passes() if isinstance(why, str)]
    parts = host_parts(ours, leaves, sets[0], dout)
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(timed(run) / (repeats * len(sets)))
    ms = {name: statistics.median(found) for name, found in times.items()}
    row = {
        "shape": shape, "T": tokens, "routing": routing, "variant": variant,
        "floor_ms": floor, "ms": ms, "memory": {n: memory[n] for n in ms},
        "host_ms": {n: host[n] for n in ms}, "host_parts": parts, "long_ways": long_ways,
        "error": errors, "failed": failed,
    }  # fmt: skip
    if kernels:
        row["kernels"] = {name: kernels_of(step, sets[0]) for name, step in steps.items()}
    return row


def recorded(shape, tokens):
    return json.loads(RECORD.read_text())["ms"].get(shape, {}).get(str(tokens), {})


def speed_of_this_machine(rows):
    """Return this run's time over the record's by the common peers."""
    ratios = [
        row["ms"][name] / recorded(row["shape"], row["T"])[other]
        for row in rows
        for name, other in RECORDED.items()
        if row["routing"] == "uniform"
        and row["variant"] == "plain"
        and name in row["ms"]
        and other in recorded(row["shape"], row["T"])
    ]
    return statistics.median(ratios) if ratios else math.nan


def best_peer(row, speed):
    """Return (name, ms) of the fastest peer, recorded ones at this machine's speed."""
    peers = {name: ms for name, ms in row["ms"].items() if name != "fused"}
    ran = {RECORDED.get(name) for name in peers}
    if row["routing"] == "uniform" and row["variant"] == "plain":
        factor = 1.0 if math.isnan(speed) else speed
        for name, ms in recorded(row["shape"], row["T"]).items():
            if name not in ran:
                peers[f"{name} (recorded)"] = ms * factor
    return min(peers.items(), key=lambda item: item[1], default=("none", math.nan))


def line(row, speed):
    name, peer = best_peer(row, speed)
    mine = row["ms"]["fused"]
    errors = " ".join(f"{k} {v:.1e}" for k, v in row["error"].get("fused", {}).items())
    others = "  ".join(
        f"{key} {value:.3f} ({row['memory'][key] / 1e9:.2f} GB)" for key, value in row["ms"].items()
    )
    related = f"over plain {row['over_plain']:.3f} " if "over_plain" in row else ""
    related += f"LONG WAY {row['long_ways']} " if row["long_ways"] else ""
    related += " ".join(f"no {name}: {why[:80]}" for name, why in row["failed"].items())
    return (
        f"{row['shape']:13} T={row['T']:<6}{row['routing']:8}{row['variant']:10}{mine:9.3f} ms  "
        f"floor {row['floor_ms'] / mine:.2f}  x{mine / peer:.2f} of {name}  "
        f"host {row['host_ms']['fused']:.2f} {related}| {others} | {errors}"
    )


def write(path, rows):
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": env.version_of("triton"), "kernels": kernel_hash(),
        "speed": speed_of_this_machine(rows),
    }  # fmt: skip
    path.write_text(json.dumps(about | {"rows": rows}, indent=0) + "\n")


def cells_of(args):
    """Return (shape, routing, variant, tokens) of every cell, those with peers first."""
    tokens = [int(count) for count in args.tokens.split(",")]
    found = [(s, "uniform", "plain", t) for s, t in product(args.shapes.split(","), tokens)]
    extras = [(routing, "plain") for routing in args.routings.split(",") if routing != "uniform"]
    extras += [("uniform", "recompute")] if args.recompute else []
    extras += [("uniform", "gpt-oss")] if args.options else []
    shapes, tokens = args.extra_shapes.split(","), map(int, args.extra_tokens.split(","))
    return found + [(s, *extra, t) for s, t, extra in product(shapes, tokens, extras)]


def relate(row, rows):
    """Add how much longer than the plain step with uniform routing a row took."""
    same = {"shape": row["shape"], "T": row["T"], "routing": "uniform", "variant": "plain"}
    plain = [r for r in rows if r is not row and all(r[k] == v for k, v in same.items())]
    if plain:
        row["over_plain"] = row["ms"]["fused"] / plain[0]["ms"]["fused"]


def compile_share(index, count, args):
    """Compile every ``count``-th pass of the cells."""
    kinds = {(s, t, OPTIONS if v == "gpt-oss" else None) for s, _, v, t in cells_of(args)}
    passes = sorted(product(kinds, (False, True)), key=lambda one: (not one[1], str(one)))
    for (shape, tokens, options), backward in passes[index::count]:
        compile_pass(replace(problem_of(shape, options), grad=True), tokens, backward=backward)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="256,1024,4096,16384")
    parser.add_argument("--extra-shapes", default=",".join(MODELS))
    parser.add_argument("--extra-tokens", default="4096")
    parser.add_argument("--routings", default="uniform", help="uniform,zipf,half,one")
    parser.add_argument("--options", action="store_true", help="also gpt-oss' options")
    parser.add_argument("--recompute", action="store_true", help="also recompute=True")
    names = "torch,transformers,liger,sonic,megatron; none"
    parser.add_argument("--peers", default="torch", help=names)
    parser.add_argument("--kernels", action="store_true", help="each kernel's time in a step")
    parser.add_argument("--unchecked", action="store_true", help="tests have checked gradients")
    parser.add_argument("--seconds", type=float, default=600, help="start no cell after these")
    parser.add_argument("--compile-share", nargs=2, type=int)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "training.json")
    args = parser.parse_args()
    if args.compile_share:
        compile_share(*args.compile_share, args)
        return
    began, rows = time.time(), []
    codes = compile_in_processes(__file__, *sys.argv[1:])
    print("compiled in", round(time.time() - began), "s", codes)
    print(torch.cuda.get_device_name(), "clocks", clocks(), "kernels", kernel_hash())
    held, weights = None, None
    for shape, routing, variant, tokens in cells_of(args):
        if time.time() - began > args.seconds:
            print("out of time before", shape, routing, variant, tokens)
            continue
        options = OPTIONS if variant == "gpt-oss" else None
        if held != (shape, options):
            held, weights = (shape, options), None
            torch.cuda.empty_cache()
            weights = weights_of(problem_of(*held)).map(lambda t: t.requires_grad_())
        plain = variant == "plain" and routing == "uniform"
        peers = args.peers.split(",") if plain else []
        checked = not args.unchecked
        row = measure(
            shape, tokens, routing, variant, weights, peers,
            checked=checked, kernels=args.kernels,
        )  # fmt: skip
        relate(row, rows)
        rows.append(row)
        write(args.out, rows)
        print(line(row, speed_of_this_machine(rows)), flush=True)
        for name, kernels in row.get("kernels", {}).items():
            print(f"  {name}: " + "; ".join(f"{k[:40]} {ms:.3f}" for k, (ms, _) in kernels.items()))
    speed = speed_of_this_machine(rows)
    plain = [r for r in rows if r["routing"] == "uniform" and r["variant"] == "plain"]

    def mean(values):
        return math.exp(statistics.mean(map(math.log, values)))

    print(f"this machine over that of the recorded peers: {speed:.3f}")
    print(f"fraction of floor {mean([r['floor_ms'] / r['ms']['fused'] for r in plain]):.3f}")
    ratios = [r["ms"]["fused"] / best_peer(r, speed)[1] for r in plain]
    print(f"over the best peer {mean(ratios):.3f}, worst {max(ratios):.2f}")
    print(f"{round(time.time() - began)} s; rows in {args.out}")


if __name__ == "__main__":
    main()
