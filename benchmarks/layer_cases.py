"""Cells of the layer benchmark: weights, routings, floors, and the check that comes first."""

import statistics
from dataclasses import dataclass, replace
from itertools import product

import torch
from timing import copy_ceiling

from samebits.activation import Activation
from samebits.problem import ProbPlacement
from samebits.testing.cases import MODELS
from samebits.weights import ExpertWeights, Layout

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
ROUTINGS = ("uniform", "zipf", "one")
# Where a full run also times the other routings.
ROUTED = (64, 1024, 16384)
# A subset for two minutes: every shape, every regime.
QUICK = (
    ("qwen3-30b", 1), ("qwen3-30b", 64), ("qwen3-30b", 4096), ("mixtral", 1024),
    ("gpt-oss-120b", 1), ("gpt-oss-120b", 256), ("gpt-oss-120b", 4096),
    ("deepseek-v3", 1024), ("llama4-scout", 1), ("llama4-scout", 16384),
)  # fmt: skip
# What the floor assumes an H200 to do at best.
FLOPS, BYTES = 790e12, 4.3e12
# A launch costs at least this, also in a graph.
LAUNCH_MS = 3e-3
# From here on a cell lasts long enough to change the clocks.
BUSY_TOKENS = 4096
# Rows of the smallest tile that reaches the rate of the matrix unit.
TILE_ROWS = 64


@dataclass(frozen=True)
class Rates:
    """What this device reached in this run."""

    flop_per_ms: float
    byte_per_ms: float


def large_product():
    """Return a function that multiplies two large matrices, and its FLOP."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    return lambda *_: a @ b, 2 * size**3


def large_products(ms):
    """Return a function that multiplies large matrices for about so long, and its FLOP."""
    product, flop = large_product()
    count = max(1, round(ms * FLOPS / 1e3 / flop))
    product()

    def run(*_):
        for _ in range(count):
            product()

    return run, flop * count


def rates() -> Rates:
    """Measure a large cuBLAS product and a large copy, on a device that has rested."""
    product, flop = large_product()
    times = []
    for _ in range(12):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        product()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return Rates(flop / statistics.median(times[2:]), copy_ceiling("cuda", 1 << 30))


def weights_of(problem):
    """Return random weights with the scale of a trained layer."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape, scale):
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return out.normal_(0, scale, generator=generator)

    biases = {}
    if problem.gate_up_bias is not None:
        biases["gate_up_bias"] = draw(problem.E, 2 * problem.F, scale=0.1)
        biases["down_bias"] = draw(problem.E, problem.H, scale=0.1)
    return ExpertWeights(
        gate_up=draw(problem.E, 2 * problem.F, problem.H, scale=problem.H**-0.5),
        down=draw(problem.E, problem.H, problem.F, scale=problem.F**-0.5),
        layout=problem.layout,
        **biases,
    )


def sets_of(problem, tokens, routing):
    """Return (x, ids, probs) of several calls: few-token weights must not come from the cache."""
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    favour = torch.zeros(problem.E, device="cuda")
    if routing == "zipf":
        favour = -torch.arange(1, problem.E + 1, device="cuda").log()
    elif routing == "one":
        favour[-1] = 100.0
    sets = []
    for _ in range(4 if tokens <= 1024 else 1):
        noise = torch.rand(tokens, problem.E, device="cuda", generator=generator)
        scores = favour - (-noise.clamp(1e-9, 1 - 1e-7).log()).log()
        ids = scores.topk(problem.K).indices
        probs = torch.rand(tokens, problem.K, device="cuda", generator=generator)
        x = torch.randn(tokens, problem.H, device="cuda", generator=generator).bfloat16()
        sets.append((x, ids, probs))
    return sets


def _counts(problem, sets):
    return [torch.bincount(ids.reshape(-1), minlength=problem.E) for _, ids, _ in sets]


def floor_ms(problem, tokens, sets):
    """Return the bound that no layer passes: arithmetic, or touched weights once."""
    touched = statistics.mean(int((c > 0).sum()) for c in _counts(problem, sets))
    flop = 6 * tokens * problem.K * problem.H * problem.F
    byte = 2 * (3 * touched * problem.H * problem.F + 2 * tokens * problem.H)
    return max(flop / FLOPS, byte / BYTES) * 1e3


