"""Call the target once and return every tensor that it gives: outputs, and gradients if asked."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samebits.checks.compile.compare import named_tensors, real
from samebits.checks.compile.discover import Call, original
from samebits.checks.compile.target import SEED
from samebits.checks.result import FOREIGN_ERRORS

# Of which argument tensors a gradient is taken: all that are float, or those that ask for one.
Wanted = Literal["all", "declared"]


_LONGEST_REASON = 200


class NotDifferentiableError(TypeError):
    """No output depends on a tensor by a gradient."""


def attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return ``(result, "")``, or ``(None, reason)`` where anyone's code refuses."""
    try:
        return action(), ""
    except FOREIGN_ERRORS as error:
        # Dynamo's first line says only that something was raised.
        said = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {said[:_LONGEST_REASON]}"


def evaluate(
    call: Call,
    run: Callable[..., Any],
    wanted: Wanted | None,
    prepare: Callable[..., Any] | None = None,
) -> dict[str, Tensor]:
    """Return the outputs of one call and, with ``wanted``, the gradients, as detached copies.

    Args:
        call: The arguments; their tensors are copied first.
        run: The function, eager or compiled.
        wanted: Of which arguments to take gradients; None runs under ``no_grad``.
        prepare: Given the copied arguments, returns what ``run`` gets instead.

    Raises:
        NotDifferentiableError: ``wanted`` is given and no output has a gradient.
    """
    torch.manual_seed(SEED)
    leaves: dict[str, Tensor] = {}
    args = [_copy(value, f"args[{i}]", wanted, leaves) for i, value in enumerate(call.args)]
    kwargs = {name: _copy(value, name, wanted, leaves) for name, value in call.kwargs.items()}
    if prepare is not None:
        args, kwargs = prepare(args, kwargs)
    if wanted is not None:
        leaves |= _parameters(call)
    for tensor in leaves.values():
        tensor.grad = None
    with torch.set_grad_enabled(wanted is not None):
        found = named_tensors(run(*args, **kwargs))
    if wanted is not None:
        _backward(list(found.values()))
        for name, tensor in leaves.items():
            gradient = tensor.grad
            found[f"grad {name}"] = torch.zeros_like(tensor) if gradient is None else gradient
    return {name: real(tensor.detach()).clone() for name, tensor in found.items()}


def _backward(outputs: list[Tensor]) -> None:
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not outputs:
        raise NotDifferentiableError("no output requires a gradient")
    torch.autograd.backward(outputs, [_cotangent(tensor) for tensor in outputs])


def _cotangent(tensor: Tensor) -> Tensor:
    """Return weights between 0.5 and 1.5, all different: a plain sum hides errors that cancel."""
    weights = torch.linspace(0.5, 1.5, max(tensor.numel(), 1), device=tensor.device)
    return weights[: tensor.numel()].to(tensor.dtype).reshape(tensor.shape)


def _copy(value: Any, name: str, wanted: Wanted | None, leaves: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        differentiable = value.is_floating_point() and (wanted == "all" or value.requires_grad)
        if wanted is not None and differentiable:
            copied.requires_grad_(True)
            leaves[name] = copied
        return copied
    if type(value) is dict:
        return {k: _copy(v, f"{name}[{k!r}]", wanted, leaves) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copy(v, f"{name}[{i}]", wanted, leaves) for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _parameters(call: Call) -> dict[str, Tensor]:
    """Return the parameters of every module that the call can see at its top."""
    function = original(call.function)
    holders = [function, getattr(function, "__self__", None), *call.args, *call.kwargs.values()]
    for cell in getattr(function, "__closure__", None) or ():
        content, _ = attempt(lambda cell=cell: cell.cell_contents)  # type: ignore[misc]
        holders.append(content)
    found: dict[str, Tensor] = {}
    for module in map(original, holders):
        if isinstance(module, nn.Module):
            found |= {n: p for n, p in module.named_parameters() if p.requires_grad}
    return found


def grown(call: Call) -> Call:
    """Return the call with twice the rows: every tensor as long as the first one is doubled.

    Raises:
        ValueError: There is no tensor with a first dimension.
    """
    lengths: list[int] = []
    _double([call.args, call.kwargs], None, lengths)
    if not lengths:
        raise ValueError("no argument is a tensor with rows")
    args, kwargs = _double([call.args, call.kwargs], lengths[0], [])
    return Call(call.function, args, kwargs)


def _double(value: Any, length: int | None, lengths: list[int]) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value
        lengths.append(value.shape[0])
        if value.shape[0] != length:
            return value
        doubled = torch.cat([value.detach(), value.detach().flip(0)])
        return doubled.requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {k: _double(v, length, lengths) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_double(v, length, lengths) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
