"""Variants that must differ: each names the kinds of replay that have to see its fault."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from samebits.checks.determinism.variant import Variant

# From the root of our own registry.
FILE = "checks/determinism/kernel.py"


def planted() -> Iterator[Variant]:
    """Yield the planted faults; every registry has them."""
    for name, kernel, options, seen_by in (
        ("sum_atomic", "_sum_atomic_kernel", {}, ("load", "graph", "process")),
        ("last_writer", "_last_writer_kernel", {"payload": False}, ("load",)),
        ("last_writer", "_last_writer_kernel", {"payload": True}, ("load",)),
        ("early_reader", "_early_reader_kernel", {}, ("load",)),
        ("old_memory", "_old_memory_kernel", {}, ("memory",)),
    ):
        words = [name, *(key for key, value in options.items() if value)]
        yield Variant(
            name=f"planted {' '.join(words)}",
            kernels=[f"{FILE}:{kernel}"],
            config=dict(options),
            prepare=partial(_prepare, f"prepare_{name}", options),
            expected="different",
            seen_by=seen_by,
        )


def _prepare(name: str, options: dict[str, Any], device: torch.device) -> Callable[[], Any]:
    # Imported here: a registry must load without Triton.
    from samebits.checks.determinism import kernel

    call: Callable[[], Any] = getattr(kernel, name)(device, **options)
    return call
