"""Megatron's fused activations on our operator: values, gradients, and no stale scalar."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from samebits import functional
from samebits.activation import Activation, apply
from samebits.errors import UnsupportedError
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.reference),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
CLAMP = 2.0
OFFSET = 0.5


def formula(
    activation: Activation,
    y: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    clamp_first: float | None = None,
) -> Tensor:
    """Return the contract's result for halves, in the dtype of ``y``, differentiable."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    z = y
    if clamp_first is not None:
        gate, up = z.chunk(2, -1)
        gate, up = gate.clamp(max=clamp_first), up.clamp(-clamp_first, clamp_first)
        z = torch.cat((gate, up), -1)
    if bias is not None:
        z = (z.to(wide) + bias.to(wide)).to(y.dtype)
    parts = z.to(wide).chunk(2, -1) if activation.gated else (z.to(wide), None)
    a = apply(activation, *parts)
    return (a if weights is None else a * weights.to(wide)).to(y.dtype)


SWIGLU = Activation()
CLAMPED = Activation(limit=CLAMP)
QUICK = Activation(alpha=1.702, linear_offset=OFFSET)
QUICK_CLAMPED = Activation(alpha=1.702, linear_offset=OFFSET, limit=CLAMP)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
F = functional
# name: our call, the formula's call; both take (y, bias, weights).
FORWARDS: dict[str, tuple[Call, Call]] = {
    "swiglu": (lambda y, b, w: F.swiglu(y), lambda y, b, w: formula(SWIGLU, y)),
    "bias_swiglu": (lambda y, b, w: F.bias_swiglu(y, b), lambda y, b, w: formula(SWIGLU, y, b)),
    "weighted_swiglu": (
        lambda y, b, w: F.weighted_swiglu(y, w),
        lambda y, b, w: formula(SWIGLU, y, None, w),
    ),
    "clamped_swiglu": (
        lambda y, b, w: F.clamped_swiglu(y, CLAMP),
        lambda y, b, w: formula(CLAMPED, y),
    ),
    "clamped_swiglu-tensor": (
        lambda y, b, w: F.clamped_swiglu(y, torch.tensor(CLAMP)),
        lambda y, b, w: formula(CLAMPED, y),
    ),
    "bias_clamped_swiglu": (
        lambda y, b, w: F.bias_clamped_swiglu(y, b, CLAMP),
        lambda y, b, w: formula(CLAMPED, y, b),
    ),
    "clamped_weighted_swiglu": (
        lambda y, b, w: F.clamped_weighted_swiglu(y, w, CLAMP),
        lambda y, b, w: formula(CLAMPED, y, None, w),
    ),
    "bias_swiglu_impl": (
        lambda y, b, w: F.bias_swiglu_impl(y, b, clamp_value=CLAMP),
        lambda y, b, w: formula(CLAMPED, y, b),
    ),
    "weighted_bias_swiglu_impl": (
        F.weighted_bias_swiglu_impl,
        lambda y, b, w: formula(SWIGLU, y, b, w),
    ),
    "quick_geglu": (
        lambda y, b, w: F.weighted_bias_quick_geglu_impl(y, b, w, linear_offset=OFFSET),
        lambda y, b, w: formula(QUICK, y, b, w),
    ),
    "quick_geglu-clamped": (
        lambda y, b, w: F.weighted_bias_quick_geglu_impl(
            y, None, w, linear_offset=OFFSET, clamp_value=CLAMP
        ),
        lambda y, b, w: formula(QUICK_CLAMPED, y, None, w),
    ),
    "quick_geglu-clamped-bias": (
        lambda y, b, w: F.weighted_bias_quick_geglu_impl(
            y, b, w, linear_offset=OFFSET, clamp_value=CLAMP
        ),
        lambda y, b, w: formula(QUICK, y, b, w, clamp_first=CLAMP),
    ),
    "squared_relu": (
        lambda y, b, w: F.weighted_squared_relu_impl(y, w),
        lambda y, b, w: formula(Activation(kind="relu2", gated=False), y, None, w),
    ),
}


