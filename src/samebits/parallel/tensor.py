"""Each expert spread over ranks that see the same tokens, without splitting a contraction.

See ``tensor_passes`` for what travels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_bool, require_type
from samebits.autograd import refuse_second_derivatives
from samebits.backends.call import DIFFERENTIABLE, Call, Gradients, check_count, check_routing
from samebits.backends.operator import autocast_dtype, check_ids, on_device, outside_autocast
from samebits.backends.options import Options
from samebits.errors import must
from samebits.parallel.layer import run_over_ranks
from samebits.parallel.ranks import Ranks
from samebits.parallel.tensor_passes import CutPasses, CutTensors
from samebits.parallel.tensor_weights import TensorParallelWeights, require_ends_of_sums
from samebits.problem import ProbPlacement
from samebits.routing import Routing

_PLAIN = Activation()


def tensor_parallel_experts(
    x: Tensor,
    routing: Routing,
    weights: TensorParallelWeights,
    activation: Activation = _PLAIN,
    *,
    group: dist.ProcessGroup,
    ranks: Ranks | None = None,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    out_dtype: torch.dtype | None = None,
    num_valid_tokens: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts, each of them cut over ranks.

    A collective: every rank of ``group`` gives the same tokens, routing and wishes for gradients,
    gets the same output, and runs the same backward with the same gradient of it.

    Args:
        x: ``(T, H)``, the same on every rank.
        routing: Experts and probabilities, the same on every rank.
        weights: This rank's part.
        activation: See ``samebits.experts``.
        group: The ranks over which each expert is cut.
        ranks: Other ranks over which the experts are spread besides, whose tokens may differ; None
            means that each rank has its part of every expert. See ``parallel_experts``.
        placement: See ``samebits.experts``.
        out_dtype: See ``samebits.experts``.
        num_valid_tokens: See ``samebits.experts``.
        recompute: See ``samebits.experts``.

    Returns:
        ``(T, H)`` in ``out_dtype``; differentiable in ``x``, the probabilities (the same
        gradient on every rank) and the parameters (of this rank's part).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes, dtypes or ids disagree, or the weights are no part of a whole that is
            cut over ``group``. With ``ranks``, see ``parallel_experts``.
        UnsupportedError: The device has no kernels for this.

    Determinism: the bits do not depend on the number of ranks; on a GPU they are those of
    ``samebits.experts``, on a CPU those of one rank here (torch's products follow shapes).
    """
    require_type("group", group, dist.ProcessGroup)
    require_type("x", x, Tensor)
    require_type("routing", routing, Routing)
    require_type("weights", weights, TensorParallelWeights)
    require_type("activation", activation, Activation)
    require_bool("recompute", recompute)
    if ranks is not None:
        require_type("ranks", ranks, Ranks)
    given = _cast(CutTensors(x, routing.topk_probs, **_tensors(weights)))
    if out_dtype not in (None, given.x.dtype, torch.float32):
        rule = f"be None, {given.x.dtype} or torch.float32"
        raise ValueError(must("out_dtype", rule, out_dtype))
    total = weights.down.shape[0] if ranks is None else ranks.num_experts
    call = _checked(given, routing, total, num_valid_tokens)
    _check_parts(given, activation, dist.get_world_size(group))
    passes = CutPasses(
        group, activation, ProbPlacement(placement), weights.layout, weights.part_layout, out_dtype
    )
    if ranks is None:
        check_ids(call, total)
        out: Tensor = _TensorParallel.apply(  # type: ignore[no-untyped-call]
            passes, recompute, routing.topk_ids, num_valid_tokens, *given
        )
        return out
    held = len(ranks.held)
    if weights.down.shape[0] != held:
        raise ValueError(must("weights", f"hold {held} experts", weights.down.shape[0]))
    options = Options(activation, passes.placement, weights.layout, None, out_dtype, "auto")
    local = CutExperts(passes.for_arrivals(), recompute)
    agreement = f"cut over {dist.get_world_size(group)}"
    return run_over_ranks(call, options, ranks, local, agreement)


def _tensors(weights: TensorParallelWeights) -> dict[str, Any]:
    return {n: getattr(weights, n) for n in CutTensors._fields[2:]}


def _cast(given: CutTensors) -> CutTensors:
    """Return what autocast makes of the tensors; see ``samebits.experts``."""
    dtype = autocast_dtype(given.x.device)
    if dtype is None or torch.float64 in (given.x.dtype, given.down.dtype):
        return given
    narrowed = {n: t.to(dtype) for n, t in given._asdict().items() if t is not None}
    return given._replace(**{**narrowed, "topk_probs": given.topk_probs})


