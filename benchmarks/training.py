"""Time forward + backward of the layer (dx, dW, dprobs) beside its peers; memory and host time too.

    python benchmarks/training.py --out FILE [--shapes …] [--tokens …] [--routings uniform,half]

Gradients are compared with fp64 first, on one expert and one token. Up to 1024 tokens a step is a
CUDA graph, above it is launched plainly. floor = max(18·R·H·F / 790 TFLOP/s, bytes / 4.3 TB/s):
touched weights read twice and their gradients written, tokens in and out of both passes.
``memory``: peak beyond parameters, gradients and inputs. ``host``: time of a step for which nothing
waits. Routing ``half``: half of all slots on one expert.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from layer import captured, kernel_hash, launched, timed
from layer_cases import BYTES, FLOPS, sets_of, weights_of
from layer_peers import peers_of
from timing import clocks

from samebits import env
from samebits.activation import Activation
from samebits.experts import experts
from samebits.routing import Routing
from samebits.testing.cases import MODELS
from samebits.weights import Layout

HERE = Path(__file__).parent
RECORD = HERE / "peers_training_h200.json"
COMMON = {"torch grouped_mm": "torch_gmm", "transformers grouped_mm": "hf_gmm"}
ROUNDS, STEPS_MS = 5, 8.0


def floor_ms(problem, tokens, sets):
    touched = statistics.mean(int(ids.unique().numel()) for _, ids, _ in sets)
    flop = 18 * tokens * problem.K * problem.H * problem.F
    byte = 2 * (9 * touched * problem.H * problem.F + 4 * tokens * problem.H)
    return max(flop / FLOPS, byte / BYTES) * 1e3


def half_on_one(problem, sets):
    """Return the sets with half of all slots on the last expert."""
    found = []
    for x, ids, probs in sets:
        moved = ids.clone()
        moved[: ids.shape[0] // 2] = problem.E - 1
        found.append((x, moved, probs))
    return found


def step_of(layer, leaves, dout):
    """Return a function of (x, ids, probs) that returns the output and every gradient."""

    def step(x, ids, probs):
        x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        out = layer(x, ids, probs)
        return (out, *torch.autograd.grad(out, [x, probs, *leaves], dout))

    return step


def memory_of(step, values):
    """Return the bytes that a step needs at its peak beyond its inputs and results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step(*values)
    held = sum(r.numel() * r.element_size() for r in results)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - held


def host_ms(step, values):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        step(*values)
    spent = (time.perf_counter() - start) / 3
    torch.cuda.synchronize()
    return spent * 1e3


def check(weights, values, results, dout):
    """Return the errors of gradients of the first token and of its first expert, against fp64."""
    x, ids, probs = values
    _, dx, dprobs, dgate_up, ddown = results[:5]
    expert = int(ids[0, 0])
    token, _ = (ids == expert).nonzero(as_tuple=True)
    rows, p = x[token].double(), probs[ids == expert].double()
    gate_up, down = (w[expert].double() for w in (weights.gate_up, weights.down))
    z = (rows @ gate_up.T).requires_grad_()
    gate, up = z.chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    dh = dout[token].double() @ down
    (dz,) = torch.autograd.grad(h, z, dh * p[:, None])
    h = h.detach()
    exact = {
        "down": (dout[token].double().T @ (h * p[:, None]), ddown[expert]),
        "gate_up": (dz.T @ rows, dgate_up[expert]),
        "probs": ((dh * h).sum(-1), dprobs[ids == expert]),
    }
    whole = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for k in range(ids.shape[1]):
        g, d = (w[ids[0, k]].double() for w in (weights.gate_up, weights.down))
        z = (x[0].double() @ g.T).requires_grad_()
        a, b = z.chunk(2, -1)
        (dz,) = torch.autograd.grad(
            torch.nn.functional.silu(a) * b, z, (dout[0].double() @ d) * probs[0, k].double()
        )
        whole += dz @ g
    exact["x"] = whole, dx[0]
    return {
        name: float((value.detach().double() - wanted).norm() / wanted.norm())
        for name, (wanted, value) in exact.items()
    }