def inputs(device: str, dtype: torch.dtype, *, rows: int = 6, columns: int = 40) -> list[Tensor]:
    """Return y (3 dimensions), bias and weights; no element of y sits exactly on the bound."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.randn(2, rows // 2, 2 * columns, generator=generator) * 2).to(dtype)
    y[y.abs() == CLAMP] = 1.0
    bias = torch.randn(2 * columns, generator=generator).to(dtype)
    weights = torch.rand(2, rows // 2, 1, generator=generator) + 0.1
    return [tensor.to(device) for tensor in (y, bias, weights)]


def with_gradients(call: Call, tensors: list[Tensor], dh: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    h = call(*leaves)
    grads = torch.autograd.grad(h, leaves, dh.to(h.dtype), allow_unused=True)
    zeros = [
        torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)
    ]
    return [h.detach().cpu(), *(grad.cpu() for grad in zeros)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_within_budget(device: str, name: str, dtype: torch.dtype) -> None:
    ours, expected = FORWARDS[name]
    tensors = inputs(device, dtype)
    shape = ours(*tensors).shape
    dh = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)

    actual = with_gradients(ours, tensors, dh)

    plain = with_gradients(expected, [t.cpu() for t in tensors], dh.cpu())
    exact = with_gradients(expected, [t.cpu().double() for t in tensors], dh.cpu().double())
    for what, *values in zip(("h", "dy", "dbias", "dweights"), actual, plain, exact, strict=True):
        assert_within_budget(*values, dtype, f"{name} {what}")


BACKS: dict[str, tuple[Callable[..., object], Call]] = {
    "swiglu": (lambda g, y, b, w: F.swiglu_back(g, y), FORWARDS["swiglu"][0]),
    "bias_swiglu": (lambda g, y, b, w: F.bias_swiglu_back(g, y, b), FORWARDS["bias_swiglu"][0]),
    "weighted_swiglu": (
        lambda g, y, b, w: F.weighted_swiglu_back(g, y, w),
        FORWARDS["weighted_swiglu"][0],
    ),
    "clamped_swiglu": (
        lambda g, y, b, w: F.clamped_swiglu_back(g, y, CLAMP),
        FORWARDS["clamped_swiglu"][0],
    ),
    "bias_clamped_swiglu": (
        lambda g, y, b, w: F.bias_clamped_swiglu_back(g, y, b, CLAMP),
        FORWARDS["bias_clamped_swiglu"][0],
    ),
    "clamped_weighted_swiglu": (
        lambda g, y, b, w: F.clamped_weighted_swiglu_back(g, y, w, torch.tensor(CLAMP)),
        FORWARDS["clamped_weighted_swiglu"][0],
    ),
}


@pytest.mark.parametrize("name", BACKS)
@pytest.mark.parametrize("device", DEVICES)
def test_explicit_backward_has_the_bits_of_autograd(device: str, name: str) -> None:
    back, forward = BACKS[name]
    tensors = inputs(device, torch.bfloat16)
    g = torch.randn_like(forward(*tensors))

    results = back(g, *tensors)

    _, dy, _, dweights = with_gradients(forward, tensors, g)
    dz, *rest = results if isinstance(results, tuple) else (results,)
    assert_bitwise_equal(dz.cpu(), dy, "dy")
    for dp in rest:
        assert_bitwise_equal(dp.cpu(), dweights, "dweights")


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_at_the_bound_is_one_in_every_order(device: str) -> None:
    y = torch.tensor([[CLAMP, CLAMP, -CLAMP, CLAMP]], device=device)
    bias, weights = torch.zeros(4, device=device), torch.ones(1, 1, device=device)

    for name in ("clamped_swiglu", "quick_geglu-clamped-bias"):
        _, dy, _, _ = with_gradients(
            FORWARDS[name][0], [y, bias, weights], torch.ones(1, 2, device=device)
        )
        assert (dy != 0).all(), name


STORING: dict[str, Callable[..., Tensor]] = {
    "bias_swiglu_impl": lambda y, w, **keep: F.bias_swiglu_impl(y, None, **keep),
    "bias_swiglu_impl-clamped": lambda y, w, **keep: F.bias_swiglu_impl(
        y, None, clamp_value=500.0, **keep
    ),
    "weighted_bias_swiglu_impl": lambda y, w, **keep: F.weighted_bias_swiglu_impl(
        y, None, w, **keep
    ),
    "weighted_bias_quick_geglu_impl": lambda y, w, **keep: F.weighted_bias_quick_geglu_impl(
        y, None, w, **keep
    ),
}


@pytest.mark.parametrize("name", STORING)
@pytest.mark.parametrize("device", DEVICES)
def test_input_kept_in_fp8_saturates_and_changes_only_the_gradient(device: str, name: str) -> None:
    y, _, weights = inputs(device, torch.bfloat16)
    y[0, 0, 0] = 1000.0
    kept = y.clone().requires_grad_()
    exact = y.clamp(-448, 448).to(torch.float8_e4m3fn).to(y.dtype).requires_grad_()

    h = STORING[name](kept, weights, fp8_input_store=True)
    h.sum().backward()

    assert_bitwise_equal(h, STORING[name](y, weights))
    STORING[name](exact, weights).sum().backward()
    assert kept.grad is not None
    assert exact.grad is not None
    assert_bitwise_equal(kept.grad, exact.grad)


@pytest.mark.reference
def test_tensors_for_the_host_are_marked() -> None:
    y, bias, _ = inputs("cpu", torch.bfloat16)
    leaf, flag = y.reshape(6, -1).requires_grad_(), bias.requires_grad_()

    F.bias_swiglu_impl(leaf, flag, cpu_offload_input=True)

    assert flag.activation_offloading is True  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", DEVICES)
def test_bias_of_each_row_and_one_weight_for_all(device: str) -> None:
    y, bias, _ = (t.float() for t in inputs(device, torch.bfloat16))
    y, weight = y.reshape(6, -1), torch.tensor([[0.5]], device=device)
    rows = bias.expand(6, -1).contiguous()

    ours = F.weighted_bias_swiglu_impl(y, rows, weight)

    many = torch.full((6, 1), 0.5, device=device)
    assert_bitwise_equal(ours, F.weighted_bias_swiglu_impl(y, bias, many))
    _, dweight = F.weighted_swiglu_back(torch.ones_like(ours), y, weight)
    assert dweight.shape == (1, 1)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.reference
def test_an_illegal_bound_raises(bad: float) -> None:
    y, bias, weights = (t.float() for t in inputs("cpu", torch.bfloat16))

    for clamp in (bad, torch.tensor(bad)):
        with pytest.raises(ValueError, match="limit must be finite and > 0"):
            F.clamped_swiglu(y, clamp)
    with pytest.raises(ValueError, match="limit must be finite and > 0"):
        F.weighted_bias_quick_geglu_impl(y, bias, weights, clamp_value=bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.gpu
def test_an_illegal_bound_on_a_gpu_is_nan(bad: float) -> None:
    y = inputs("cuda", torch.bfloat16)[0]

    assert F.clamped_swiglu(y, torch.tensor(bad, device="cuda")).isnan().all()


@pytest.mark.reference
def test_wrong_arguments_are_named() -> None:
    y, _, weights = inputs("cpu", torch.bfloat16)

    with pytest.raises(ValueError, match=r"clamp_value must be a number or have one element"):
        F.clamped_swiglu(y, torch.ones(2))
    with pytest.raises(UnsupportedError, match="clamp_value has no gradient"):
        F.clamped_swiglu(y, torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match=r"weights must have shape \(…, 1\)"):
        F.weighted_swiglu(y, weights[..., 0])
    with pytest.raises(ValueError, match=r"g must have shape"):
        F.swiglu_back(y, y)
    with pytest.raises(TypeError, match=r"g must be torch.bfloat16"):
        F.swiglu_back(torch.ones(2, 3, 40, dtype=torch.float16), y)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_clamp_before_the_bias_has_the_bits_of_its_tensor_form(
    dtype: torch.dtype, rows: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, 16, generator=generator).to(dtype)
    # At the bound, just past it, and NaN.
    y[0, :3] = y[1, 8:11] = torch.tensor([0.75, 0.7500001, float("nan")])
    bias, g = torch.randn(rows, 16, generator=generator), torch.randn(3, 8, generator=generator)

    results = []
    for bound in (0.75, torch.tensor(0.75)):
        inputs = [y.clone().requires_grad_(), bias.clone().requires_grad_()]
        h = F.weighted_bias_quick_geglu_impl(*inputs, torch.ones(3, 1), clamp_value=bound)
        results.append((h.detach(), *torch.autograd.grad(h, inputs, g.to(dtype))))
        assert_bitwise_equal(inputs[0].detach(), y, "the input")

    for number, tensor in zip(*results, strict=True):
        assert_bitwise_equal(number, tensor)


# The same scalar in the clamp and in arithmetic: what torch.compile is known to leave stale.
def mixed(x: Tensor, c: float | Tensor) -> Tensor:
    return F.clamped_swiglu(x * c, c + 0.125) * c + F.clamped_swiglu(x, c)


def mixed_quick(x: Tensor, c: float | Tensor) -> Tensor:
    bias = x.detach().reshape(-1, x.shape[-1])[0]
    weights = x[..., :1] * c
    plain = F.weighted_bias_quick_geglu_impl(x, None, weights, linear_offset=c, clamp_value=c)
    return plain + F.weighted_bias_quick_geglu_impl(x, bias, weights, clamp_value=c) + c


def mixed_back(x: Tensor, c: float | Tensor) -> Tensor:
    return F.clamped_swiglu_back(torch.ones_like(x[..., ::2]), x, c) * c


SEQUENCE = (
    ((1, 2), False, 1.0),
    ((1, 4), True, 0.5),
    ((1, 4), True, 1.0),
    ((3, 4), True, 0.25),
    ((3, 4), False, 2.0),
    ((1, 4), True, 0.5),
)
# With and without gradient, for one size and for any: no compilation for a new value of the scalar.
MOST_GRAPHS = 4


def differences(
    program: Callable[..., Tensor], device: str, *, dynamic: bool, tensor: bool
) -> float:
    """Return the largest difference between a compiled program and eager over the sequence."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic or None)
    worst = 0.0
    for shape, with_grad, value in SEQUENCE:
        grad = with_grad and program is not mixed_back
        x = torch.full(shape, 0.75, device=device)
        c = torch.tensor(value, device=device) if tensor else value
        results = []
        for function in (program, compiled):
            leaf = x.clone().requires_grad_(grad)
            out = function(leaf, c)
            results.append([out.detach()])
            if grad:
                results[-1] += torch.autograd.grad(out.sum(), leaf)
        for eager, ours in zip(*results, strict=True):
            worst = max(worst, float((eager - ours).abs().max()))
    assert counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    return worst


