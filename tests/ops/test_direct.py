"""Kernels started by Triton's C function: arguments of each version, descriptors by address."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.ops._triton import direct

pytestmark = pytest.mark.interpret


def _kernel(launch: Callable[..., None], *, scratch: int = 0) -> Any:
    """Return what looks like a compiled kernel on a GPU."""
    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    run.launch = launch
    run.global_scratch_size, run.profile_scratch_size = scratch, 0
    run.launch_cooperative_grid, run.launch_pdl = False, True
    run.arg_annotations, run.kernel_signature = "annotations", "signature"
    return SimpleNamespace(run=run, function="function", packed_metadata="packed")


def _wrapped(launcher: Callable[..., None], metas: list[Any], indices: list[int]) -> Any:
    """Return a function with the closure of the one that encodes descriptors."""
    tensordesc_indices, tensordesc_meta = set(indices), metas

    def inner(*arguments: Any) -> None:
        launcher(*arguments, tensordesc_indices, tensordesc_meta)

    return inner


@pytest.fixture
def described() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(4, 64, 16), [4, 64, 16], [1024, 16, 1], [1, 16, 16])


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Note every encoding of a descriptor: its address and metadata."""
    made: list[tuple[int, Any]] = []

    def encode(like: Any, meta: Any) -> list[Any]:
        made.append((like.base.data_ptr(), meta))
        return [f"map of {like.base.data_ptr()}", *like.shape, *like.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    return made


@pytest.mark.parametrize(
    ("version", "whole", "after"),
    [
        ("3.6.0", False, ("function", False, True, None, None, "packed", None, None, None)),
        (
            "3.7.1",
            True,
            ("function", False, True, "packed", None, None, None, None, None, "annotations",
             "signature"),
        ),
    ],
)  # fmt: skip
def test_a_known_launcher_is_passed_by(
    version: str, whole: bool, after: tuple[Any, ...], described: TensorDescriptor,
    encodings: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton, "__version__", version)
    kernel = _kernel(_wrapped(print, ["meta"], [2]))

    start = direct.start_of(kernel, (3, 2), {2: described})

    assert start[:4] == (print, (3, 2, 1), after, whole)
    made, rest = start.descriptors[2]
    assert rest == (4, 64, 16, 1024, 16, 1)
    assert [made[16], made[32], made[16]] == ["map of 16", "map of 32", "map of 16"]
    assert encodings == [(16, "meta"), (32, "meta")]


def test_descriptors_are_few(
    described: TensorDescriptor, encodings: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    start = direct.start_of(_kernel(_wrapped(print, ["meta"], [0])), (1,), {0: described})
    made, _ = start.descriptors[0]

    for address in range(3000):
        assert made[address] == f"map of {address}"

    assert len(made) <= 1024
    assert len(encodings) == 3000


@pytest.mark.parametrize(
    ("version", "scratch", "metas"),
    [("3.9.0", 0, ["meta"]), ("3.6.0", 8, ["meta"]), ("3.6.0", 0, [None])],
    ids=["version", "scratch", "no descriptors"],
)
def test_any_other_launcher_is_called_as_triton_does(
    version: str, scratch: int, metas: list[Any], described: TensorDescriptor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton, "__version__", version)
    kernel = _kernel(_wrapped(print, metas, [2]), scratch=scratch)

    start = direct.start_of(kernel, (3,), {2: described})

    after = ("function", "packed", None, None, None)
    assert start[:4] == (kernel.run, (3, 1, 1), after, False)
    made, rest = start.descriptors[2]
    assert rest == ()
    assert made[48].base.data_ptr() == 48
    assert (made[48].shape, made[48].strides) == ([4, 64, 16], [1024, 16, 1])
