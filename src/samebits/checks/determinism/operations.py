"""Variants of our operations by themselves: sorting slots, moving rows, the activation."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from samebits.activation import Activation
from samebits.checks.determinism import calls
from samebits.checks.determinism.variant import Variant
from samebits.formats.descriptor import WeightFormat
from samebits.ops.activation import tuning as activation_tuning
from samebits.ops.dequantize import tuning as dequantize_tuning
from samebits.ops.permute import tuning as permute_tuning
from samebits.problem import DTYPES
from samebits.weights import Layout

ACTIVATION = "ops/activation/kernel.py:"
PERMUTE = "ops/permute/kernel.py:"
DEQUANTIZE = "ops/dequantize/kernel.py:"

GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
# Families of the activation; those with probabilities have their gradient, "bias" that of a bias.
FAMILIES = {
    "plain": (Activation(), Layout()),
    "weighted": (Activation(limit=7.0), Layout(interleave=32)),
    "bias": (GPT_OSS, Layout(interleave=1)),
    "situ": (Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0), Layout(up_first=True)),
    "ungated": (Activation(kind="relu2", gated=False), Layout()),
}
WEIGHTED = ("weighted", "bias")


def operations() -> Iterator[Variant]:
    """Yield every variant of an operation."""
    for slots in (64, 256, 1024, 4096, permute_tuning.FEW_SLOTS, 1 << 16, 1 << 19):
        for experts, block_r in ((8, 128), (384, 16)):
            yield sort(slots, experts, block_r)
    for dtype in ("bf16", "fp16", "fp32"):
        for hidden, topk in ((2048, 8), (2880, 4), (7168, 1)):
            for tokens in (16, 4096):
                yield move(tokens, hidden, topk, dtype)
    yield from map(dequantize, ("fp8_128x128", "mxfp8", "mxfp4", "mxfp4_shuffled", "nvfp4"))
    for family in FAMILIES:
        for dtype in ("bf16", "fp16", "fp32"):
            seen: list[Any] = []
            for rows, columns in ((256, 768), (32768, 768), (512, 2880), (16384, 2880)):
                variant = activation(family, rows, columns, dtype)
                tiles = [value for value in variant.config.values() if isinstance(value, dict)]
                if tiles not in seen:
                    seen.append(tiles)
                    yield variant


def sort_kernels(slots: int) -> list[str]:
    """Return the kernels that sort so many slots."""
    few = slots <= permute_tuning.FEW_SLOTS
    names = ["_few_metadata_kernel"] if few else ["_histogram_kernel", "_place_kernel"]
    return [PERMUTE + name for name in names]


def sort(slots: int, experts: int, block_r: int) -> Variant:
    """Return the sort of slots, with two tables of tiles."""
    return Variant(
        name=f"sort R={slots} E={experts}",
        kernels=[*sort_kernels(slots), f"{PERMUTE}_tiles_kernel"],
        config={"slots": slots, "experts": experts, "block_r": block_r},
        prepare=partial(calls.sort, slots, experts, block_r),
    )


def move_config(tokens: int, hidden: int, topk: int, size: int) -> dict[str, Any]:
    """Return the tile that moves rows of ``hidden`` elements of ``size`` bytes."""
    return asdict(permute_tuning.heuristic(tokens, hidden, topk, size))


def move(tokens: int, hidden: int, topk: int, dtype: str) -> Variant:
    """Return permute and combine with all gradients."""
    config = move_config(tokens, hidden, topk, DTYPES[dtype].itemsize)
    shape = {"H": hidden, "K": topk, "T": tokens}
    names = ["_gather_kernel", "_sum_kernel"]
    return Variant(
        name=f"permute {dtype} " + " ".join(f"{k}={v}" for k, v in shape.items()),
        kernels=[*(PERMUTE + name for name in names), *sort_kernels(tokens * topk)],
        config=shape | {"dtype": dtype} | dict.fromkeys(names, config),
        prepare=partial(calls.move, tokens, hidden, topk, DTYPES[dtype]),
    )


def dequantize_kernel(held: str) -> str:
    """Return what makes bf16 matrices of a format, of contractions that are multiples of 8."""
    weight_format = WeightFormat.parse(held)
    if weight_format.shuffled:
        return "_dequantize_shuffled_kernel"
    e2m1 = weight_format.values == "e2m1"
    return "_dequantize_words_kernel" if e2m1 else "_dequantize_kernel"


def dequantize(held: str) -> Variant:
    """Return the pass that makes dense matrices of quantised ones."""
    columns = 2880
    tile = asdict(dequantize_tuning.heuristic(columns))
    kernel = dequantize_kernel(held)
    return Variant(
        name=f"dequantize {held}",
        kernels=[f"{DEQUANTIZE}{kernel}"],
        config={"held": held, "K": columns, kernel: tile},
        prepare=partial(calls.dequantize, held, columns),
    )


def forward_tile(rows: int, columns: int, size: int) -> dict[str, Any]:
    """Return the tile of the activation."""
    tile = asdict(activation_tuning.forward_heuristic(rows, columns, size))
    # It walks over nothing: stages are not an option of its launch.
    del tile["num_stages"]
    return tile


def activation(family: str, rows: int, columns: int, dtype: str) -> Variant:
    """Return the activation and its gradients."""
    kind, layout = FAMILIES[family]
    size = DTYPES[dtype].itemsize
    dbias, dp = family == "bias", family in WEIGHTED
    backward = activation_tuning.backward_heuristic(rows, columns, size, dbias=dbias, dp=dp)
    tile = asdict(backward)
    # An argument of the kernel, not the option that Triton knows by this name.
    tile["stages"] = tile.pop("num_stages")
    names = ["_activation_forward_kernel", "_activation_backward_kernel"]
    if dbias:
        # It takes one row at a time: there is no tile of rows.
        del tile["block_r"]
        names[1:] = ["_activation_bias_backward_kernel", "_sum_chunks_kernel"]
    if dp and (dbias or not backward.walk):
        names.append("_sum_partials_kernel")
    return Variant(
        name=f"activation {dtype} {family} R={rows} F={columns}",
        kernels=[ACTIVATION + name for name in names],
        config={
            "activation": kind.key,
            "layout": layout.key,
            "dtype": dtype,
            "rows": rows,
            "columns": columns,
            names[0]: forward_tile(rows, columns, size),
            names[1]: tile,
        },
        prepare=partial(calls.activation, kind, layout, family, (rows, columns), DTYPES[dtype]),
    )
