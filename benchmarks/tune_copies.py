"""Time every tile of the kernels that should run at copy speed: activation, permute, combine.

    python benchmarks/tune_copies.py --out FILE    # about 3 minutes on an H200 with 16 cores

First the sigmoid and the clamp are compared with their plain expressions, for every fp32 number.
Then each cell of ``./run bench``: the tile that the heuristic chooses is checked as there, every
other one must have its bits, and all are timed in turn. Kernels are compiled by many processes
beforehand. Prints the best tile of each cell beside the heuristic's, writes all rows as JSON lines.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from case import Case, Options
from timing import clocks, copy_ceiling, sets_for, time_candidates

from ops import activation as activation_op
from ops import permute as permute_op
from samebits.ops._triton.elementwise import clamp_above, clamp_both, sigmoid
from samebits.ops.activation import Wanted
from samebits.ops.activation import tuning as activation_tuning
from samebits.ops.activation.kernel import launch_activation_backward, launch_activation_forward
from samebits.ops.permute import kernel as permute_kernel
from samebits.ops.permute import tuning as permute_tuning
from samebits.testing.cases import MODELS
from samebits.testing.numerics import bitwise_equal

ACTIVATIONS = ("plain", "clamped", "gpt-oss", "interleaved", "weighted")
PERMUTES = (("permute", "forward"), ("combine", "forward"), ("permute", "backward"))
# Launches of a process that only compiles: enough rows for no special case, few enough to be quick.
COMPILED_TOKENS = 512


class Tuned(NamedTuple):
    """A cell of the bench and the tiles to try in it."""

    case: Case
    # Runs ours with one tile.
    run: Callable[[Any, Any], tuple[torch.Tensor | None, ...]]
    # The heuristic's tile first.
    configs: list[Any]


def _run_activation(variant: Any, direction: str, given: Any, config: Any) -> tuple[Any, ...]:
    options = (given.operands, variant.activation, variant.layout)
    if direction == "forward":
        return (launch_activation_forward(*options, config),)
    return launch_activation_backward(given.dh, *options, Wanted(dp=variant.probs), config)


def _activation(case: Case) -> Tuned:
    variant, columns = activation_op.VARIANTS[case.variant], case.problem.F
    rows, backward = case.T * case.problem.K, case.direction == "backward"
    chosen: Any = activation_tuning.forward_heuristic(rows, columns, 2)
    if backward:
        chosen = activation_tuning.backward_heuristic(
            rows, columns, 2, dbias=False, dp=variant.probs
        )
    dp = backward and variant.probs
    found = activation_tuning.candidates(columns, 2, backward=backward, dp=dp)
    if columns == 768:
        # No power of two covers such a row without waste but 256.
        found = [config for config in found if config.block_f == 256]
    return Tuned(case, partial(_run_activation, variant, case.direction), _unique(chosen, found))


def _run_permute(case: Case, m: Any, config: Any) -> tuple[Any, ...]:
    topk = case.problem.K
    if case.variant == "combine":
        ours = permute_kernel.launch_combine(
            m.y, m.inverse, topk, m.probs, m.y.dtype, config=config
        )
        return (ours,)
    if case.direction == "forward":
        return (permute_kernel.launch_permute(m.x, m.inverse, topk, None, config=config),)
    return permute_kernel.launch_permute_backward(m.y, m.inverse, topk, None, None, config=config)


def _permute(case: Case) -> Tuned:
    hidden, topk = case.problem.H, case.problem.K
    chosen = permute_tuning.heuristic(case.T, hidden, topk, 2)
    found = permute_tuning.candidates(
        hidden, topk=1 if case.name.count("permute forward") else topk
    )
    return Tuned(case, partial(_run_permute, case), _unique(chosen, found))


def _unique(chosen: Any, found: list[Any]) -> list[Any]:
    return [chosen, *(config for config in found if config != chosen)]


def cells(shapes: list[str], tokens: tuple[int, ...], device: str = "cuda") -> Iterator[Tuned]:
    """Yield what is tuned."""
    problems = {name: MODELS[name] for name in shapes}
    options = Options(tokens, device, peers=False)
    for case in activation_op.cases(problems, options):
        if case.variant in ACTIVATIONS:
            yield _activation(case)
    for case in permute_op.cases(problems, options):
        if (case.variant, case.direction) in PERMUTES:
            yield _permute(case)


def _compile(job: tuple[list[str], int, int]) -> int:
    """Launch the kernels of one part of the tiles, which leaves them in Triton's cache."""
    shapes, part, parts = job
    done = 0
    for cell in cells(shapes, (COMPILED_TOKENS,)):
        case, given = cell.case, None
        topk = case.problem.K if case.op == "permute" else ""
        for config in cell.configs:
            # One binary serves several shapes: the same process meets it again.
            kernel = f"{case.op} {case.variant} {case.direction} {topk} {config}"
            if zlib.crc32(kernel.encode()) % parts == part:
                given = case.make(0) if given is None else given
                cell.run(given, config)
                done += 1
    torch.cuda.synchronize()
    return done