def staged_ms(problem, tokens, sets, measured):
    """Return what the stages cost at this run's rates: tiles of 64 rows, buffers between stages."""
    hidden, columns, rows = problem.H, problem.F, tokens * problem.K
    totals = []
    for counts in _counts(problem, sets):
        padded = int(((counts + TILE_ROWS - 1) // TILE_ROWS).sum()) * TILE_ROWS
        touched = int((counts > 0).sum())
        first = _stage(
            4 * padded * hidden * columns,
            2 * (2 * touched * hidden * columns + tokens * hidden + rows * columns),
            measured,
        )
        second = _stage(
            2 * padded * hidden * columns,
            2 * (touched * hidden * columns + rows * columns + rows * hidden),
            measured,
        )
        combine = 2 * (rows + tokens) * hidden / measured.byte_per_ms
        totals.append(first + second + combine)
    return statistics.mean(totals) + LAUNCH_MS * (4 if rows <= 8192 else 5)


def _stage(flop, byte, measured):
    return max(flop / measured.flop_per_ms, byte / measured.byte_per_ms)


def exact_rows(problem, values, weights, picked):
    """Return the rows ``picked`` of the layer in fp64."""
    from samebits import activation as act
    from samebits.weights import split_gate_up

    x, ids, probs = values
    out = torch.zeros(len(picked), problem.H, device="cuda", dtype=torch.float64)
    for place, token in enumerate(picked):
        for expert, p in zip(ids[token].tolist(), probs[token].double(), strict=True):
            row = x[token].double()
            if problem.placement == ProbPlacement.FC1_INPUT:
                row = (row * p).bfloat16().double()
            z = weights.gate_up[expert].double() @ row
            if weights.gate_up_bias is not None:
                z = z + weights.gate_up_bias[expert].double()
            gate, up = split_gate_up(z, problem.layout)
            y = weights.down[expert].double() @ act.apply(problem.activation, gate, up)
            if weights.down_bias is not None:
                y = y + weights.down_bias[expert].double()
            out[place] += y if problem.placement == ProbPlacement.FC1_INPUT else y * p
    return out


def worst_error(out, exact, picked):
    """Return the normwise error of the worst of the picked rows."""
    found = out[picked].double()
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())


def cells_of(text):
    """Return (shape, T) pairs of ``qwen3-30b:1,mixtral:1024``."""
    cells = []
    for part in text.split(","):
        shape, _, tokens = part.partition(":")
        if shape not in MODELS or not tokens.isdigit():
            raise SystemExit(f"a cell looks like qwen3-30b:1024 (shapes: {list(MODELS)}): {part!r}")
        cells.append((shape, int(tokens)))
    return cells


def variants_of(shape):
    """Return the problems to time: the plain one, and the model's own."""
    problem = MODELS[shape]
    found = {"plain": problem}
    if shape == "gpt-oss-120b":
        activation = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
        found["gpt-oss"] = replace(
            problem, activation=activation, layout=Layout(interleave=1),
            gate_up_bias="bf16", down_bias="bf16",
        )  # fmt: skip
    if shape == "llama4-scout":
        found["fc1_input"] = replace(problem, placement=ProbPlacement.FC1_INPUT)
    return found


def jobs_of(arguments):
    """Return [(shape, variant, [(routing, T), …]), …] in the order in which they are timed.

    A full run begins with every plain cell, then come options, then other routings.
    """
    chosen = arguments.tokens.split(","), arguments.shapes.split(",")
    cells = arguments.cells or [(s, int(t)) for t, s in product(*chosen)]
    if arguments.quick:
        cells = QUICK
    tokens = {}
    for shape, count in cells:
        tokens.setdefault(shape, []).append(count)
    routings = arguments.routings.split(",")
    jobs = [(s, "plain", [(r, t) for r in routings for t in found]) for s, found in tokens.items()]
    if arguments.options or arguments.full:
        jobs += [
            (s, variant, [(r, t) for r in routings for t in found])
            for s, found in tokens.items()
            for variant in variants_of(s)
            if variant != "plain"
        ]
    if arguments.full:
        jobs += [
            (s, "plain", [(r, t) for r in ROUTINGS[1:] for t in found if t in ROUTED])
            for s, found in tokens.items()
        ]
    return [job for job in jobs if job[2]]