@pytest.mark.parametrize(
    ("program", "dynamic", "tensor"),
    [
        pytest.param(mixed, False, False, id="mixed"),
        pytest.param(mixed, True, False, id="mixed-dynamic"),
        pytest.param(mixed, False, True, id="mixed-tensor"),
        pytest.param(mixed_quick, True, False, id="quick-dynamic"),
        pytest.param(mixed_back, False, False, id="back"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_no_stale_scalar(
    device: str, program: Callable[..., Tensor], dynamic: bool, tensor: bool
) -> None:
    assert differences(program, device, dynamic=dynamic, tensor=tensor) == 0.0


SECOND_PROCESS = """
import sys
import torch
from samebits import functional as F
def program(x, c):
    return F.clamped_swiglu(x * c, c + 0.125) * c + F.clamped_swiglu(x, c)
device = sys.argv[1]
for dynamic, scalar in (
    (None, float), (True, float), (True, lambda text: torch.tensor(float(text), device=device))
):
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
    for value in map(scalar, sys.argv[2:]):
        leaves = [torch.full((1, 4), 0.75, device=device, requires_grad=True) for _ in "ab"]
        outs = [f(leaf, value) for f, leaf in zip((program, compiled), leaves)]
        assert torch.equal(*outs), (dynamic, value)
        grads = [torch.autograd.grad(out.sum(), leaf)[0] for out, leaf in zip(outs, leaves)]
        assert torch.equal(*grads), (dynamic, value)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_no_stale_scalar_in_a_second_process_with_a_warm_cache(device: str, tmp_path) -> None:
    import os

    environment = {
        **os.environ,  # noqa: TID251
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    for values in (("1.0", "0.5", "0.25"), ("0.25", "1.0", "0.5")):
        command = [sys.executable, "-c", SECOND_PROCESS, device, *values]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.reference
def test_limits_of_several_layers_in_one_compiled_function() -> None:
    limits = (None, 1.0, 0.5, 0.25)

    def layers(x: Tensor, scale: float) -> Tensor:
        for limit in limits:
            x = x + F.bias_swiglu_impl(
                x, None, clamp_value=None if limit is None else limit * scale
            ).repeat(1, 2)
        return x

    compiled = torch.compile(layers, fullgraph=True)

    for scale in (1.0, 2.0, 3.0, 1.0):
        x = torch.full((2, 4), 0.75)
        assert torch.equal(compiled(x, scale), layers(x, scale))


@pytest.mark.reference
def test_public_names() -> None:
    assert functional.__all__ == sorted(functional.__all__)
    assert all(callable(getattr(functional, name)) for name in functional.__all__)
