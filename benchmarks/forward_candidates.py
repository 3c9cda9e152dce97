"""Other loops, epilogues and tiles of the forward's launches, for layer_candidates.py to time.

They stand in for the kernels of ``samebits.ops`` behind the same launchers and compute with the
same device functions: a candidate that wins moves there, with its evidence.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from forward_kernels import first_kernel, second_kernel, sum_after_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.backends import fused, matrices, passes, repetition
from samebits.ops.indirect_gemm import kernel
from samebits.ops.permute import kernel as permute


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What stands in for the kernels of the forward."""

    ahead: bool = False
    # Beside ``Config.short``; 0: none.
    shorter: int = 0
    boxed: bool = False
    after: bool = False
    # Changes of the tiles of the table, of each projection.
    first: tuple[tuple[str, int], ...] = ()
    second: tuple[tuple[str, int], ...] = ()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let every forward use this."""
        with ExitStack() as stack:
            # Recorded launches are those of another candidate.
            for recorded in (repetition, passes):
                recorded.forget()
                stack.callback(recorded.forget)
            stack.enter_context(mock.patch.object(fused, "tiles_of", self._tiles_of))
            if self.ahead or self.shorter or self.boxed or self.after:
                for name in ("_first_projection_kernel", "_second_projection_kernel"):
                    stack.enter_context(mock.patch.object(kernel, name, _Stand(self, name)))
            if self.after:
                stack.enter_context(
                    mock.patch.object(permute, "_sum_kernel", _Stand(self, "_sum_kernel"))
                )
            yield

    def _tiles_of(self, problem, call):
        first, second, upcast = matrices.tiles_of(problem, call)
        return replace(first, **dict(self.first)), replace(second, **dict(self.second)), upcast


class _Stand:
    """Stands for a kernel: launches a candidate instead."""

    def __init__(self, candidate, name):
        self.candidate, self.name = candidate, name

    def __getitem__(self, grid):
        chosen = self.candidate
        more = {"launch_pdl": True} if chosen.after else {}

        def launch(*arguments, **constants):
            if self.name == "_sum_kernel":
                return sum_after_kernel[grid](*arguments, **constants, **more)
            shorter = chosen.shorter if constants["SHORT"] else 0
            more.update(AHEAD=chosen.ahead, SHORTER=shorter, AFTER=chosen.after)
            if self.name == "_first_projection_kernel":
                return first_kernel[grid](*arguments, **constants, **more)
            h, y = arguments[0], arguments[8]
            described = constants["H_TMA"] and not constants["SWAP"]
            boxed = chosen.boxed and described and arguments[6] is None
            tile = [constants["BLOCK_R"], constants["BLOCK_N"]]
            box = TensorDescriptor(y, list(y.shape), [y.shape[1], 1], tile) if boxed else None
            few = None
            if shorter:
                few = h
                if described:
                    rows = h.base
                    block = [shorter, constants["BLOCK_K"]]
                    few = TensorDescriptor(rows, list(rows.shape), [rows.shape[1], 1], block)
            return second_kernel[grid](
                *arguments, **constants, shorter_h_ptr=few, y_box=box, **more
            )

        return launch


DYNAMIC = 1 << 20
_ROWS = {"block_r": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "swap": False, "tma": True}


def _tiles(**change: int) -> tuple[tuple[str, int], ...]:
    return tuple((_ROWS | change).items())


def _both(**change: int) -> dict[str, tuple[tuple[str, int], ...]]:
    return {"first": _tiles(**change), "second": _tiles(**change)}


# What is to be told apart: schedule, padding, epilogue, gaps between launches, two programs a
# processor, longer steps, order in the cache.
CANDIDATES = {
    "table": Candidate(),
    "after": Candidate(after=True),
    "ahead": Candidate(ahead=True),
    # What leaves is gathered in shared memory, in which a fourth stage would not fit.
    "boxed": Candidate(boxed=True, second=(("num_stages", 3),)),
    "dynamic": Candidate(**_both(num_stages=3, group=8, short=0, programs=DYNAMIC)),
    "dynamic short 64": Candidate(**_both(num_stages=3, group=8, short=64, programs=DYNAMIC)),
    "dynamic short 64 s4": Candidate(**_both(num_stages=4, group=8, short=64, programs=DYNAMIC)),
    "dynamic two short": Candidate(
        shorter=32, **_both(num_stages=3, group=8, short=64, programs=DYNAMIC)
    ),
    "131 programs short 64": Candidate(**_both(num_stages=3, group=8, short=64, programs=131)),
    "two programs": Candidate(
        **_both(block_n=128, num_warps=4, num_stages=3, group=8, short=0, programs=264)
    ),
    "two programs dynamic short 64": Candidate(
        **_both(block_n=128, num_warps=4, num_stages=3, group=8, short=64, programs=DYNAMIC)
    ),
    "steps of 128": Candidate(**_both(block_k=128, num_stages=2, group=8, short=0, programs=132)),
    "group 4": Candidate(**_both(num_stages=3, group=4, short=0, programs=132)),
    "group 32": Candidate(**_both(num_stages=3, group=32, short=0, programs=132)),
}
