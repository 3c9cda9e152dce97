"""Check and time the layer over ranks; started by torchrun, on GPUs (NCCL) or on CPU (gloo).

    torchrun --nproc-per-node 2 benchmarks/parallel.py --out FOLDER [--cells qwen3-30b:4096,…]
        [--transports torch,window] [--check all|few|none] [--brief] [--profile]

First every rank compares the layer over ranks with the one-rank run, bit by bit. Then, per cell and
for the forward and for forward + backward (``step``): ``layer``, the layer over ranks; ``varied``,
the same with another routing at each call;
``compute``, the experts of one rank on the rows that it got, without any exchange; ``exchange``,
the all-to-alls alone, with the same sizes; ``ratio``, layer / (compute + exchange), of which the
target is 1.15. Milliseconds, the slowest rank. ``in_turn``: with a shared expert after the layer;
``beside``: with it on a second stream. ``fixed``: with a capacity. ``--brief`` leaves these three
out. ``--profile`` says instead where
the time of each cell goes (``parallel_profile``). Ends 1 if bits differ.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_cells import time_cell, warm_cell
from parallel_profile import lines_of, profile_cell

from samebits import ExpertWeights, Layout, ProbPlacement, Routing, env
from samebits.parallel import parallel_experts

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests/parallel"))
import rank_programs as programs  # noqa: E402  found by the line above
from tensor_programs import run as run_cut  # noqa: E402
from tensor_programs import tensor_bits  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


def check_cases(size, place):
    """Return the cases of the bitwise check; each compiles kernels of its own on a GPU."""
    if place == "cpu":
        return [programs.Case(tokens=(4,) * size, bounds=tuple(3 * r for r in range(size + 1)))]
    tokens = (300, 7, 64, 0, 1, 129, 33, 2)[:size]
    bounds = tuple([0, 3, 8, 12, 13, 17, 21, 25, 29][: size + 1])
    sizes = {"tokens": tokens, "bounds": bounds, "hidden": 256, "columns": 192}
    made = [
        programs.Case(**sizes, placement=placement, dtype=dtype, backend=backend)
        for placement, (dtype, backend) in product(
            ProbPlacement, [(BF16, "fused"), (BF16, "grouped"), (FP32, "fused")]
        )
    ]
    made.append(programs.Case(**sizes, dtype=torch.float16, backend="fused"))
    made.append(programs.Case(**sizes, dtype=BF16, backend="fused", out_dtype=FP32))
    made.append(programs.Case(**sizes, dtype=BF16, backend="fused", ids=0))
    return made


def cut_cases(cases, size):
    """Return cases of tensor parallelism: each rank holds a part of each expert."""
    return [(replace(case, columns=128 * size), Layout()) for case in cases[:9:3]]


def with_capacity(cases):
    return [replace(c, capacity=max(c.tokens) * c.topk) for c in cases]


def of_one(case):
    """Return ``case`` with everything on one rank: what is compiled is the same."""
    return replace(case, tokens=(case.total,), bounds=(0, case.num_experts))


def captured_bits(group, device):
    """Return what differs between a captured layer with a capacity, replayed, and a call."""
    size = dist.get_world_size(group)
    case = replace(check_cases(size, "cuda")[0], tokens=(64,) * size, capacity=64 * 3)
    given = {n: t.clone() for n, t in programs.draw(case, device).items()}
    ranks = programs.ranks_of(case, group, device)
    held, part = slice(ranks.held.start, ranks.held.stop), slice(ranks.rank * 64, None)
    weights = ExpertWeights(gate_up=given["gate_up"][held], down=given["down"][held])
    x, ids = given["x"][part][:64].clone(), given["topk_ids"][part][:64].clone()
    probs = given["topk_probs"][part][:64].clone()

    def call():
        with torch.no_grad():
            return parallel_experts(x, Routing(ids, probs), weights, ranks=ranks)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    wrong = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed + 10 * ranks.rank)
        x.copy_(torch.randn(x.shape, generator=generator))
        ids.copy_(torch.rand(64, case.num_experts, generator=generator).argsort(1)[:, :3])
        graph.replay()
        expected = call()
        if not torch.equal(out, expected):
            wrong.append(f"graph replay {seed} on rank {ranks.rank}")
    ranks.check()
    return wrong


def warm(index, jobs, cells, check):
    """Compile, in a process of its own, what the checks and timings will run."""
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.new_group([0], backend="nccl")
    cases = check_cases(2, "cuda")
    cuts = cut_cases(cases, 2) if check == "all" else []
    cases = {"all": cases, "few": cases[:9:3], "none": []}[check]
    work = [("cell", c) for c in cells] + [("case", c) for c in cases]
    work += [("cut", c) for c in cuts]
    for kind, what in work[index::jobs]:
        if kind == "cell":
            warm_cell(*what, device)
            continue
        case, layout = what if kind == "cut" else (what, Layout())
        case = of_one(case)
        given = programs.draw(case, device)
        programs.one_rank(case, given, layout)
        if kind == "cut":
            run_cut(case, given, layout, group)
        else:
            programs.over_ranks(case, given, programs.ranks_of(case, group, device))
    torch.cuda.synchronize()


def run_warm(jobs, cells, check):
    names = ",".join(f"{s}:{t}" for s, t in cells)
    command = [sys.executable, __file__, "--jobs", str(jobs), "--cells", names]
    command += ["--check", check, "--warm"]
    running = [
        subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(jobs)
    ]
    for process in running:
        _, errors = process.communicate()
        if process.returncode:
            print("warm-up:", errors.strip().splitlines()[-1:], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--cells",
        default="qwen3-30b:4096,qwen3-30b:16384,deepseek-v3:4096,deepseek-v3:16384",
    )
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--warm", type=int)
    parser.add_argument("--soak", type=int, default=20)
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--check", choices=("all", "few", "none"), default="all")
    parser.add_argument("--profile", action="store_true", help="profile the cells, time nothing")
    parser.add_argument("--transports", default="torch", help="of torch,window")
    parser.add_argument("--brief", action="store_true", help="the layer and its parts alone")
    arguments = parser.parse_args()
    pairs = [cell.split(":") for cell in arguments.cells.split(",") if cell]
    cells = [(shape, int(tokens)) for shape, tokens in pairs]
    if arguments.warm is not None:
        warm(arguments.warm, arguments.jobs, cells, arguments.check)
        return
    start = time.perf_counter()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if place == "cuda" else "gloo")
    rank, device = dist.get_rank(), torch.device(place)
    if place == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
        if rank == 0:
            run_warm(arguments.jobs, cells, arguments.check)
    warmed = time.perf_counter() - start
    group, size = dist.group.WORLD, dist.get_world_size()
    wrong = [] if arguments.check == "none" else checks(arguments, place, size)
    every = [None] * size
    dist.all_gather_object(every, wrong)
    wrong = [line for lines in every for line in lines]
    checked = time.perf_counter() - start
    if rank == 0:
        print(f"compiled {warmed:.0f} s, checked {checked:.0f} s; wrong: {wrong or 'nothing'}")
    rows = []
    transports = arguments.transports.split(",")
    for (shape, tokens), transport in product(cells, transports):
        if arguments.profile:
            row = profile_cell(shape, tokens, device, group, transport)
            every = [None] * size
            dist.all_gather_object(every, row)
            rows += every
        else:
            brief = arguments.brief
            rows.append(time_cell(shape, tokens, device, group, transport, brief=brief))
        if rank == 0:
            print(lines_of(row) if arguments.profile else line_of(rows[-1]), flush=True)
            write(arguments.out, wrong, rows)
        if place == "cuda":
            torch.cuda.empty_cache()
    if place == "cuda" and not arguments.no_graph:
        found = captured_bits(group, device)
        wrong += found
        if rank == 0:
            print(
                f"captured with a capacity, replayed: {found or 'the bits of a call'}", flush=True
            )
            write(arguments.out, wrong, rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


def checks(arguments, place, size):
    cases = check_cases(size, place)
    # Every placement in bf16, on one backend: as often as launches take to be repeated.
    few = cases[:9:3]
    moved = [replace(c, transport=t) for t in arguments.transports.split(",") for c in few]
    wrong = programs.repeated_calls(moved + with_capacity(few[:1]), place)
    # Without gradients rows are not kept.
    wrong += programs.same_bits([replace(case, wanted=((),) * size) for case in moved], place)
    if arguments.check == "few":
        return wrong
    wrong += programs.same_bits(cases, place) + programs.same_bits(with_capacity(cases[:3]), place)
    composed = [c for c in cases if c.out_dtype is None]
    wrong += programs.same_bits_composed(composed[:3], place)
    wrong += programs.overflow(place, "auto")
    wrong += tensor_bits(cut_cases(cases, size), place)
    return wrong + programs.soak(2, arguments.soak, place, "auto")


def line_of(row):
    about = f"{row['shape']} T={row['tokens']} {row['transport']}"
    words = [f"{about} rows={row['rows']} sent={row['sent_MB']} MB"]
    words += [
        f"{name}: " + " ".join(f"{k} {v:.3f}" for k, v in row[name].items())
        for name in ("forward", "step", "forward_parts")
        if name in row
    ]
    return "\n  ".join(words)


def write(out, wrong, rows):
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    found = {"versions": env.versions(), "devices": env.devices(), "wrong": wrong, "rows": rows}
    (out / "parallel.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
