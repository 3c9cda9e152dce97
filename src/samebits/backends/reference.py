"""The specification in torch: one loop over experts, every option, differentiable, any device.

Written to be read beside CONTRACT.md sections 2, 3 and 5; nothing here is tuned. Values are rounded
to the working dtype exactly where ``_round`` is called; all else is fp32 (fp64 for fp64), with
exact products. Gradients are autograd's through these rounding points.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samebits import activation as act
from samebits.autograd import recording
from samebits.backends import eight_bits
from samebits.backends.call import (
    DIFFERENTIABLE,
    Call,
    Gradients,
    accumulate_dtype,
    quantized,
    weights_of_experts,
)
from samebits.ops.quantize.reference import quantize_rows
from samebits.ops.scaled_gemm.reference import scaled_product
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.routing import Permutation
from samebits.weight_gradients import Buffer
from samebits.weights import split_gate_up

NAME = "reference"


def why_not(problem: Problem) -> str | None:
    """Return why not; the reference runs nearly every problem, on any device that torch has.

    Determinism: pure function of the problem.
    """
    return eight_bits.why_not(problem)


def notes(problem: Problem) -> str | None:
    """Return what is not promised here: bits may depend on T through torch's matrix products."""
    return (
        "row independence is not promised, nor equal bits for (E, 2F, H) and (E, H, 2F) storage: "
        "torch chooses its matrix product by row count and strides"
    )


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; sums in the contract's order except inside torch's matrix products.
    """
    out, z = compute(problem, call)
    rows = call.topk_ids.numel() if save else 0
    saved = z.new_zeros(rows, call.gate_up.shape[1])
    if save:
        saved[: z.shape[0]] = z
    return out, saved


def recomputed(problem: Problem, call: Call) -> Tensor:
    """Return z alone, as ``forward`` saves it.

    Determinism: that of ``forward``.
    """
    return forward(problem, call, save=True)[1]


def backward(
    problem: Problem,
    call: Call,
    z: Tensor,
    dout: Tensor,
    wanted: tuple[bool, ...],
    into: Mapping[str, Buffer],
    *,
    spend: bool = False,
) -> Gradients:
    """Return the wanted gradients by autograd through ``compute``, which runs again.

    Determinism: repeatable.
    """
    del z
    names = [n for n, want in zip(DIFFERENTIABLE, wanted, strict=True) if want]
    tensors = {n: t for n in DIFFERENTIABLE if (t := getattr(call, n)) is not None}
    leaves = {
        # A gradient has the dtype of its leaf: that of sums, where it is stored unrounded.
        n: (t.detach().to(accumulate_dtype(problem)) if n in into else t.detach()).requires_grad_(
            n in names
        )
        for n, t in tensors.items()
    }
    with recording():
        out, _ = compute(problem, call._replace(**leaves))
        grads = torch.autograd.grad(
            out, [leaves[n] for n in names], dout, allow_unused=True, materialize_grads=True
        )
    found = dict(zip(names, grads, strict=True))
    for name, buffer in into.items():
        buffer.store(found.pop(name))
    return Gradients(**found)


def compute(problem: Problem, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)`` by plain differentiable torch code; ``z`` holds the kept rows only.

    Determinism: see ``forward``.
    """
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    permutation = Permutation.of(
        call.topk_ids,
        problem.E,
        expert_start=problem.expert_start,
        num_valid_tokens=call.num_valid_tokens,
    )
    bounds = permutation.offsets.tolist()
    kept = permutation.slots[: bounds[-1]]
    probs = call.topk_probs.reshape(-1).to(wide)
    out = call.x.new_zeros(call.x.shape, dtype=wide)
    all_z = []
    for expert in range(problem.E):
        slots = kept[bounds[expert] : bounds[expert + 1]]
        if slots.numel() == 0:
            continue
        tokens, p = slots // problem.K, probs[slots][:, None]
        z, y = _expert(problem, call, expert, call.x[tokens], p)
        if problem.placement == ProbPlacement.FC2_OUTPUT:
            y = y * p
        # Experts ascend, so every token's terms are added by ascending row, from +0.0.
        out = out.index_add(0, tokens, y)
        all_z.append(z)
    z = torch.cat(all_z) if all_z else call.x.new_zeros(0, call.gate_up.shape[1])
    return _connect(out, call).to(DTYPES[problem.result_dtype]), z.to(dtype)


def _expert(
    problem: Problem, call: Call, expert: int, x: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rounded ``z`` and ``y`` of one expert's rows, both in the accumulation dtype."""
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]

    def _round(value: Tensor) -> Tensor:
        return value.to(dtype).to(wide)

    x = x.to(wide)
    if problem.placement == ProbPlacement.FC1_INPUT:
        x = _round(x * p)
    z = _product(problem, call, "gate_up", expert, x)
    if call.gate_up_bias is not None:
        z = z + call.gate_up_bias[expert].to(wide)
    z = _round(z)
    gate, up = split_gate_up(z, problem.layout) if problem.activation.gated else (z, None)
    h = act.apply(problem.activation, gate, up)
    if problem.placement == ProbPlacement.FC2_INPUT:
        h = h * p
    y = _product(problem, call, "down", expert, _round(h))
    if call.down_bias is not None:
        bias = call.down_bias[expert].to(wide)
        y = y + (p * bias if problem.placement == ProbPlacement.FC2_INPUT else bias)
    if call.norm_scale is not None and problem.norm_eps is not None:
        y = y * call.norm_scale.to(wide)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + problem.norm_eps)
    return z, _round(y)


def _product(problem: Problem, call: Call, name: str, expert: int, rows: Tensor) -> Tensor:
    """Return the product of rows with an expert's projection, not yet rounded."""
    only = slice(expert, expert + 1)
    if problem.row_format is None:
        return rows @ weights_of_experts(problem, call, name, only)[0].to(rows.dtype).T
    matrix = quantized(problem, call, name).select(only)
    return scaled_product(quantize_rows(rows, problem.row_format), matrix, 0)


def _connect(out: Tensor, call: Call) -> Tensor:
    """Keep every parameter in the graph: with no rows at all its gradient is 0, never None."""
    if not torch.is_grad_enabled():
        return out
    for name in DIFFERENTIABLE:
        tensor = getattr(call, name)
        if tensor is not None and tensor.requires_grad:
            out = out + tensor.reshape(-1)[:0].sum().to(out.dtype)
    return out
