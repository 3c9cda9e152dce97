"""A layer with 8-bit activations, put together from the definitions."""

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.formats.descriptor import WeightFormat
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.packing import ScaleRule
from samebits.formats.weights import QuantizedWeights
from samebits.ops.quantize.reference import (
    activation_and_quantize,
    permute_and_quantize,
)
from samebits.ops.scaled_gemm.reference import scaled_product
from samebits.problem import ProbPlacement
from samebits.routing import Permutation, Routing, require_ids

_PLAIN = Activation()


@torch.no_grad()
def w8a8_experts(
    x: Tensor,
    routing: Routing,
    weights: QuantizedWeights,
    activation: Activation = _PLAIN,
    *,
    row_format: WeightFormat,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    scale_rule: ScaleRule | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts, with x and h quantised by row.

    Args:
        x: ``(T, H)`` in the dtype that the weights stand for.
        routing: Experts and probabilities of each token.
        weights: FP8 in blocks of 128 columns with ``ROWS_FP8``, MXFP8 or MXFP4 with ``MXFP8``.
            They are experts 0 … E - 1 of the routing's N.
        activation: The function between the projections.
        row_format: Of x and h.
        placement: Where the probability is multiplied in.
        scale_rule: Of the rows' scales; see ``samebits.formats.packing``.

    Returns:
        ``(T, H)`` in the dtype of ``x``, without a gradient.

    Raises:
        TypeError: An argument has the wrong type; ``weights`` that are not quantised too.
        ValueError: Shapes, dtypes, devices or formats do not go together, or an id is no expert.
        UnsupportedError: The weights have a post-expert norm, or stand for fp64.

    Determinism: repeatable; with fp32 scales each row is independent of the others.
    """
    _check(x, routing, weights, activation)
    if weights.norm is not None or weights.dtype == torch.float64:
        raise UnsupportedError("w8a8_experts has neither a post-expert norm nor fp64")
    placement = ProbPlacement(placement)
    experts, topk = weights.down.shape[0], routing.topk_ids.shape[1]
    permutation = Permutation.of(routing.topk_ids, experts)
    probs = routing.topk_probs.float()
    placed = {p: probs if p == placement else None for p in ProbPlacement}
    rows = permute_and_quantize(
        x, permutation.inverse, topk, placed[ProbPlacement.FC1_INPUT], row_format, scale_rule
    )
    by_row = probs.reshape(-1)[permutation.slots.clamp(max=probs.numel() - 1)]
    on_hidden = by_row if placement == ProbPlacement.FC2_INPUT else None
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    bounds = permutation.offsets.tolist()
    for expert in range(experts):
        span = slice(bounds[expert], bounds[expert + 1])
        if span.start == span.stop:
            continue
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert].float()
        z = scaled_product(_rows_of(rows, span), weights.gate_up, expert, bias)
        p = None if on_hidden is None else on_hidden[span]
        h = activation_and_quantize(
            z.to(x.dtype), activation, weights.layout, p, row_format, scale_rule
        )
        addend = None if weights.down_bias is None else weights.down_bias[expert].float()
        if addend is not None and p is not None:
            addend = addend * p[:, None]
        y = scaled_product(h, weights.down, expert, addend).to(x.dtype).float()
        if placement == ProbPlacement.FC2_OUTPUT:
            y = y * by_row[span, None]
        out.index_add_(0, permutation.slots[span] // topk, y)
    return out.to(x.dtype)


def _check(x: Tensor, routing: Routing, weights: QuantizedWeights, activation: Activation) -> None:
    """Raise unless the arguments are a layer, by the rules of ``samebits.experts``."""
    require_type("x", x, Tensor)
    require_type("routing", routing, Routing)
    require_type("weights", weights, QuantizedWeights)
    require_type("activation", activation, Activation)
    experts, hidden, columns = weights.down.shape
    expected = f"{weights.dtype} of shape (T, {hidden}) on {weights.gate_up.device}"
    shape = f"(T, {x.shape[1]})" if x.dim() == 2 else str(tuple(x.shape))
    actual = f"{x.dtype} of shape {shape} on {x.device}"
    if actual != expected:
        raise ValueError(must("x", f"be {expected}", actual))
    ids = routing.topk_ids
    if ids.shape[0] != x.shape[0] or ids.shape[1] < 1 or ids.device != x.device:
        rule = f"have shape ({x.shape[0]}, K), K >= 1, on {x.device}"
        raise ValueError(must("topk_ids", rule, f"{tuple(ids.shape)} on {ids.device}"))
    if weights.gate_up.shape[1] != activation.columns * columns:
        rule = f"have {activation.columns} * F = {activation.columns * columns} rows"
        raise ValueError(must("gate_up", rule, weights.gate_up.shape[1]))
    num_experts = experts if routing.num_experts is None else routing.num_experts
    if num_experts < experts:
        raise ValueError(must("num_experts", f"be at least E = {experts}", num_experts))
    require_ids(ids, num_experts)


def _rows_of(rows: QuantizedMatrix, span: slice) -> QuantizedMatrix:
    return rows.map(lambda tensor: tensor[:, span])
