"""Variants of our operations by themselves: sorting slots, moving rows, the activation."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from samebits.activation import Activation
from samebits.checks.determinism import calls
from samebits.checks.determinism.variant import Variant
from samebits.ops.activation import tuning as activation_tuning
from samebits.ops.permute import tuning as permute_tuning
from samebits.problem import DTYPES
from samebits.weights import Layout

ACTIVATION = "ops/activation/kernel.py:"
PERMUTE = "ops/permute/kernel.py:"

GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)


def operations() -> Iterator[Variant]:
    """Yield every variant of an operation."""
    yield from _sorts()
    yield from _moves()
    yield from _activations()


def sort_kernels(slots: int) -> list[str]:
    """Return the kernels that sort so many slots."""
    few = slots <= permute_tuning.FEW_SLOTS
    names = ["_few_metadata_kernel"] if few else ["_histogram_kernel", "_place_kernel"]
    return [PERMUTE + name for name in names]


def move_config(tokens: int, hidden: int, topk: int, size: int) -> dict[str, Any]:
    """Return the tile that moves rows of ``hidden`` elements of ``size`` bytes."""
    return asdict(permute_tuning.heuristic(tokens, hidden, topk, size))


def forward_tile(rows: int, columns: int, size: int) -> dict[str, Any]:
    """Return the tile of the activation."""
    tile = asdict(activation_tuning.forward_heuristic(rows, columns, size))
    # It walks over nothing: stages are not an option of its launch.
    del tile["num_stages"]
    return tile


def _sorts() -> Iterator[Variant]:
    for slots in (64, 256, 1024, 4096, permute_tuning.FEW_SLOTS, 1 << 16, 1 << 19):
        for experts, block_r in ((8, 128), (384, 16)):
            yield Variant(
                name=f"sort R={slots} E={experts}",
                kernels=[*sort_kernels(slots), f"{PERMUTE}_tiles_kernel"],
                config={"slots": slots, "experts": experts, "block_r": block_r},
                prepare=partial(calls.sort, slots, experts, block_r),
            )


def _moves() -> Iterator[Variant]:
    """Yield permute and combine with all gradients."""
    for dtype in ("bf16", "fp16", "fp32"):
        for hidden, topk in ((2048, 8), (2880, 4), (7168, 1)):
            for tokens in (16, 4096):
                size = DTYPES[dtype].itemsize
                config = move_config(tokens, hidden, topk, size)
                shape = {"H": hidden, "K": topk, "T": tokens}
                yield Variant(
                    name=f"permute {dtype} " + " ".join(f"{k}={v}" for k, v in shape.items()),
                    kernels=[
                        f"{PERMUTE}_gather_kernel",
                        f"{PERMUTE}_sum_kernel",
                        *sort_kernels(tokens * topk),
                    ],
                    config=shape
                    | {"dtype": dtype, "_gather_kernel": config, "_sum_kernel": config},
                    prepare=partial(calls.move, tokens, hidden, topk, DTYPES[dtype]),
                )


def _activations() -> Iterator[Variant]:
    """Yield the activation and its gradients, for every tile that some size of a model has."""
    families = {
        "plain": (Activation(), Layout()),
        "weighted": (Activation(limit=7.0), Layout(interleave=32)),
        "bias": (GPT_OSS, Layout(interleave=1)),
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
    forward = forward_tile(rows, columns, size)
    backward = asdict(
        activation_tuning.backward_heuristic(
            rows, columns, size, dbias=dbias, dp=family in ("bias", "weighted")
        )
    )
    # An argument of the kernel, not the option that Triton knows by this name.
    backward["stages"] = backward.pop("num_stages")
    if dbias:
        # It takes one row at a time: there is no tile of rows.
        del backward["block_r"]
    return dict(zip(_activation_kernels(family)[:2], (forward, backward), strict=True))
