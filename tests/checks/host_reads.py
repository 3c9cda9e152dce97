"""What a call asks of the host, seen on a CPU: a CUDA graph can capture none of it."""

import traceback
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import samebits

_OURS = Path(samebits.__file__).parent
# Values that come to the host, sizes that follow from values, and values that leave it.
_ASKING = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "repeat_interleave",
    "_unique2", "unique_consecutive", "lift_fresh",
})  # fmt: skip
_BY_MASK = frozenset({"index", "index_put", "index_put_"})
_READING = frozenset({"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__"})
# Without a device, these make tensors of the host.
_MAKING = frozenset({
    "arange", "as_tensor", "empty", "eye", "from_numpy", "full", "linspace", "ones", "rand",
    "randn", "scalar_tensor", "tensor", "zeros",
})  # fmt: skip
# It looks at offsets of a CPU alone.
_ALLOWED = "check_bounds"


class HostReads(AbstractContextManager["HostReads"]):
    """Records what is asked of the host within the block, and where in our code."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._modes = ExitStack()

    def __enter__(self) -> "HostReads":
        for mode in (_Functions(self.found), _Operators(self.found)):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Functions(TorchFunctionMode):
    """Torch's functions as Python calls them."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _READING or (name in _MAKING and kwargs.get("device") is None):
            _record(self._found, name)
        return function(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Operators, those that other operators call too."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        masked = name in _BY_MASK and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masked or name in _ASKING:
            _record(self._found, name)
        return function(*args, **(kwargs or {}))


def _record(found: list[str], name: str) -> None:
    frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(_OURS)]
    if not frames or frames[-1].name != _ALLOWED:
        places = [f"{Path(f.filename).relative_to(_OURS).as_posix()}:{f.lineno}" for f in frames]
        found.append(f"{name} in {places[-1]}" if places else name)
