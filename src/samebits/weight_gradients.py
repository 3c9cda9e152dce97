"""Where gradients of parameters go: straight into ``main_grad``, or later than the others.

Without this, a parameter's gradient is rounded to its dtype and given to autograd, which fills or
adds to ``.grad``; a ``main_grad`` attribute then changes nothing. The conventions are those of
Megatron-LM: ``main_grad``, ``get_main_grad()``, ``overwrite_main_grad``,
``grad_added_to_main_grad``, ``zero_out_wgrad`` and ``backward_dw()``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.arguments import require_bool, require_type
from samebits.errors import UnsupportedError, must


class Buffer(NamedTuple):
    """Where a backend writes one gradient of a parameter, unrounded until it is stored."""

    # Shape and orientation of the parameter in ``ExpertWeights``, any strides.
    tensor: Tensor
    # Add to what the tensor holds, in fp32 (fp64 for fp64), instead of overwriting it.
    accumulate: bool

    def store(self, grad: Tensor) -> None:
        """Store ``grad`` with the one rounding that the dtype of the buffer asks for.

        Determinism: exact, but for that rounding and that of a sum.
        """
        if self.accumulate:
            self.tensor.add_(grad)
        else:
            self.tensor.copy_(grad)

    def of_expert(self, expert: int) -> "Buffer":
        """Return the part of one expert."""
        return Buffer(self.tensor[expert], self.accumulate)


class Owner:
    """The parameter behind one tensor of ``ExpertWeights``.

    Args:
        parameter: A leaf.
        transposed: ``ExpertWeights`` sees its last two dimensions swapped.
    """

    def __init__(self, parameter: Tensor, *, transposed: bool = False) -> None:
        require_type("parameter", parameter, Tensor)
        require_bool("transposed", transposed)
        self.parameters: tuple[Tensor, ...] = (parameter,)
        self._transposed = transposed

    def open(self, name: str) -> Buffer:
        """Return the ``main_grad`` buffer, asked of its owner now, as ``ExpertWeights`` sees it.

        Raises:
            ValueError: There is none, or it cannot hold the gradient.
        """
        (parameter,) = self.parameters
        return Buffer(self._seen(main_grad_of(name, parameter)), accumulates(parameter))

    def close(self, buffer: Buffer) -> None:
        """Bring what was written to ``open``'s buffer to where it belongs: it is there."""

    def add(self, grad: Tensor) -> None:
        """Add a gradient, as ``ExpertWeights`` sees it, to ``.grad``, as autograd does."""
        (parameter,) = self.parameters
        add_to_grad(parameter, self._seen(grad))

    def is_still(self, other: "Owner") -> bool:
        """Return whether both have the same parameters, as objects.

        Determinism: no arithmetic.
        """
        pairs = zip(self.parameters, other.parameters, strict=False)
        return len(self.parameters) == len(other.parameters) and all(a is b for a, b in pairs)

    def _seen(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self._transposed else tensor


def main_grad_of(name: str, parameter: Tensor) -> Tensor:
    """Return the buffer of ``parameter``: what ``get_main_grad()`` gives, or ``main_grad``.

    Raises:
        ValueError: There is none, or it cannot hold the gradient.

    Determinism: no arithmetic.
    """
    owned: Any = parameter
    if hasattr(owned, "get_main_grad"):
        owned.main_grad = owned.get_main_grad()
    buffer = getattr(owned, "main_grad", None)
    # Asked in every step: what an error says is put together only for one.
    if isinstance(buffer, Tensor) and _fits(buffer, parameter):
        return buffer
    actual = str(buffer)
    if isinstance(buffer, Tensor):
        strides = f"strides {buffer.stride()}"
        actual = f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}, {strides}"
    wide = torch.promote_types(parameter.dtype, torch.float32)
    allowed = " or ".join(sorted({str(parameter.dtype), str(wide)}))
    where = f"{tuple(parameter.shape)} in {allowed} on {parameter.device}"
    rule = f"be a tensor {where}, not expanded, that requires no gradient"
    raise ValueError(must(f"{name}.main_grad", rule, actual))


def _fits(buffer: Tensor, parameter: Tensor) -> bool:
    if buffer.shape != parameter.shape or buffer.device != parameter.device or buffer.requires_grad:
        return False
    # Kernels would add to one place of an expanded one from many at once.
    strides = () if buffer.is_contiguous() else buffer.stride()
    if any(s == 0 and n > 1 for s, n in zip(strides, buffer.shape, strict=False)):
        return False
    return buffer.dtype in (parameter.dtype, torch.promote_types(parameter.dtype, torch.float32))


def accumulates(parameter: Tensor) -> bool:
    """Return whether the owner of ``parameter`` wants its ``main_grad`` added to.

    Determinism: no arithmetic.
    """
    return not getattr(parameter, "overwrite_main_grad", False)


