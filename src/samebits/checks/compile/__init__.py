"""`samebits check compile`: Does compiled code keep an old value of a number that changed?

A Python float that reaches a ``torch.compile``d function becomes dynamic at its second value; where
one of its uses cannot be traced that way the value is baked in, and the code is saved under a key
without it: the third value gets the code of the second, forward and backward, without a warning,
and through the cache on disk in other processes too (pytorch#194976, #197889); see
docs/stale-scalars.md. The audit drives sequences of calls through any callable, ours or not, and
compares each with the eager original.
"""

from typing import Any

__all__ = ["Audit", "TargetError", "add_arguments", "audit_compile", "main", "results"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Workers import this package, too; they need none of this.
    from samebits.checks.compile import audit, command, report, target

    for module in (audit, command, report, target):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)