def _checked(
    given: CutTensors, routing: Routing, total: int, num_valid_tokens: Tensor | None
) -> Call:
    """Return the call, whose parameters are parts."""
    x = given.x
    if x.dim() != 2:
        raise ValueError(must("x", "have shape (T, H)", tuple(x.shape)))
    check_routing(routing, x)
    if routing.num_experts not in (None, total):
        raise ValueError(must("num_experts", f"be {total}", routing.num_experts))
    if num_valid_tokens is not None:
        check_count(num_valid_tokens, x)
    parts = given.gate_up, given.down, given.gate_up_bias, given.down_bias
    return Call(x, routing.topk_ids, given.topk_probs, *parts, None, num_valid_tokens)


def _check_parts(given: CutTensors, activation: Activation, size: int) -> None:
    """Raise unless the parameters are those of one of ``size`` ranks: kernels do not look."""
    x, down = given.x, given.down
    if down.dim() != 3 or down.shape[1] * size != x.shape[1]:
        rule = f"have shape (E, H / W, F) with H / W = {x.shape[1]} / {size}"
        raise ValueError(must("down", rule, tuple(down.shape)))
    experts, hidden, columns = down.shape
    require_ends_of_sums(columns, size)
    rows = activation.columns * columns // size
    shapes = {
        "gate_up": (experts, rows, x.shape[1]),
        "down": down.shape,
        "gate_up_bias": (experts, rows),
        "down_bias": (experts, hidden),
    }
    for name, shape in shapes.items():
        tensor: Tensor | None = getattr(given, name)
        if tensor is None:
            continue
        if tensor.shape != shape:
            rule = f"have shape {tuple(shape)}, F = {columns} cut over {size}"
            raise ValueError(must(name, rule, tuple(tensor.shape)))
        wide = name.endswith("bias") and tensor.dtype == torch.float32
        if not (wide or tensor.dtype == x.dtype) or tensor.device != x.device:
            rule = f"be {x.dtype} on {x.device}, as x"
            raise ValueError(must(name, rule, f"{tensor.dtype} on {tensor.device}"))


@dataclass(frozen=True, eq=False)
class CutExperts:
    """What a rank computes on arrivals where each expert is cut besides; see ``held.Local``."""

    in_blocks: ClassVar[bool] = True
    keeps: ClassVar[bool] = False

    passes: CutPasses
    recompute: bool

    def forward(self, there: Call, *, save: bool) -> tuple[Tensor, Tensor]:
        """See ``held.Local``."""
        nothing = there.x.new_empty(0)
        if there.down.shape[0] == 0:
            return there.x.new_empty(there.x.shape[0], there.down.shape[1]), nothing
        with outside_autocast(there.x.device), on_device(there.x.device):
            y, z = self.passes.forward(_given_of(there), there.topk_ids, None)
        return y, z if save and not self.recompute else nothing

    def backward(self, there: Call, z: Tensor, dout: Tensor, wanted: list[bool]) -> Gradients:
        """See ``held.Local``."""
        given = _given_of(there)
        if there.down.shape[0] == 0:
            zeros: Any = (None if t is None else torch.zeros_like(t) for t in given)
            columns = dout.new_zeros(dout.shape[0], there.down.shape[1])
            grads = CutTensors(*zeros)._replace(x=columns)
        else:
            kept = None if self.recompute else z
            with outside_autocast(there.x.device), on_device(there.x.device):
                grads = self.passes.backward(given, there.topk_ids, None, kept, dout)
        named = grads._asdict()
        names = [n for n, want in zip(DIFFERENTIABLE, wanted, strict=True) if want and n in named]
        return Gradients(**{n: named[n] for n in names})

    def whole(self, columns: Tensor) -> Tensor:
        """See ``held.Local``."""
        return self.passes.columns(columns)


def _given_of(call: Call) -> CutTensors:
    return CutTensors(*(getattr(call, name) for name in CutTensors._fields))


class _TensorParallel(torch.autograd.Function):
    """Tie the two passes together; saves the inputs and this rank's part of z."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: CutPasses,
        recompute: bool,
        ids: Tensor,
        counted: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        given = CutTensors(*tensors)
        with outside_autocast(given.x.device), on_device(given.x.device):
            out, z = passes.forward(given, ids, counted)
        ctx.save_for_backward(ids, counted, None if recompute else z, *tensors)
        ctx.passes = passes
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        ids, counted, z, *tensors = ctx.saved_tensors
        given = CutTensors(*tensors)
        dout = douts[0].to(given.x.dtype).contiguous()
        with outside_autocast(given.x.device), on_device(given.x.device):
            grads = ctx.passes.backward(given, ids, counted, z, dout)
        return None, None, None, None, *grads
