"""The operator boundary of permute and combine: what torch.compile and autograd see; torch only."""

from typing import Any

import torch
from torch import Tensor

from samebits.errors import UnsupportedError
from samebits.ops.permute import tuning
from samebits.ops.permute.tuning import Metadata

torch.library.define(
    "samebits::sort_slots",
    "(Tensor topk_ids, Tensor? num_valid_tokens, int num_local, int expert_start, int block_r)"
    " -> Tensor",
)
torch.library.define(
    "samebits::permute_forward",
    "(Tensor x, Tensor inverse, Tensor? probs, Tensor? offsets, int topk) -> Tensor",
)
torch.library.define(
    "samebits::permute_backward",
    "(Tensor drows, Tensor inverse, Tensor? probs, Tensor? x, int topk) -> (Tensor, Tensor)",
)
torch.library.define(
    "samebits::combine_forward",
    "(Tensor rows, Tensor inverse, Tensor? probs, int topk, ScalarType out_dtype) -> Tensor",
)
torch.library.define(
    "samebits::combine_backward",
    "(Tensor dout, Tensor inverse, Tensor? probs, Tensor? rows, Tensor? offsets, int topk,"
    " ScalarType dtype) -> (Tensor, Tensor)",
)


def neighbours(rows: Tensor) -> Tensor:
    """Return ``rows`` with the elements of a row side by side, as kernels read them; copied if not.

    Determinism: exact copies.
    """
    return rows if rows.shape[-1] == 1 or rows.stride(-1) == 1 else rows.contiguous()


def _pack(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    # An operator has a fixed number of results: an empty tensor stands for one not wanted.
    rows, dp = result
    return rows, rows.new_empty(0) if dp is None else dp


@torch.library.impl("samebits::sort_slots", "cpu")
def _sort_cpu(
    ids: Tensor, count: Tensor | None, num_local: int, start: int, block_r: int
) -> Tensor:
    from samebits.ops.permute import reference

    metadata = reference.metadata(
        ids, num_local, block_r, expert_start=start, num_valid_tokens=count
    )
    size = tuning.buffer_size(ids.numel(), num_local, block_r)
    buffer = torch.zeros(size, dtype=torch.int32)
    parts = tuning.unpack(buffer, ids.numel(), num_local, block_r)
    for mine, theirs in zip(
        (*parts[:3], *parts.tiles), (*metadata[:3], *metadata.tiles), strict=True
    ):
        mine.copy_(theirs)
    return buffer


@torch.library.impl("samebits::sort_slots", "cuda")
def _sort_cuda(*arguments: Any) -> Tensor:
    from samebits.ops.permute import kernel

    return kernel.launch_sort(*arguments)


@torch.library.register_fake("samebits::sort_slots")  # type: ignore[untyped-decorator]
def _sort_fake(ids: Tensor, *arguments: Any) -> Tensor:
    _, num_local, _, block_r = arguments
    size = tuning.buffer_size(ids.numel(), num_local, block_r)
    return ids.new_empty(size, dtype=torch.int32)


@torch.library.impl("samebits::permute_forward", "cpu")
def _permute_cpu(x: Tensor, inverse: Tensor, probs: Tensor | None, *arguments: Any) -> Tensor:
    from samebits.ops.permute import reference

    _, topk = arguments
    return reference.permute(x, inverse, topk, probs)


@torch.library.impl("samebits::permute_forward", "cuda")
def _permute_cuda(x: Tensor, inverse: Tensor, probs: Tensor | None, *arguments: Any) -> Tensor:
    from samebits.ops.permute import kernel

    offsets, topk = arguments
    return kernel.launch_permute(neighbours(x), inverse, topk, probs, offsets=offsets)


@torch.library.register_fake("samebits::permute_forward")  # type: ignore[untyped-decorator]
def _permute_fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape[0] * arguments[3], x.shape[1])


@torch.library.impl("samebits::permute_backward", "cpu")
def _permute_backward_cpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    from samebits.ops.permute import reference

    drows, inverse, probs, x, topk = arguments
    return _pack(reference.permute_backward(drows, inverse, topk, probs, x))


@torch.library.impl("samebits::permute_backward", "cuda")
def _permute_backward_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    from samebits.ops.permute import kernel

    drows, inverse, probs, x, topk = arguments
    x = None if x is None else neighbours(x)
    return _pack(kernel.launch_permute_backward(neighbours(drows), inverse, topk, probs, x))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("samebits::permute_backward")  # type: ignore[untyped-decorator]
def _permute_backward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    drows, inverse, _, x, topk = arguments
    tokens = inverse.shape[0] // topk
    dp = None if x is None else drows.new_empty(tokens, topk, dtype=_wide(drows.dtype))
    return _pack((drows.new_empty(tokens, drows.shape[1]), dp))


