"""Start a compiled kernel by Triton's own entry point, its tensor descriptors encoded once.

Triton's launcher encodes every descriptor anew at every launch, from Python. A descriptor is a pure
function of an address and of what a repeated launch keeps (shape, strides, box, element type), so
it is kept by its address: nothing in it can be out of date.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import getclosurevars
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia import driver

# Descriptors kept for one argument of one launch: of the layers of a model that share a plan.
_MOST_DESCRIPTORS = 1024


class _Described:
    """What a launcher reads of a tensor descriptor; holds no tensor."""

    def __init__(self, address: int, like: Any) -> None:
        self.address = address
        self.base = self
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        # Triton 3.7 added it.
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)

    def data_ptr(self) -> int:
        return self.address


class Descriptors(dict[int, Any]):
    """What a launch takes for one of its descriptors, by the address of what is described."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, address: int) -> Any:
        if len(self) >= _MOST_DESCRIPTORS:
            self.clear()
        made = self[address] = self._make(address)
        return made


class Start(NamedTuple):
    """How to start a kernel: ``function(*before, stream, *after, arguments)``."""

    function: Callable[..., Any]
    before: tuple[int, int, int]
    after: tuple[Any, ...]
    # The arguments are given as one sequence, not one by one.
    whole: bool
    # Parameter -> its descriptors, and what else stands for them among the arguments.
    descriptors: dict[int, tuple[Descriptors, tuple[int, ...]]]


def start_of(compiled: Any, grid: tuple[int, ...], described: Mapping[int, Any]) -> Start:
    """Return how to start ``compiled`` (``triton.compiler.CompiledKernel``) on ``grid``.

    Args:
        compiled: The kernel.
        grid: One to three sizes.
        described: Parameter -> descriptor, of the launch that is to be repeated.

    Determinism: pure function of its arguments and of Triton's version.
    """
    before = (*grid, 1, 1)[:3]
    entry = _entry(compiled, described)
    if entry is not None:
        function, after, whole, metas = entry
        found = {
            index: (
                Descriptors(partial(_encoded, _Described(0, like), metas[index])),
                (*like.shape, *like.strides),
            )
            for index, like in described.items()
        }
        return Start(function, before, after, whole, found)
    # As a JIT function calls the launcher (Triton 3.4 to 3.9); without the hooks of profilers.
    after = (compiled.function, compiled.packed_metadata, None, None, None)
    plain = {
        index: (Descriptors(partial(_Described, like=_Described(0, like))), ())
        for index, like in described.items()
    }
    return Start(compiled.run, before, after, False, plain)


def _encoded(like: Any, meta: Any, address: int) -> Any:
    return driver.make_tensordesc_arg(_Described(address, like), meta)[0]


def _entry(
    compiled: Any, described: Mapping[int, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], bool, dict[int, Any]] | None:
    """Return the C function behind a launcher, its constant arguments, and descriptors' metadata.

    None for launchers that are not known: those of other Triton versions, of kernels that ask for
    scratch memory, and of architectures without descriptors.
    """
    run, version = compiled.run, triton.__version__.split(".")[:2]
    if version not in (["3", "6"], ["3", "7"]) or not isinstance(run, driver.CudaLauncher):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    function, metas = run.launch, {}
    if described:
        cells = getclosurevars(function).nonlocals
        places, encodings = sorted(cells["tensordesc_indices"]), cells["tensordesc_meta"]
        function, metas = cells["launcher"], dict(zip(places, encodings, strict=True))
        if metas.keys() != described.keys() or None in metas.values():
            return None
    kernel = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    no_scratch = (None, None)
    without_hooks = (compiled.packed_metadata, None, None, None)
    if version == ["3", "6"]:
        return function, (*kernel, *no_scratch, *without_hooks), False, metas
    arguments = (run.arg_annotations, run.kernel_signature)
    return function, (*kernel, *without_hooks, *no_scratch, *arguments), True, metas