@triton.jit
def _scalars_kernel(counts_ptr, start, limit, BLOCK: tl.constexpr):
    """Count the fp32 numbers on which the device functions differ from the plain expressions."""
    bits = start + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    plain = 1.0 / (1.0 + tl.exp(-x))
    above = tl.where(x > limit, limit, x)
    both = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    known = x == x
    _count(counts_ptr, sigmoid(x), plain, known)
    _count(counts_ptr + 1, clamp_above(x, limit), above, known)
    _count(counts_ptr + 2, clamp_both(x, limit), both, known)
    nan = (clamp_above(x, limit) != clamp_above(x, limit)) & (sigmoid(x) != sigmoid(x))
    tl.atomic_add(counts_ptr + 3, tl.sum((nan == known).to(tl.int32), 0))


@triton.jit
def _count(count_ptr, ours, plain, known):
    other = ours.to(tl.uint32, bitcast=True) != plain.to(tl.uint32, bitcast=True)
    tl.atomic_add(count_ptr, tl.sum((other & known).to(tl.int32), 0))


def scalar_differences(device: str = "cuda", numbers: int = 1 << 32) -> dict[str, int]:
    """Return how many of the first ``numbers`` fp32 numbers have another result."""
    counts = torch.zeros(4, dtype=torch.int32, device=device)
    block = min(1024, numbers)
    for start in range(0, numbers, 1 << 30):
        programs = min(numbers - start, 1 << 30) // block
        _scalars_kernel[(programs,)](counts, start, 7.0, BLOCK=block, enable_fp_fusion=False)
    names = ("sigmoid", "clamp above", "clamp both", "NaN")
    return dict(zip(names, counts.tolist(), strict=True))


def measure(cell: Tuned, ceiling: float, rounds: int, device: str) -> list[dict[str, Any]]:
    """Check every tile, time those that are right, return a row for each."""
    case = cell.case
    sets = [case.make(seed) for seed in range(sets_for(case.moved))]
    expected = cell.run(sets[0], cell.configs[0])
    error = case.check(sets[0], tuple(value for value in expected if value is not None))
    right, rows = {}, []
    for config in cell.configs:
        same = all(
            ours is None or theirs is None or bitwise_equal(ours, theirs)
            for ours, theirs in zip(cell.run(sets[0], config), expected, strict=True)
        )
        if same and error <= 1.0:
            right[str(config)] = lambda given, config=config: cell.run(given, config)
        row = {"cell": case.name, "config": str(config), "same_bits": same, "error": error}
        rows.append(row | {"op": case.op, "heuristic": config == cell.configs[0]})
    times = time_candidates(right, sets, case.moved, device, rounds)
    for row in rows:
        if row["config"] in times:
            ms = statistics.median(times[row["config"]])
            row |= {"ms": ms, "fraction": case.moved / ceiling / ms, "MB": case.moved / 1e6}
    return rows


def _line(rows: list[dict[str, Any]]) -> str:
    wrong = [row["config"] for row in rows if "ms" not in row]
    if wrong:
        return f"{rows[0]['cell']}: WRONG (error {rows[0]['error']:.2f}): {wrong}"
    best, ours = max(rows, key=lambda row: row["fraction"]), rows[0]
    return (
        f"{ours['cell']:52} {ours['fraction']:.3f}  best {best['fraction']:.3f}"
        f" {best['config'].removeprefix('Config')}"
    )


def main() -> int:
    """Return 1 where any result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=min(16, len(os.sched_getaffinity(0))))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    shapes, tokens = arguments.shapes.split(","), tuple(map(int, arguments.tokens.split(",")))
    start = time.monotonic()
    jobs = [(shapes, part, arguments.workers) for part in range(arguments.workers)]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        compiled = sum(pool.map(_compile, jobs, chunksize=1))
    print(f"{compiled} launches compiled after {time.monotonic() - start:.0f} s", flush=True)
    differences = scalar_differences()
    print(f"of 2^32 numbers with another result: {differences}", flush=True)
    ceiling = copy_ceiling("cuda", 1 << 30)
    print(f"copy {ceiling / 1e9:.3f} TB/s  clocks {clocks()}", flush=True)
    failed = any(differences.values())
    with arguments.out.open("w") as file:
        for cell in cells(shapes, tokens):
            rows = measure(cell, ceiling, arguments.rounds, "cuda")
            failed = failed or any("ms" not in row for row in rows)
            print(_line(rows), flush=True)
            file.writelines(json.dumps(row) + "\n" for row in rows)
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s  clocks {clocks()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