def measure(shape, tokens, routing, options, weights, peers):
    problem = MODELS[shape]
    sets = sets_of(problem, tokens, "uniform" if routing == "half" else routing)
    if routing == "half":
        sets = half_on_one(problem, sets)
    generator = torch.Generator(device="cuda").manual_seed(7)
    dout = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
    leaves = list(weights.named_tensors().values())
    activation = options or problem.activation

    def ours(x, ids, probs):
        return experts(x, Routing(ids, probs, problem.E), weights, activation, backend="fused")

    steps = {"fused": step_of(ours, leaves, dout)}
    for name, (layer, _) in (peers_of(problem, 16384, weights, peers) if peers else {}).items():
        steps[name] = step_of(layer, leaves, dout)
    floor = floor_ms(problem, tokens, sets)
    errors = {}
    for name, step in steps.items():
        results = step(*sets[0])
        if options is None:
            errors[name] = check(weights, sets[0], results, dout)
        del results
    repeats = max(1, min(10, int(STEPS_MS / floor) // len(sets)))
    memory = {name: memory_of(step, sets[0]) for name, step in steps.items()}
    host = {name: host_ms(step, sets[0]) for name, step in steps.items()}
    runs = {}
    for name, step in steps.items():
        graph = tokens <= 1024 and not name.startswith("transformers")
        runs[name] = (captured if graph else launched)(step, sets, repeats)
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(timed(run) / (repeats * len(sets)))
    ms = {name: statistics.median(found) for name, found in times.items()}
    return {
        "shape": shape, "T": tokens, "routing": routing,
        "variant": "plain" if options is None else "gpt-oss",
        "floor_ms": floor, "ms": ms, "memory": memory, "host_ms": host, "error": errors,
    }  # fmt: skip


def recorded(shape, tokens):
    return json.loads(RECORD.read_text())["ms"].get(shape, {}).get(str(tokens), {})


def speed_of_this_machine(rows):
    """Return this run's time over the record's by the common peers."""
    ratios = [
        row["ms"][name] / recorded(row["shape"], row["T"])[other]
        for row in rows
        for name, other in COMMON.items()
        if row["routing"] == "uniform"
        and name in row["ms"]
        and other in recorded(row["shape"], row["T"])
    ]
    return statistics.median(ratios) if ratios else math.nan


def best_peer(row, speed):
    """Return (name, ms) of the fastest peer, recorded ones at this machine's speed."""
    peers = {name: ms for name, ms in row["ms"].items() if name != "fused"}
    if row["routing"] == "uniform":
        factor = 1.0 if math.isnan(speed) else speed
        for name, ms in recorded(row["shape"], row["T"]).items():
            peers[f"{name} (recorded)"] = ms * factor
    return min(peers.items(), key=lambda item: item[1], default=("none", math.nan))


def line(row, speed):
    name, peer = best_peer(row, speed)
    mine = row["ms"]["fused"]
    errors = " ".join(f"{k} {v:.1e}" for k, v in row["error"].get("fused", {}).items())
    others = "  ".join(
        f"{key} {value:.3f} ({row['memory'][key] / 1e9:.2f} GB)" for key, value in row["ms"].items()
    )
    return (
        f"{row['shape']:13} T={row['T']:<6}{row['routing']:8}{row['variant']:8}{mine:9.3f} ms  "
        f"floor {row['floor_ms'] / mine:.2f}  x{mine / peer:.2f} of {name}  "
        f"host {row['host_ms']['fused']:.2f} | {others} | {errors}"
    )


def write(path, rows):
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": env.version_of("triton"), "kernels": kernel_hash(),
        "speed": speed_of_this_machine(rows),
    }  # fmt: skip
    path.write_text(json.dumps(about | {"rows": rows}, indent=0) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="256,1024,4096,16384")
    parser.add_argument("--routings", default="uniform", help="uniform,zipf,half")
    parser.add_argument("--options", action="store_true", help="also gpt-oss' options")
    parser.add_argument("--peers", default="torch", help="torch,transformers,liger; none")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "training.json")
    args = parser.parse_args()
    began, rows = time.time(), []
    print(torch.cuda.get_device_name(), "clocks", clocks(), "kernels", kernel_hash())
    for shape in args.shapes.split(","):
        variants = [None]
        if args.options:
            variants.append(Activation(alpha=1.702, limit=7.0, linear_offset=1.0))
        for options in variants:
            problem = MODELS[shape]
            if options is not None:
                problem = replace(
                    problem, layout=Layout(interleave=1), gate_up_bias="bf16", down_bias="bf16"
                )
            weights = weights_of(problem).map(lambda t: t.requires_grad_())
            for tokens in map(int, args.tokens.split(",")):
                for routing in args.routings.split(","):
                    peers = [] if options or routing != "uniform" else args.peers.split(",")
                    row = measure(shape, tokens, routing, options, weights, peers)
                    rows.append(row)
                    write(args.out, rows)
                    print(line(row, speed_of_this_machine(rows)), flush=True)
            del weights
            torch.cuda.empty_cache()
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
