"""A function and the arguments of it that hold rows: its results for any batch of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.checks.compile.compare import named_tensors
from samebits.checks.compile.target import SEED
from samebits.checks.result import FOREIGN_ERRORS
from samebits.errors import must

# Results by name; the first dimension of each is the rows.
Outputs = dict[str, Tensor]


class Rows:
    """A function and its arguments, of which some hold one row for each token."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        names: Sequence[str] = (),
    ) -> None:
        """Find the arguments that hold rows.

        Args:
            function: What is judged; results whose first dimension is the rows are compared.
            args: Its arguments.
            kwargs: Its keyword arguments.
            names: Arguments that hold rows, by index or keyword; empty takes every tensor that is
                as long as the first one.

        Raises:
            ValueError: No argument holds rows, or one that is named does not.
        """
        self._function = function
        self._args, self._kwargs = list(args), dict(kwargs or {})
        arguments = dict(enumerate(self._args)) | self._kwargs
        by_name = {str(key): value for key, value in arguments.items()}
        for name in names:
            if not _has_rows(by_name.get(name)):
                known = [key for key, value in by_name.items() if _has_rows(value)]
                raise ValueError(must("--rows", f"name tensors, of {', '.join(known)}", repr(name)))
        first = next((by_name[n] for n in names or by_name if _has_rows(by_name[n])), None)
        if first is None:
            raise ValueError("no argument is a tensor with rows")
        self.count = int(first.shape[0])
        if self.count == 0:
            raise ValueError("the rows are none: give at least one")
        self._names = {
            name
            for name, value in by_name.items()
            if _has_rows(value) and value.shape[0] == self.count and (not names or name in names)
        }
        if set(names) - self._names:
            raise ValueError(must("--rows", "name tensors of one length", ", ".join(names)))
        self._known: dict[tuple[int, int], Outputs] = {}
        # Results that hold rows; None before ``learn``.
        self._results: set[str] | None = None

    def __str__(self) -> str:
        named = {**{str(i): v for i, v in enumerate(self._args)}, **self._kwargs}
        shapes = [
            f"{name} {tuple(named[name].shape)} {str(named[name].dtype).removeprefix('torch.')}"
            for name in sorted(self._names)
        ]
        return ", ".join(shapes)

    def batch(self, row: int, size: int) -> Tensor:
        """Return the rows from ``row`` on; after the last comes the first again."""
        return (row + torch.arange(size)) % self.count

    def learn(self, sizes: Sequence[int]) -> int:
        """Find out which results hold rows: those as long as the batch at two sizes.

        Args:
            sizes: Of batches, ascending.

        Returns:
            The smallest size, from one row on, that the function takes.

        Raises:
            ValueError: No result has rows.
        """
        largest = self.outputs(self.batch(0, sizes[-1]))
        for size in sorted({1, *sizes[:-1]}):
            try:
                smaller = self.outputs(self.batch(0, size))
            except FOREIGN_ERRORS:
                continue
            self._results = largest.keys() & smaller.keys()
            if not self._results:
                raise ValueError("no result has as many rows as the batch at two sizes")
            return size
        return sizes[-1]

    def in_order(self, row: int, size: int) -> Outputs:
        """Return the results of ``batch``, computed once."""
        if (row, size) not in self._known:
            self._known[row, size] = self.outputs(self.batch(row, size))
        return self._known[row, size]

    def outputs(self, index: Tensor, fill: float | None = None) -> Outputs:
        """Return the results of a batch of the rows ``index``.

        Args:
            index: Rows, in order, ``(T,)``.
            fill: Value of every float in the rows but the first; None keeps them.

        Raises:
            ValueError: No result has T rows.
        """

        def taken(name: str, value: Any) -> Any:
            if name not in self._names:
                return value
            rows = value.detach()[index.to(value.device)]
            if fill is not None and rows.is_floating_point():
                rows[1:] = fill
            return rows

        args = [taken(str(place), value) for place, value in enumerate(self._args)]
        kwargs = {name: taken(name, value) for name, value in self._kwargs.items()}
        torch.manual_seed(SEED)
        found = named_tensors(self._function(*args, **kwargs))
        by_row = {
            name: tensor.detach()
            for name, tensor in found.items()
            if tensor.ndim > 0 and tensor.shape[0] == len(index)
            if self._results is None or name in self._results
        }
        if not by_row:
            raise ValueError(f"no result has {len(index)} rows: nothing can be compared")
        return by_row


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
