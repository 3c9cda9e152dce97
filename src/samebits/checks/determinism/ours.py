"""The registry of our own kernels: each call, with the kernels and tiles that it launches.

Variants are made from the tuning tables and heuristics, so that a new tile is a new variant by
itself. A new kernel joins the call that launches it (the replays compare what was launched with
what is listed here) or gets a call of its own; until then it is owed in ``evidence/debts.json``.
The tiles are those of sm_90: on another architecture the replays say that others were launched.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from samebits.activation import Activation
from samebits.checks.determinism import calls
from samebits.checks.determinism.variant import Variant
from samebits.ops.activation import tuning as activation_tuning
from samebits.ops.indirect_gemm import tuning as indirect_tuning
from samebits.ops.permute import tuning as permute_tuning
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.weights import Layout

ROOT = "../.."

ACTIVATION = "ops/activation/kernel.py:"
INDIRECT = "ops/indirect_gemm/kernel.py:"
PERMUTE = "ops/permute/kernel.py:"

_GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
_QWEN = Problem(H=2048, F=768, E=128, K=8, dtype="bf16", device="sm_90")
_FEW = replace(_QWEN, E=32)
_WHOLE = Problem(
    H=2880, F=2880, E=32, K=4, dtype="bf16", device="sm_90",
    activation=_GPT_OSS, layout=Layout(interleave=1), gate_up_bias="bf16", down_bias="bf16",
)  # fmt: skip
# Families of options, in sizes of real models: some races show in no others.
FAMILIES: dict[str, Problem] = {
    "plain": _QWEN,
    "gpt-oss": _WHOLE,
    "fc1_input": replace(_FEW, K=1, placement=ProbPlacement.FC1_INPUT),
    "fc2_input": replace(
        _FEW, placement=ProbPlacement.FC2_INPUT, gate_up_bias="fp32", down_bias="fp32"
    ),
    "ungated": replace(_FEW, activation=Activation(kind="relu2", gated=False)),
    "local": replace(_FEW, N=128, expert_start=32, counted=True),
    # Multiples of no 16 bytes: pointers instead of descriptors, and a tail in every contraction.
    "odd": replace(_FEW, H=2050, F=770),
}
# Stored as (E, in, out): a strided view.
TRANSPOSED = {"in_out": _FEW}
# Families of the other dtypes.
_OTHERS = ("plain", "gpt-oss", "odd")
# Rows per expert that stand for the last entry of a table.
_MANY = 512


def variants() -> Iterator[Variant]:
    """Yield every variant."""
    for name, problem in (FAMILIES | TRANSPOSED).items():
        yield from _fused(name, problem)
    for dtype in ("fp16", "fp32"):
        for name in _OTHERS:
            yield from _fused(name, _in(FAMILIES[name], dtype))
    yield from _sorts()
    yield from _moves()
    yield from _activations()
    yield _suspect()


def _in(problem: Problem, dtype: str) -> Problem:
    bias = None if problem.gate_up_bias is None else dtype
    return replace(problem, dtype=dtype, E=32, gate_up_bias=bias, down_bias=bias)


def _fused(family: str, problem: Problem) -> Iterator[Variant]:
    """Yield a whole layer for each entry of the tile table."""
    seen = set()
    for entry in indirect_tuning.TABLE:
        per_expert = min(entry.most, _MANY)
        tokens = int(per_expert * problem.experts / problem.K)
        first, second = indirect_tuning.heuristic(tokens * problem.K, problem.E, problem.device)
        if problem.dtype == "fp32":
            first, second = first.for_fp32(), second.for_fp32()
        if (first, second) in seen:
            continue
        seen.add((first, second))
        if family == "odd":
            first, second = replace(first, tma=False), replace(second, tma=False)
        size = DTYPES[problem.dtype].itemsize
        yield Variant(
            name=f"fused {problem.dtype} {family} T={tokens}",
            kernels=[
                f"{INDIRECT}_first_projection_kernel",
                f"{INDIRECT}_second_projection_kernel",
                *_sort_kernels(tokens * problem.K),
                f"{PERMUTE}_sum_kernel",
                *([f"{PERMUTE}_gather_kernel"] if family == "fc1_input" else []),
            ],
            config={
                "problem": str(problem),
                "tokens": tokens,
                "_first_projection_kernel": asdict(first),
                "_second_projection_kernel": asdict(second),
                "_sum_kernel": _move_config(tokens, problem.H, problem.K, size),
            },
            prepare=partial(calls.layer, problem, tokens, "fused", transposed=family in TRANSPOSED),
        )


def _suspect() -> Variant:
    """Return a tile that is in no table: on Triton 3.6.0 and an H200 it raced, now and then."""
    tile = indirect_tuning.Config(
        block_r=128, block_n=128, block_k=64, num_warps=8, num_stages=4,
        swap=True, group=1, programs=1 << 20,
    )  # fmt: skip
    second = indirect_tuning.TABLE[-1].second
    return Variant(
        name="suspect first projection",
        kernels=[f"{INDIRECT}_first_projection_kernel"],
        config={"_first_projection_kernel": asdict(tile)},
        prepare=partial(calls.layer_with_tiles, _QWEN, 4096, (tile, second)),
        expected="either",
    )


def _sort_kernels(slots: int) -> list[str]:
    few = slots <= permute_tuning.FEW_SLOTS
    names = ["_few_metadata_kernel"] if few else ["_histogram_kernel", "_place_kernel"]
    return [PERMUTE + name for name in names]


def _sorts() -> Iterator[Variant]:
    for slots in (64, 256, 1024, 4096, permute_tuning.FEW_SLOTS, 1 << 16, 1 << 19):
        for experts, block_r in ((8, 128), (384, 16)):
            yield Variant(
                name=f"sort R={slots} E={experts}",
                kernels=[*_sort_kernels(slots), f"{PERMUTE}_tiles_kernel"],
                config={"slots": slots, "experts": experts, "block_r": block_r},
                prepare=partial(calls.sort, slots, experts, block_r),
            )


def _moves() -> Iterator[Variant]:
    """Yield permute and combine with all gradients."""
    for dtype in ("bf16", "fp16", "fp32"):
        for hidden, topk in ((2048, 8), (2880, 4), (7168, 1)):
            for tokens in (16, 4096):
                size = DTYPES[dtype].itemsize
                config = _move_config(tokens, hidden, topk, size)
                shape = {"H": hidden, "K": topk, "T": tokens}
                yield Variant(
                    name=f"permute {dtype} " + " ".join(f"{k}={v}" for k, v in shape.items()),
                    kernels=[
                        f"{PERMUTE}_gather_kernel",
                        f"{PERMUTE}_sum_kernel",
                        *_sort_kernels(tokens * topk),
                    ],
                    config=shape
                    | {"dtype": dtype, "_gather_kernel": config, "_sum_kernel": config},
                    prepare=partial(calls.move, tokens, hidden, topk, DTYPES[dtype]),
                )


def _move_config(tokens: int, hidden: int, topk: int, size: int) -> dict[str, Any]:
    return asdict(permute_tuning.heuristic(tokens, hidden, topk, size))


def _activations() -> Iterator[Variant]:
    """Yield the activation and its gradients, for every tile that some size of a model has."""
    families = {
        "plain": (Activation(), Layout()),
        "weighted": (Activation(limit=7.0), Layout(interleave=32)),
        "bias": (_GPT_OSS, Layout(interleave=1)),
        "situ": (Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0), Layout(up_first=True)),
        "ungated": (Activation(kind="relu2", gated=False), Layout()),
    }
    for family, (activation, layout) in families.items():
        for dtype in ("bf16", "fp16", "fp32"):
            seen: list[Any] = []
            for rows, columns in ((256, 768), (32768, 768), (512, 2880), (16384, 2880)):
                tiles = _activation_tiles(family, rows, columns, DTYPES[dtype].itemsize)
                if tiles in seen:
                    continue
                seen.append(tiles)
                yield Variant(
                    name=f"activation {dtype} {family} R={rows} F={columns}",
                    kernels=[f"{ACTIVATION}{name}" for name in _activation_kernels(family)],
                    config={"activation": activation.key, "layout": layout.key, "dtype": dtype}
                    | {"rows": rows, "columns": columns}
                    | tiles,
                    prepare=partial(
                        calls.activation, activation, layout, family, (rows, columns), DTYPES[dtype]
                    ),
                )


def _activation_kernels(family: str) -> list[str]:
    forward = "_activation_forward_kernel"
    if family == "bias":
        return [
            forward,
            "_activation_bias_backward_kernel",
            "_sum_chunks_kernel",
            "_sum_partials_kernel",
        ]
    return [forward, "_activation_backward_kernel"]


def _activation_tiles(family: str, rows: int, columns: int, size: int) -> dict[str, Any]:
    dbias = family == "bias"
    forward = asdict(activation_tuning.forward_heuristic(rows, columns, size))
    backward = asdict(
        activation_tuning.backward_heuristic(
            rows, columns, size, dbias=dbias, dp=family in ("bias", "weighted")
        )
    )
    # A launch that walks over no tiles has no stages; the option would be Triton's own.
    backward["stages"] = backward.pop("num_stages")
    del forward["num_stages"]
    if dbias:
        # It takes one row at a time: there is no tile of rows.
        del backward["block_r"]
    return dict(zip(_activation_kernels(family)[:2], (forward, backward), strict=True))