@torch.library.impl("samebits::combine_forward", "cpu")
def _combine_cpu(*arguments: Any) -> Tensor:
    from samebits.ops.permute import reference

    rows, inverse, probs, topk, out_dtype = arguments
    return reference.combine(rows, inverse, topk, probs, out_dtype)


@torch.library.impl("samebits::combine_forward", "cuda")
def _combine_cuda(*arguments: Any) -> Tensor:
    from samebits.ops.permute import kernel

    rows, inverse, probs, topk, out_dtype = arguments
    return kernel.launch_combine(neighbours(rows), inverse, topk, probs, out_dtype)


@torch.library.register_fake("samebits::combine_forward")  # type: ignore[untyped-decorator]
def _combine_fake(*arguments: Any) -> Tensor:
    rows, inverse, _, topk, out_dtype = arguments
    out: Tensor = rows.new_empty(inverse.shape[0] // topk, rows.shape[1], dtype=out_dtype)
    return out


@torch.library.impl("samebits::combine_backward", "cpu")
def _combine_backward_cpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    from samebits.ops.permute import reference

    dout, inverse, probs, rows, _, topk, dtype = arguments
    return _pack(reference.combine_backward(dout, inverse, topk, probs, rows, dtype))


@torch.library.impl("samebits::combine_backward", "cuda")
def _combine_backward_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    from samebits.ops.permute import kernel

    dout, inverse, probs, rows, offsets, topk, dtype = arguments
    rows = None if rows is None else neighbours(rows)
    return _pack(
        kernel.launch_combine_backward(
            neighbours(dout), inverse, topk, probs, rows, dtype, offsets=offsets
        )
    )


@torch.library.register_fake("samebits::combine_backward")  # type: ignore[untyped-decorator]
def _combine_backward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    dout, _, _, rows, _, topk, dtype = arguments
    tokens, hidden = dout.shape
    dp = None if rows is None else dout.new_empty(tokens, topk, dtype=_wide(dtype))
    return _pack((dout.new_empty(tokens * topk, hidden, dtype=dtype), dp))


def _refuse_second_derivative() -> None:
    # Grad mode is on in a backward only for create_graph.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError("permute and combine are differentiable once, not twice")


class _Permute(torch.autograd.Function):
    """Tie the two operators together; saves x only where probabilities want a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, inverse, probs, _, topk = arguments
        kept = x if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(inverse, probs, kept)
        ctx.topk = topk
        return torch.ops.samebits.permute_forward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        inverse, probs, x = ctx.saved_tensors
        dx, dp = torch.ops.samebits.permute_backward(drows, inverse, probs, x, ctx.topk)
        return dx, None, None if x is None else dp.to(probs.dtype), None, None


class _Combine(torch.autograd.Function):
    """Tie the two operators together; saves the rows only where probabilities want a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        rows, inverse, probs, offsets, topk, out_dtype = arguments
        kept = rows if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(inverse, probs, kept, offsets)
        ctx.options = (topk, rows.dtype)
        return torch.ops.samebits.combine_forward(rows, inverse, probs, topk, out_dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        inverse, probs, rows, offsets = ctx.saved_tensors
        drows, dp = torch.ops.samebits.combine_backward(
            dout, inverse, probs, rows, offsets, *ctx.options
        )
        return drows, None, None if rows is None else dp.to(probs.dtype), None, None, None


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def sort(
    topk_ids: Tensor, num_valid_tokens: Tensor | None, num_local: int, start: int, block_r: int
) -> Metadata:
    """Return the metadata through the operator; arguments are validated already.

    Determinism: exact integers.
    """
    buffer = torch.ops.samebits.sort_slots(topk_ids, num_valid_tokens, num_local, start, block_r)
    return tuning.unpack(buffer, topk_ids.numel(), num_local, block_r)


def run_permute(
    x: Tensor, inverse: Tensor, probs: Tensor | None, offsets: Tensor | None, topk: int
) -> Tensor:
    """Return rows through the operator; arguments are validated already.

    Determinism: elementwise.
    """
    arguments = (x, inverse, probs, offsets, topk)
    if _wants_gradient(x, probs):
        return _Permute.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.samebits.permute_forward(*arguments)  # type: ignore[no-any-return]


def run_combine(
    rows: Tensor,
    inverse: Tensor,
    probs: Tensor | None,
    offsets: Tensor | None,
    topk: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return sums by token through the operator; arguments are validated already.

    Determinism: fixed order.
    """
    if _wants_gradient(rows, probs):
        return _Combine.apply(rows, inverse, probs, offsets, topk, out_dtype)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.samebits.combine_forward(rows, inverse, probs, topk, out_dtype)  # type: ignore[no-any-return]
