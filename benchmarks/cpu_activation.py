"""Time the drop-in activations on a CPU beside the plain formula that they replace, in eager torch.

    python benchmarks/cpu_activation.py --out benchmarks/results/activation-cpu.json
    python benchmarks/cpu_activation.py --quick

The plain formula computes in the dtype of its input and rounds after every operation. In bf16 it
is also timed in fp32 ("wide": rounded once, as ours is). Candidates run in turn, round by round.
With one thread the time is the processor's, with more the wall's. A ratio is a formula's median
over ours: above 1 ours is faster. ``backward`` is autograd's, ``explicit`` the function written
out.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from baselines import Formula
from torch import Tensor
from torch.nn.functional import relu, silu

from samebits import env, functional
from samebits.activation import Activation
from samebits.testing.cases import MODELS

LIMIT, OFFSET = 2.0, 1.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = ("qwen3-30b", "gpt-oss-120b", "mixtral")
TOKENS = (64, 512, 4096)
# Seconds for each candidate of a cell.
_SECONDS = 0.1
_FEWEST, _MOST = 4, 101


class Given(NamedTuple):
    """Inputs of every program."""

    y: Tensor
    bias: Tensor
    weights: Tensor
    g: Tensor


def _glu(y: Tensor, limit: float | None = None) -> Tensor:
    gate, up = y.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


def _quick(y: Tensor, bias: Tensor, weights: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    y = torch.cat((gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)), -1) + bias
    gate, up = y.chunk(2, -1)
    return (gate * torch.sigmoid(1.702 * gate) * (up + OFFSET) * weights).to(y.dtype)


def _explicit(limit: float | None, weighted: bool) -> Callable[[Given], Any]:
    formula = Formula(Activation(limit=limit), pairs=False)
    return lambda i: formula.backward(i.g, i.y, i.weights[:, 0] if weighted else None)


Program = Callable[[Given], Any]
# Name -> ours, the plain formula.
FORWARD: dict[str, tuple[Program, Program]] = {
    "swiglu": (lambda i: functional.swiglu(i.y), lambda i: _glu(i.y)),
    "bias_swiglu": (
        lambda i: functional.bias_swiglu(i.y, i.bias),
        lambda i: _glu(i.y + i.bias),
    ),
    "weighted_swiglu": (
        lambda i: functional.weighted_swiglu(i.y, i.weights),
        lambda i: (_glu(i.y) * i.weights).to(i.y.dtype),
    ),
    "clamped_swiglu": (
        lambda i: functional.clamped_swiglu(i.y, LIMIT),
        lambda i: _glu(i.y, LIMIT),
    ),
    "bias_clamped_swiglu": (
        lambda i: functional.bias_clamped_swiglu(i.y, i.bias, LIMIT),
        lambda i: _glu(i.y + i.bias, LIMIT),
    ),
    "clamped_weighted_swiglu": (
        lambda i: functional.clamped_weighted_swiglu(i.y, i.weights, LIMIT),
        lambda i: (_glu(i.y, LIMIT) * i.weights).to(i.y.dtype),
    ),
    "weighted_bias_quick_geglu_impl": (
        lambda i: functional.weighted_bias_quick_geglu_impl(
            i.y, i.bias, i.weights, linear_offset=OFFSET, clamp_value=LIMIT
        ),
        lambda i: _quick(i.y, i.bias, i.weights),
    ),
    "weighted_squared_relu_impl": (
        lambda i: functional.weighted_squared_relu_impl(i.y, i.weights),
        lambda i: (relu(i.y) ** 2 * i.weights).to(i.y.dtype),
    ),
}
EXPLICIT: dict[str, tuple[Program, Program]] = {
    "swiglu_back": (lambda i: functional.swiglu_back(i.g, i.y), _explicit(None, weighted=False)),
    "weighted_swiglu_back": (
        lambda i: functional.weighted_swiglu_back(i.g, i.y, i.weights),
        _explicit(None, weighted=True),
    ),
    "clamped_swiglu_back": (
        lambda i: functional.clamped_swiglu_back(i.g, i.y, LIMIT),
        _explicit(LIMIT, weighted=False),
    ),
    "clamped_weighted_swiglu_back": (
        lambda i: functional.clamped_weighted_swiglu_back(i.g, i.y, i.weights, LIMIT),
        _explicit(LIMIT, weighted=True),
    ),
}


def make(rows: int, columns: int, dtype: torch.dtype) -> Given:
    """Return inputs of ``rows`` rows of ``columns`` elements of the result."""
    torch.manual_seed(0)
    y = torch.randn(rows, 2 * columns).mul_(2).to(dtype)
    bias, g = torch.randn(2 * columns).to(dtype), torch.randn(rows, columns).to(dtype)
    return Given(y, bias, torch.rand(rows, 1), g)


def timed(programs: dict[str, Callable[[], Any]], threads: int) -> dict[str, float]:
    """Return the median milliseconds of each program."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in programs}
    rounds = _FEWEST
    for step in range(_MOST):
        for name, program in programs.items():
            start = clock()
            program()
            times[name].append((clock() - start) * 1e3)
        if step == 1:
            slowest = max(found[1] for found in times.values())
            rounds = max(_FEWEST, min(_MOST, int(_SECONDS * 1e3 / slowest)))
        if step >= rounds:
            break
    # The first call allocates and warms up.
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _wide(formula: Program) -> Program:
    """Return the formula computed in fp32 and rounded once."""

    def program(i: Given) -> Tensor:
        return formula(Given(*(part.float() for part in i))).to(i.y.dtype)

    return program


