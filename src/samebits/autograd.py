"""Autograd inside an operator's kernel, which a dispatch mode runs below autograd."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KEYS = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")


@contextmanager
def recording() -> Iterator[None]:
    """Record operations for ``torch.autograd.grad``, under any dispatch mode.

    ``torch.enable_grad`` is not enough: an operator that a mode calls (a counter of FLOPs, a
    tracker of memory) runs with autograd's keys excluded.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
