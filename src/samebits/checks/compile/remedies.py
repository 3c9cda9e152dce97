"""Ways out of a stale number, each tried on the sequence that failed.

A remedy changes a setting (nothing to edit, but for the whole process or function), or how the
number reaches the graph (an edit, but local).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Remedy(NamedTuple):
    """A way out: what to write, and how the audit applies it."""

    # What to write, for the report.
    code: str
    # Settings of torch by module path, applied while the sequence runs.
    settings: Mapping[str, Mapping[str, object]] = {}
    # Arguments of torch.compile; a function that is compiled already keeps its own.
    compile: Mapping[str, object] = {}
    # "argument": pass a 0-d tensor; "graph": make one inside; None leaves the number alone.
    tensor: str | None = None


AS_IT_IS = "as it is"

REMEDIES: Mapping[str, Remedy] = {
    AS_IT_IS: Remedy("nothing changed"),
    "0-d tensor argument": Remedy("fn(…, torch.tensor(value))", tensor="argument"),
    "new_ones": Remedy("value = x.new_ones(()) * value  # first line of fn", tensor="graph"),
    "specialize_float": Remedy(
        "torch._dynamo.config.specialize_float = True",
        {"torch._dynamo.config": {"specialize_float": True}},
    ),
    "dynamic=False": Remedy(
        "torch.compile(fn, dynamic=False)",
        {
            "torch._dynamo.config": {
                "automatic_dynamic_shapes": False,
                "assume_static_by_default": True,
            }
        },
        {"dynamic": False},
    ),
    "AOT cache off": Remedy(
        "torch._functorch.config.enable_autograd_cache = False",
        {"torch._functorch.config": {"enable_autograd_cache": False}},
    ),
    "aot_eager": Remedy('torch.compile(fn, backend="aot_eager")', compile={"backend": "aot_eager"}),
}


@contextmanager
def settings(changes: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
    """Apply settings of torch for a while.

    Raises:
        AttributeError: This torch has no such setting.
    """
    with ExitStack() as stack:
        for path, values in changes.items():
            config: Any = torch
            for part in path.split(".")[1:]:
                config = getattr(config, part)
            stack.enter_context(config.patch(dict(values)))
        yield


def as_tensor(value: object, like: Tensor) -> Tensor:
    """Return the number as a 0-d tensor of ``like``'s dtype and device."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def inside(function: Callable[..., Any], name: str | int, like: str | int) -> Callable[..., Any]:
    """Return ``function`` with one argument made a tensor first, inside the graph.

    Args:
        function: Eager.
        name: Position or keyword of the number.
        like: Position or keyword of a float tensor.
    """

    def with_tensor(*args: Any, **kwargs: Any) -> Any:
        positional, keywords = list(args), dict(kwargs)
        tensor = keywords[like] if isinstance(like, str) else positional[like]
        holder: Any = keywords if isinstance(name, str) else positional
        holder[name] = tensor.new_ones(()) * holder[name]
        return function(*positional, **keywords)

    return with_tensor
