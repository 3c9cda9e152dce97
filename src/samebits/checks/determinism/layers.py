"""Variants of whole layers: for each family of options and each entry of the tile tables.

The tiles are those of sm_90: on another architecture the replays say that others were launched.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from samebits.activation import Activation
from samebits.checks.determinism import calls
from samebits.checks.determinism.operations import (
    ACTIVATION,
    GPT_OSS,
    PERMUTE,
    forward_tile,
    move_config,
    sort_kernels,
)
from samebits.checks.determinism.variant import Variant
from samebits.ops.grouped_gemm import tuning as grouped_tuning
from samebits.ops.hidden_gradient import tuning as hidden_tuning
from samebits.ops.indirect_gemm import tuning as indirect_tuning
from samebits.ops.slot_gemm import tuning as slot_tuning
from samebits.ops.weight_gradient import tuning as weight_tuning
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.weights import Layout

HIDDEN = "ops/hidden_gradient/kernel.py:"
INDIRECT = "ops/indirect_gemm/kernel.py:"
NORM = "ops/row_norm/kernel.py:"
SLOT = "ops/slot_gemm/kernel.py:"
WEIGHT = "ops/weight_gradient/kernel.py:"
SPECIALIZED_WEIGHT = "ops/weight_gradient/specialized/kernel.py:_specialized_weight_gradient_kernel"
FIRST, SECOND = f"{INDIRECT}_first_projection_kernel", f"{INDIRECT}_second_projection_kernel"

_QWEN = Problem(H=2048, F=768, E=128, K=8, dtype="bf16", device="sm_90")
FEW = replace(_QWEN, E=32)
WHOLE = Problem(
    H=2880, F=2880, E=32, K=4, dtype="bf16", device="sm_90",
    activation=GPT_OSS, layout=Layout(interleave=1), gate_up_bias="bf16", down_bias="bf16",
)  # fmt: skip
# Families of options, in sizes of real models: some races show in no others.
FAMILIES: dict[str, Problem] = {
    "plain": _QWEN,
    "gpt-oss": WHOLE,
    "fc1_input": replace(FEW, K=1, placement=ProbPlacement.FC1_INPUT),
    "fc2_input": replace(
        FEW, placement=ProbPlacement.FC2_INPUT, gate_up_bias="fp32", down_bias="fp32"
    ),
    "ungated": replace(FEW, activation=Activation(kind="relu2", gated=False)),
    "local": replace(FEW, N=128, expert_start=32, counted=True),
    # Multiples of no 16 bytes: pointers instead of descriptors, and a tail in every contraction.
    "odd": replace(FEW, H=2050, F=770),
    # Stored as (E, in, out): a strided view.
    "in_out": FEW,
}
# Rows per expert that stand for the last entry of a table, and for the rest of it.
_MANY = 512.0
_POINTS = (10.0, 100.0, _MANY)


def layers() -> Iterator[Variant]:
    """Yield every variant of a layer."""
    points = sorted({min(entry.most, _MANY) for entry in indirect_tuning.TABLE})
    for dtype, families in (
        ("bf16", tuple(FAMILIES)),
        ("fp16", ("plain", "gpt-oss")),
        ("fp32", ("plain", "gpt-oss", "odd")),
    ):
        for family in families:
            problem = _in(FAMILIES[family], dtype)
            yield from _unlike(forward(family, problem, point) for point in points)
            yield from _unlike(
                backward(family, problem, point) for point in _backward_points(family, dtype)
            )
            if family in ("plain", "gpt-oss", "fc2_input"):
                yield from _unlike(grouped(family, problem, point) for point in _POINTS[::2])
            if dtype != "fp32":
                yield single_slots(family, problem)
    yield from (_sorted_rows(backend, 2048) for backend in ("fused", "grouped"))
    yield forward("norm", replace(FEW, norm_eps=1e-5), _POINTS[0])
    yield _suspect()


def _backward_points(family: str, dtype: str) -> list[float]:
    """Return rows per expert: of every entry of the tables for two families, else a few."""
    tables = (hidden_tuning.TABLE, weight_tuning.TABLE, indirect_tuning.INPUT_GRADIENT_TABLE)
    if dtype != "bf16" or family not in ("plain", "gpt-oss"):
        return list(_POINTS)
    return sorted({min(most, _MANY) for table in tables for most, _ in table})


def _unlike(variants: Iterator[Variant]) -> Iterator[Variant]:
    """Yield variants whose tiles differ from those of the ones before."""
    seen: list[Any] = []
    for variant in variants:
        tiles = {k: v for k, v in variant.config.items() if k not in ("tokens", "_sum_kernel")}
        if tiles not in seen:
            seen.append(tiles)
            yield variant


def _in(problem: Problem, dtype: str) -> Problem:
    if dtype == "bf16":
        return problem
    bias = None if problem.gate_up_bias is None else dtype
    problem = replace(problem, dtype=dtype, E=32, gate_up_bias=bias, down_bias=bias)
    if dtype == "fp32":
        # IEEE products take ten times as long; rows per expert choose the tile, not these sizes.
        problem = replace(problem, H=problem.H // 2, F=problem.F // 2, E=16)
    return problem


def layer_variant(
    backend: str,
    family: str,
    problem: Problem,
    tokens: int,
    kernels: Sequence[str],
    tiles: Mapping[str, Any],
    *,
    frozen: bool = False,
) -> Variant:
    """Return the variant of a whole layer; see ``calls.layer``."""
    size = DTYPES[problem.dtype].itemsize
    moved = move_config(tokens, problem.H, problem.K, size)
    words = [backend, "gradients"] if problem.grad else [backend]
    return Variant(
        name=f"{' '.join(words)} {problem.dtype} {family} T={tokens}",
        kernels=list(dict.fromkeys([*kernels, *sort_kernels(tokens * problem.K)])),
        config={"problem": str(problem), "tokens": tokens, "_sum_kernel": moved, **tiles},
        prepare=partial(
            calls.layer, problem, tokens, backend, transposed=family == "in_out", frozen=frozen
        ),
    )


def tile_of(family: str, problem: Problem, config: Any) -> dict[str, Any]:
    """Return a tile as it is launched."""
    if problem.dtype == "fp32":
        config = config.for_fp32()
    tile = asdict(replace(config, tma=False) if family == "odd" else config)
    if "stored" in tile:
        # Descriptors store numbers of two bytes, in rows whose strides they can say.
        tile["stored"] &= problem.dtype != "fp32" and family != "odd"
    if "specialized" in tile and family in ("odd", "main_grad"):
        tile["specialized"] = None
    return tile


def _projections(family: str, problem: Problem, tokens: int) -> dict[str, Any]:
    first, second = indirect_tuning.heuristic(tokens * problem.K, problem.E, problem.device)
    return {
        "_first_projection_kernel": tile_of(family, problem, first),
        "_second_projection_kernel": tile_of(family, problem, second),
    }


def forward(family: str, problem: Problem, per_expert: float) -> Variant:
    """Return the forward of the fused backend, for so many rows per expert."""
    tokens = int(per_expert * problem.experts / problem.K)
    kernels = [FIRST, SECOND, f"{PERMUTE}_sum_kernel"]
    if problem.placement == ProbPlacement.FC1_INPUT:
        kernels.append(f"{PERMUTE}_gather_kernel")
    if problem.norm_eps is not None:
        kernels.append(f"{NORM}_row_norm_kernel")
    tiles = _projections(family, problem, tokens)
    return layer_variant("fused", family, problem, tokens, kernels, tiles)


def single_slots(family: str, problem: Problem) -> Variant:
    """Return the forward of one token."""
    tokens = 1
    tiles = slot_tuning.heuristic(tokens, problem.K, problem.E, problem.device, problem.dtype)
    assert tiles is not None
    return Variant(
        name=f"fused {problem.dtype} {family} T={tokens}",
        kernels=[f"{SLOT}_slot_hidden_kernel", f"{SLOT}_token_output_kernel"],
        config={
            "problem": str(problem),
            "tokens": tokens,
            "_slot_hidden_kernel": tile_of(family, problem, tiles.hidden),
            "_token_output_kernel": tile_of(family, problem, tiles.output) | {"early": tiles.early},
        },
        prepare=partial(calls.layer, problem, tokens, "fused", transposed=family == "in_out"),
    )


def _weight_tile(family: str, problem: Problem, rows: int) -> tuple[str, dict[str, Any]]:
    """Return the kernel of weight gradients for so many rows, and its tile."""
    config = weight_tuning.heuristic(rows, problem.E, problem.device)
    tile = tile_of(family, problem, config)
    specialized = tile.pop("specialized")
    if specialized is None:
        return f"{WEIGHT}_weight_gradient_kernel", tile
    return SPECIALIZED_WEIGHT, specialized


def _name_of(kernel: str) -> str:
    return kernel.rpartition(":")[2]


def backward(family: str, problem: Problem, per_expert: float) -> Variant:
    """Return the forward with every gradient, for so many rows per expert."""
    problem = replace(problem, grad=True, E=min(problem.E, 32))
    tokens = int(per_expert * problem.experts / problem.K)
    rows = tokens * problem.K
    outer, weight = _weight_tile(family, problem, rows)
    kernels = [
        f"{HIDDEN}_hidden_gradient_kernel",
        outer,
        f"{WEIGHT}_order_kernel",
        FIRST,
        SECOND,
        *(f"{PERMUTE}{name}" for name in ("_sum_kernel", "_gather_kernel", "_tiles_kernel")),
    ]
    if problem.norm_eps is not None:
        kernels += [f"{NORM}{name}" for name in ("_row_norm_kernel", "_row_norm_backward_kernel")]
        kernels += [f"{WEIGHT}{name}" for name in ("_chunk_sums_kernel", "_sum_chunks_kernel")]
        kernels.append(f"{ACTIVATION}_activation_forward_kernel")
        if problem.placement == ProbPlacement.FC2_INPUT:
            kernels.append(f"{NORM}_row_norm_probs_kernel")
    elif problem.placement != ProbPlacement.FC1_INPUT:
        kernels.append(f"{HIDDEN}_probs_gradient_kernel")
    if problem.gate_up_bias is not None:
        kernels += [f"{WEIGHT}_chunk_sums_kernel", f"{WEIGHT}_sum_chunks_kernel"]
    hidden = hidden_tuning.heuristic(rows, problem.E, problem.device)
    dx = indirect_tuning.input_gradient_heuristic(rows, problem.E, problem.device)
    tiles = _projections(family, problem, tokens)
    # Once for y, which a norm needs again, and once for the gradient of the input.
    again = [tiles["_second_projection_kernel"]] * (1 if problem.norm_eps is None else 2)
    both = [*again, tile_of(family, problem, dx)]
    tiles |= {
        "_second_projection_kernel": both,
        "_hidden_gradient_kernel": tile_of(family, problem, hidden),
        _name_of(outer): weight,
    }
    return layer_variant("fused", family, problem, tokens, kernels, tiles)


def grouped(family: str, problem: Problem, per_expert: float) -> Variant:
    """Return the forward by stages, for so many rows per expert."""
    tokens = int(per_expert * problem.experts / problem.K)
    rows = tokens * problem.K
    kernels = [
        f"{ACTIVATION}_activation_forward_kernel",
        *(f"{PERMUTE}{name}" for name in ("_sum_kernel", "_gather_kernel")),
    ]
    size = DTYPES[problem.dtype].itemsize
    tiles = {"_activation_forward_kernel": forward_tile(rows, problem.F, size)}
    by_torch = problem.dtype == "bf16" and problem.gate_up_bias is None
    if not (by_torch and grouped_tuning.prefers_torch(rows, problem.E)):
        kernels.insert(0, SECOND)
        config = grouped_tuning.config_of(rows, problem.E, problem.device, problem.dtype)
        tiles["_second_projection_kernel"] = asdict(config)
    return layer_variant("grouped", family, problem, tokens, kernels, tiles)


def _sorted_rows(backend: str, rows: int) -> Variant:
    """Return rows that their caller sorted, with gradients."""
    problem = replace(FEW, K=1, grad=True)
    outer, tile = _weight_tile("sorted rows", problem, rows)
    kernels = [
        "ops/sorted_rows/kernel.py:_sorted_rows_kernel",
        *([FIRST] if backend == "fused" else [f"{ACTIVATION}_activation_forward_kernel"]),
        SECOND,
        *(f"{HIDDEN}{name}" for name in ("_hidden_gradient_kernel", "_probs_gradient_kernel")),
        *(outer, f"{WEIGHT}_order_kernel"),
        *(f"{PERMUTE}{name}" for name in ("_sum_kernel", "_tiles_kernel")),
    ]
    return Variant(
        name=f"{backend} sorted rows R={rows}",
        kernels=kernels,
        config={"problem": str(problem), "rows": rows, _name_of(outer): tile},
        prepare=partial(calls.sorted_rows, problem, rows, backend),
    )


def _suspect() -> Variant:
    """Return a tile that raced now and then (H200, Triton 3.6.0; docs/projections.md says why)."""
    tile = indirect_tuning.Config(
        block_r=128, block_n=128, block_k=64, num_warps=8, num_stages=4,
        swap=True, group=1, programs=1 << 20,
    )  # fmt: skip
    return Variant(
        name="suspect first projection",
        kernels=[FIRST],
        config={"_first_projection_kernel": asdict(tile)},
        prepare=partial(
            calls.layer_with_tiles, _QWEN, 4096, (tile, indirect_tuning.TABLE[-1].second)
        ),
        expected="either",
    )
