"""The experts implementations that are registered in the installed transformers, and ours."""

import dis
from types import TracebackType

import torch

from samebits.integrations.transformers import plugin
from samebits.integrations.transformers.interface import load

SAMEBITS = plugin.NAME
EAGER = "eager"

# torch's own statements of a limitation; it raises RuntimeError for these as for everything else.
_TORCH_LIMITS = (
    "multiple of 16 bytes",
    "not implemented for",
    "not supported",
    "Class values must be smaller than num_classes",
)
_RAISE = dis.opmap["RAISE_VARARGS"]


def device() -> torch.device:
    """Return where implementations run: a CUDA device where there is one, since kernels need it.

    Oracle and plain loop always run on CPU.
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def implementations() -> list[str]:
    """Return every registered implementation, the class's own loop (eager) first, ours last."""
    plugin.register()
    names = [name for name in load().moe.ALL_EXPERTS_FUNCTIONS if name != SAMEBITS]
    return [EAGER, *names, SAMEBITS]


def refuses(error: BaseException, implementation: str) -> bool:
    """Return whether ``error`` is a clear refusal of ``implementation``, not a crash.

    A refusal is a ``NotImplementedError`` (our ``UnsupportedError`` is one), a ``ValueError`` or
    ``RuntimeError`` that a ``raise`` statement of the implementation's own module raised, or torch
    naming a limitation of its own.
    """
    if isinstance(error, NotImplementedError):
        return True
    if not isinstance(error, (ValueError, RuntimeError)):
        return False
    return _raised_by(error, implementation) or any(text in str(error) for text in _TORCH_LIMITS)


def _raised_by(error: BaseException, implementation: str) -> bool:
    registered = load().moe.ALL_EXPERTS_FUNCTIONS
    if implementation not in registered:
        return False
    own_code = getattr(registered[implementation], "__code__", None)
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or own_code is None:
        return False
    code = last.tb_frame.f_code
    raised = code.co_code[last.tb_lasti] == _RAISE
    return raised and code.co_filename == own_code.co_filename