def candidates(given: Given) -> Iterator[tuple[str, str, dict[str, Callable[[], Any]]]]:
    """Yield direction, name, and ours and the formulas as calls."""
    wide = given.y.dtype != torch.float32
    kinds = ("ours", "plain", "wide") if wide else ("ours", "plain")
    leaf = given.y.requires_grad_()
    for name, both in FORWARD.items():
        programs = (*both, _wide(both[1])) if wide else both
        with torch.no_grad():
            yield (
                "forward",
                name,
                {k: lambda f=f: f(given) for k, f in zip(kinds, programs, strict=True)},
            )
        outs = [f(given) for f in programs]
        backwards = [
            lambda out=out: torch.autograd.grad(
                out, leaf, given.g if out.shape == given.g.shape else out, retain_graph=True
            )
            for out in outs
        ]
        yield "backward", name, dict(zip(kinds, backwards, strict=True))
        del outs, backwards
    plain = given._replace(y=leaf.detach())
    for name, both in EXPLICIT.items():
        calls = {k: lambda f=f: f(plain) for k, f in zip(kinds, both, strict=False)}
        yield "explicit", name, calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one shape, bf16, few tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="T")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.dtypes, arguments.shapes, arguments.tokens = ["bf16"], [SHAPES[0]], [64, 512]
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype in arguments.dtypes:
            for shape in arguments.shapes:
                for tokens in arguments.tokens:
                    model = MODELS[shape]
                    given = make(tokens * model.K, model.F, DTYPES[dtype])
                    for direction, name, programs in candidates(given):
                        ms = timed(programs, threads)
                        row = {"threads": threads, "dtype": dtype, "shape": shape, "T": tokens}
                        row |= {"direction": direction, "function": name, **ms}
                        ratios = {k: v / ms["ours"] for k, v in ms.items() if k != "ours"}
                        rows.append(row | {"ratios": ratios})
                        print(*row.values(), *map("{:.2f}".format, ratios.values()), flush=True)
    summary(rows)
    if arguments.out:
        command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        record = {"command": command, "cpu": platform.processor() or platform.machine()}
        record |= {"versions": env.versions(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> None:
    """Print the geometric mean and the least ratio of each function over each formula."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = tuple(row[part] for part in ("threads", "dtype", "direction", "function"))
        for formula, ratio in row["ratios"].items():
            found.setdefault((*key, formula), []).append(ratio)
    for key, ratios in found.items():
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        print(*key, f"mean {mean:.2f} least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
