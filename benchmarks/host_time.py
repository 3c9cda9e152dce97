"""Time what a plain eager call costs the host, and where: no CUDA graph, no waiting for the device.

    python benchmarks/host_time.py [--shape qwen3-30b] [--tokens 1,16] [--out FILE]

Each figure is the median over blocks of 50 calls of the time until the calls return; the device is
waited for between blocks, so that its queue never fills. ``repeated`` is a call whose kind is
known, ``first`` one that takes the long way (nothing kept); the rest are the parts of both.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from layer_cases import sets_of, weights_of

from samebits import env
from samebits.backends import BACKENDS, choose, repetition
from samebits.backends.call import Call
from samebits.backends.differentiable import run
from samebits.backends.operator import problem_of
from samebits.backends.options import Options
from samebits.experts import checked, experts
from samebits.ops.activation.kernel import launch_activation_forward
from samebits.ops.activation.operands import Operands
from samebits.ops.indirect_gemm.kernel import launch_first_projection, launch_second_projection
from samebits.ops.indirect_gemm.tuning import heuristic
from samebits.ops.permute.kernel import launch_combine, launch_metadata
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.testing.cases import MODELS

BLOCKS, CALLS = 21, 50


def microseconds(function):
    """Return the host's time per call."""
    for _ in range(20):
        function()
    times = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def parts_of(problem, tokens, weights, backend):
    """Return {part: function}."""
    x, ids, probs = sets_of(problem, tokens, "uniform")[0]
    routing = Routing(ids, probs, problem.experts)
    request = repetition.Request(
        x, routing, weights, problem.activation, problem.placement, backend, 0, None, None, None
    )
    kind = repetition.kind_of(request)
    arguments = {
        "placement": ProbPlacement.FC2_OUTPUT, "backend": backend, "expert_start": 0,
        "out_dtype": None, "num_valid_tokens": None,
    }  # fmt: skip
    call = Call(x, ids, probs, weights.gate_up, weights.down, None, None, None, None)
    options = Options(problem.activation, problem.placement, problem.layout, None, None, backend)
    known = problem_of(options, call, problem.experts, 0, grad=False)
    first, second = heuristic(ids.numel(), problem.E, known.device)
    metadata = launch_metadata(ids, problem.E, first.block_r)
    out = torch.empty_like(x)

    def project():
        return launch_first_projection(
            x, metadata.slots, metadata.tiles, weights, problem.activation, None, first,
            topk=problem.K, gather=True, save=False,
        )[0]  # fmt: skip

    h = project()
    y = launch_second_projection(
        h, metadata.slots, metadata.tiles, weights.down, None, None, second
    )
    z = y.new_zeros(h.shape[0], 2 * problem.F)
    return {
        "repeated": lambda: experts(x, routing, weights, problem.activation, backend=backend),
        "repeated, out": lambda: experts(
            x, routing, weights, problem.activation, backend=backend, out=out
        ),
        "  kind": lambda: repetition.kind_of(request),
        "  launches": lambda: repetition.repeat(kind, request),
        "first": lambda: run(*checked(x, routing, weights, problem.activation, **arguments), 0),
        "  checks": lambda: checked(x, routing, weights, problem.activation, **arguments),
        "  operator": lambda: run(call, options, problem.experts, 0),
        "  backend": lambda: BACKENDS[backend].forward(known, call, save=False),
        "    choose": lambda: choose(backend, known),
        "    problem": lambda: problem_of(options, call, problem.experts, 0, grad=False),
        "    metadata": lambda: launch_metadata(ids, problem.E, first.block_r),
        "    first projection": project,
        "    second projection": lambda: launch_second_projection(
            h, metadata.slots, metadata.tiles, weights.down, None, None, second
        ),
        "    activation": lambda: launch_activation_forward(
            Operands(z), problem.activation, problem.layout
        ),
        "    combine": lambda: launch_combine(y, metadata.inverse, problem.K, probs, x.dtype),
        "torch.empty": lambda: torch.empty(8, 8, device=x.device),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b", choices=MODELS)
    parser.add_argument("--tokens", default="1,16")
    parser.add_argument("--backend", default="fused", choices=("fused", "grouped"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    problem = MODELS[options.shape]
    rows = []
    with torch.no_grad():
        weights = weights_of(problem)
        for tokens in map(int, options.tokens.split(",")):
            parts = parts_of(problem, tokens, weights, options.backend)
            parts["repeated"]()
            kept = [plan is not None for plan in repetition.plans()]
            print(f"\n{options.shape} T={tokens} {options.backend}: calls kept {kept}")
            found = {name: microseconds(function) for name, function in parts.items()}
            rows.append({"T": tokens, "kept": kept, "us": found})
            for name, value in found.items():
                print(f"{name:24}{value:8.1f} µs", flush=True)
    if options.out:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        about |= {"triton": env.version_of("triton"), "shape": options.shape}
        options.out.write_text(json.dumps(about | {"rows": rows}, indent=0) + "\n")


if __name__ == "__main__":
    main()
