"""Time the whole layer, forward, over the model shapes; print ms and the fraction of the floor.

    python benchmarks/layer.py --out results.json [--shapes …] [--tokens 1,16,…] [--stages]

Times are medians of CUDA-graph replays that rotate through several routings, so that few-token
weights do not come from the cache. floor = max(FLOP / 790 TFLOP/s, bytes / 4.3 TB/s), bytes =
weights of touched experts once + activations once. Peer: sort + torch grouped_mm + compiled SwiGLU.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import triton

from samebits.experts import experts
from samebits.routing import Routing
from samebits.testing.cases import MODELS
from samebits.weights import ExpertWeights

FLOPS, BYTES = 790e12, 4.3e12


def weights_of(problem):
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape, scale):
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return out.normal_(0, scale, generator=generator)

    return ExpertWeights(
        gate_up=draw(problem.E, 2 * problem.F, problem.H, scale=problem.H**-0.5),
        down=draw(problem.E, problem.H, problem.F, scale=problem.F**-0.5),
    )


@torch.compile(dynamic=True)
def _swiglu(z):
    gate, up = z.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(z.dtype)


def grouped_mm_layer(x, ids, probs, weights):
    topk = ids.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.zeros(weights.down.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, ids.reshape(-1), torch.ones_like(ids.reshape(-1), dtype=torch.int32))
    offsets = counts.cumsum(0, dtype=torch.int32)
    mm = torch.nn.functional.grouped_mm
    z = mm(x[order // topk], weights.gate_up.transpose(1, 2), offs=offsets)
    y = mm(_swiglu(z), weights.down.transpose(1, 2), offs=offsets)
    places = torch.arange(order.numel(), device=x.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    return (y[inverse].view(-1, topk, x.shape[1]).float() * probs[..., None]).sum(1).to(x.dtype)


def sets_of(problem, tokens, count):
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    sets = []
    for _ in range(count):
        scores = torch.rand(tokens, problem.E, device="cuda", generator=generator)
        ids = scores.topk(problem.K).indices
        probs = torch.rand(tokens, problem.K, device="cuda", generator=generator)
        x = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
        sets.append((x, ids, probs))
    return sets


def capture(function, sets, repeats):
    for values in sets:
        function(*values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for values in sets:
                function(*values)
    return graph


def replay_ms(graph, calls):
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def measure(name, tokens, weights, peers):
    problem = MODELS[name]
    sets = sets_of(problem, tokens, 4 if tokens <= 1024 else 1)
    touched = statistics.mean(int(ids.unique().numel()) for _, ids, _ in sets)
    flop = 6 * tokens * problem.K * problem.H * problem.F
    byte = 2 * (3 * touched * problem.H * problem.F + 2 * tokens * problem.H)
    floor = max(flop / FLOPS, byte / BYTES) * 1e3
    repeats = max(1, min(25, int(4.0 / floor) // len(sets)))
    layers = {
        "samebits": lambda x, ids, probs: experts(
            x, Routing(ids, probs, problem.experts), weights, problem.activation, backend="fused"
        )
    }
    if peers:
        layers["torch grouped_mm"] = lambda x, ids, probs: grouped_mm_layer(x, ids, probs, weights)
    graphs = {key: capture(layer, sets, repeats) for key, layer in layers.items()}
    times = {key: [] for key in graphs}
    for _ in range(5):
        for key, graph in graphs.items():
            times[key].append(replay_ms(graph, repeats * len(sets)))
    ms = {key: statistics.median(values) for key, values in times.items()}
    fraction = floor / ms["samebits"]
    return {"shape": name, "T": tokens, "floor_ms": floor, "ms": ms, "fraction": fraction}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="layer.json")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096,16384")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for name in args.shapes.split(","):
            weights = weights_of(MODELS[name])
            for tokens in map(int, args.tokens.split(",")):
                row = measure(name, tokens, weights, not args.no_peers)
                rows.append(row)
                times = "  ".join(f"{key} {ms:8.4f}" for key, ms in row["ms"].items())
                print(f"{name:13} T={tokens:<6} floor {row['floor_ms']:8.4f}  {times}", end="  ")
                print(f"fraction {row['fraction']:.2f}", flush=True)
            del weights
            torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    meta = {"gpu": torch.cuda.get_device_name(), **versions}
    Path(args.out).write_text(json.dumps(meta | {"rows": rows}))
    fractions = torch.tensor([row["fraction"] for row in rows]).log()
    print("geometric mean of the fraction of floor", round(float(fractions.mean().exp()), 3))


if __name__ == "__main__":
    main()
