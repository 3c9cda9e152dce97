"""Kernels whose launches can be recorded, to be repeated on other addresses without a search.

At every launch Triton looks at every argument to find the compiled kernel: for a layer of few
tokens that takes longer than the layer. ``recorded_launches`` notes what was found;
``samebits.backends.repetition`` repeats it where nothing that decides has changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

from torch import Tensor, cuda
from triton import knobs
from triton.runtime import driver


class Launch(NamedTuple):
    """One launch: what ran, how wide, and on what."""

    # triton.compiler.CompiledKernel.
    compiled: Any
    grid: tuple[int, ...]
    # In the order of the kernel's parameters, constants included.
    arguments: tuple[Any, ...]


def _whole(launch: Launch) -> Launch:
    return launch


def device_queries() -> tuple[Callable[[int], int], Callable[[], int]]:
    """Return what says the current stream of a device, and the current device."""
    return driver.active.get_current_stream, driver.active.get_current_device


class Record:
    """The launches of recordable kernels, beside a count of all that this thread made meanwhile.

    ``keep`` says what is kept of a launch.
    """

    def __init__(self, keep: Callable[[Launch], Any]) -> None:
        self.keep = keep
        self.launches: list[Any] = []
        self.made = 0
        self._thread = get_ident()

    def count(self, _: Any) -> None:
        """Count a launch; a hook of Triton's, which calls it from any thread."""
        if get_ident() == self._thread:
            self.made += 1

    @property
    def complete(self) -> bool:
        """False where a kernel ran that is not recordable."""
        return len(self.launches) == self.made


_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded_launches(keep: Callable[[Launch], Any] = _whole) -> Iterator[Record]:
    """Note every launch of a ``recordable`` kernel in this context."""
    record = Record(keep)
    token = _RECORD.set(record)
    knobs.runtime.launch_enter_hook.add(record.count)
    try:
        yield record
    finally:
        knobs.runtime.launch_enter_hook.remove(record.count)
        _RECORD.reset(token)


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Raise where this thread would launch a kernel: for calls that are to compile alone."""
    thread = get_ident()

    def refuse(metadata: Any) -> None:
        if get_ident() == thread:
            name = metadata.get()["name"]
            raise RuntimeError(
                f"{name} would be launched on tensors without memory; not recordable"
            )

    knobs.runtime.launch_enter_hook.add(refuse)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(refuse)


class Recordable:
    """A JIT function; launched, compiled and inspected as one.

    With tensors of the meta device a launch only compiles and loads (``samebits.warmup``).
    """

    def __init__(self, function: Any) -> None:
        # Triton looks for a wrapped function under this name.
        self.fn = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fn, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
        if any(isinstance(a, Tensor) and a.is_meta for a in arguments):
            return self._compile(grid, arguments, constants)
        try:
            compiled = self.fn[grid](*arguments, **constants)
        except RuntimeError as error:
            if cuda.is_available() and cuda.is_current_stream_capturing():
                name = self.fn.__name__
                raise RuntimeError(
                    f"{name} must be compiled and loaded before a CUDA graph is captured\n"
                    "hint: call samebits.warmup(problem, tokens=[T]), or the layer once, before"
                ) from error
            raise
        record = _RECORD.get()
        if record is not None:
            rest = self.fn.arg_names[len(arguments) :]
            whole = (*arguments, *(constants[name] for name in rest))
            record.launches.append(record.keep(Launch(compiled, grid, whole)))
        return compiled

    def _compile(self, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        compiled = self.fn.warmup(*arguments, grid=grid, **constants)
        # A compiled kernel loads itself when it is asked for a launcher, which is not called.
        compiled[grid]
        return compiled


def recordable(function: Any) -> Recordable:
    """Make the launches of a ``triton.jit`` function recordable; a decorator above it."""
    return Recordable(function)