def add_to_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to ``parameter.grad``, which takes its memory where there is none yet.

    Determinism: elementwise.
    """
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


class WeightGradients:
    """Take the gradients of a layer's parameters away from autograd.

    Every backward that comes through the layer counts, also one that was asked for other gradients
    (``torch.autograd.grad(out, x)``): torch does not tell.

    Args:
        main_grad: Add them to the ``main_grad`` of each parameter, in fp32 (fp64 for fp64), without
            rounding them to the parameter's dtype. ``.grad`` stays None; a parameter that has
            ``grad_added_to_main_grad`` gets it set, and a placeholder of no meaning in ``.grad``.
        delayed: Leave them to ``backward_dw()``. Hooks of the parameters see no gradient.

    Raises:
        TypeError: An argument is no bool.
        ValueError: Neither is asked for.
    """

    def __init__(self, *, main_grad: bool = False, delayed: bool = False) -> None:
        require_bool("main_grad", main_grad)
        require_bool("delayed", delayed)
        if not (main_grad or delayed):
            raise ValueError(must("main_grad and delayed", "not both be False", "False"))
        self.main_grad, self.delayed = main_grad, delayed
        self._pending: deque[_Pending] = deque()

    def __repr__(self) -> str:
        return f"WeightGradients(main_grad={self.main_grad}, delayed={self.delayed})"

    def __reduce__(self) -> tuple[Callable[[], "WeightGradients"], tuple[()]]:
        # What waits belongs to the parameters of the original, not to those of a copy.
        return partial(WeightGradients, main_grad=self.main_grad, delayed=self.delayed), ()

    @property
    def pending(self) -> int:
        """Backward passes that wait for ``backward_dw``."""
        return len(self._pending)

    def of(self, owners: Mapping[str, Owner]) -> "Destination":
        """Return where one call's gradients go.

        Args:
            owners: The parameter behind each tensor of the call's ``ExpertWeights``, by field name.

        Raises:
            TypeError: An owner is no ``Owner``.

        Determinism: no arithmetic.
        """
        for name, owner in owners.items():
            require_type(f"owners[{name!r}]", owner, Owner)
        return Destination(self, dict(owners))

    @torch.no_grad()
    def backward_dw(self, owners: Mapping[str, Owner] | None = None) -> None:
        """Compute the gradients that the oldest waiting backward pass left; nothing if none waits.

        Args:
            owners: The parameters of now; None trusts that they are those of the forward.

        Raises:
            UnsupportedError: A parameter was replaced since the forward (FSDP shards them).
            ValueError: A tensor that the gradients need was changed in place since the backward.

        Determinism: the bits of a backward that is not delayed.
        """
        if self._pending:
            self._pending.popleft().run(owners)


class _Pending(NamedTuple):
    destination: "Destination"
    names: tuple[str, ...]
    compute: Callable[[], None]
    # What ``compute`` reads, and its versions at the backward.
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def run(self, owners: Mapping[str, Owner] | None) -> None:
        for name, owner in (owners or {}).items():
            if name in self.names and not self.destination.owners[name].is_still(owner):
                raise UnsupportedError(
                    f"{name} was replaced between forward and backward_dw, as FSDP does: its "
                    "gradient would be lost; hint: delayed=False"
                )
        if tuple(tensor._version for tensor in self.tensors) != self.versions:
            rule = "keep their values between backward and backward_dw"
            raise ValueError(must("the tensors of a layer", rule, "one changed in place"))
        self.compute()


class Destination:
    """Where the gradients of one call go; made by ``WeightGradients.of``."""

    def __init__(self, policy: WeightGradients, owners: dict[str, Owner]) -> None:
        self.policy, self.owners = policy, owners

    def check(self, names: list[str]) -> None:
        """Raise unless every parameter of ``names`` has an owner and somewhere to go.

        Raises:
            ValueError: An owner or its ``main_grad`` is missing or does not fit.
        """
        for name in names:
            if name not in self.owners:
                raise ValueError(must("owners", f"hold {name}", sorted(self.owners)))
            if self.policy.main_grad:
                for parameter in self.owners[name].parameters:
                    # The buffer itself may be made as late as in the backward.
                    if not hasattr(parameter, "get_main_grad"):
                        main_grad_of(name, parameter)

    def defer(
        self, names: list[str], compute: Callable[[], None], tensors: Iterable[Tensor | None]
    ) -> None:
        """Leave ``compute``, which reads ``tensors``, to ``backward_dw``."""
        owned = (parameter for name in names for parameter in self.owners[name].parameters)
        read = tuple(tensor for tensor in (*tensors, *owned) if tensor is not None)
        versions = tuple(tensor._version for tensor in read)
        self.policy._pending.append(_Pending(self, tuple(names), compute, read, versions))

    def open(self, names: list[str]) -> dict[str, Buffer]:
        """Return the ``main_grad`` buffer of each parameter.

        Raises:
            ValueError: One is missing or does not fit.
        """
        return {name: self.owners[name].open(name) for name in names}

    def close(self, buffers: dict[str, Buffer]) -> None:
        """Tell owners that their buffers hold the gradients."""
        for name, buffer in buffers.items():
            self.owners[name].close(buffer)
            for parameter in self.owners[name].parameters:
                if hasattr(parameter, "grad_added_to_main_grad"):
                    parameter.grad_added_to_main_grad = True

    def placeholder(self, name: str, like: Tensor) -> Tensor | None:
        """Return what autograd gets in place of a gradient that is in ``main_grad`` already.

        Determinism: no arithmetic.
        """
        return _placeholder(self.owners[name].parameters, like)

    def fill_placeholders(self, names: list[str]) -> None:
        """Put placeholders where autograd would have put them."""
        for name in names:
            for parameter in self.owners[name].parameters:
                if parameter.grad is None:
                    parameter.grad = _placeholder((parameter,), parameter)


def _placeholder(owners: tuple[Tensor, ...], like: Tensor) -> Tensor | None:
    """Return what hooks that reduce gradients expect: of no meaning, or 0 where they add it."""
    if not any(hasattr(parameter, "grad_added_to_main_grad") for parameter in owners):
        return None
    zeros = any(getattr(parameter, "zero_out_wgrad", False) for parameter in owners)
    return torch.zeros_like(like) if zeros else torch.empty_like(like)
