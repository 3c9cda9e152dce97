"""Gradients into ``main_grad`` on a GPU, and later ones: those of autograd before rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from samebits import Activation, Layout, Routing, WeightGradients
from samebits.backends import passes
from samebits.backends.recorder import Pass
from samebits.nn import Experts
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

BACKENDS = pytest.mark.parametrize("backend", ["fused", "grouped"])
EXPERTS, HIDDEN, COLUMNS, TOPK = 8, 256, 160, 3
OPTIONS = {
    "num_experts": EXPERTS,
    "hidden_size": HIDDEN,
    "intermediate_size": COLUMNS,
    "activation": Activation(alpha=1.702, limit=2.0, linear_offset=1.0),
    "layout": Layout(interleave=1),
    "gate_up_bias": True,
    "down_bias": True,
    "device": "cuda",
}


def _module(
    backend: str, dtype: torch.dtype = torch.bfloat16, orientation: str = "out_in"
) -> Experts:
    torch.manual_seed(1)
    return Experts(**OPTIONS, backend=backend, dtype=dtype, orientation=orientation)


def _with_buffers(module: Experts, value: float = 0.0, *, delayed: bool = False) -> Experts:
    module.weight_gradients = WeightGradients(main_grad=True, delayed=delayed)
    for parameter in module.parameters():
        parameter.main_grad = torch.full_like(parameter, value, dtype=torch.float32).detach()
    return module


def _microbatch(dtype: torch.dtype, seed: int, tokens: int = 300) -> tuple[Tensor, Routing, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to("cuda", dtype)
    # One expert has no rows.
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(-1)[:, :TOPK].to("cuda")
    probs = torch.rand(tokens, TOPK, generator=generator).cuda()
    flow = torch.randn(tokens, HIDDEN, generator=generator).to("cuda", dtype)
    return x, Routing(ids, probs, EXPERTS), flow


def _step(module: Experts, seed: int = 0) -> Tensor:
    x, routing, flow = _microbatch(module.down.dtype, seed)
    x.requires_grad_()
    module(x, routing).backward(flow)
    assert x.grad is not None
    return x.grad


@BACKENDS
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_they_are_the_gradients_of_autograd(
    dtype: torch.dtype, orientation: str, backend: str
) -> None:
    plain = _module(backend, dtype, orientation)
    module = _with_buffers(_module(backend, dtype, orientation))

    assert_bitwise_equal(_step(module), _step(plain))

    for name, parameter in module.named_parameters():
        expected = plain.get_parameter(name).grad
        assert_bitwise_equal(parameter.main_grad.to(dtype) + 0.0, expected + 0.0, name)
        unrounded = bool((parameter.main_grad != parameter.main_grad.to(dtype)).any())
        assert unrounded == (dtype != torch.float32), name


@BACKENDS
def test_microbatches_are_added_in_their_order_each_with_one_rounding(backend: str) -> None:
    alone = []
    for seed in range(4):
        single = _with_buffers(_module(backend))
        _step(single, seed)
        alone.append(single)
    together = _with_buffers(_module(backend), 0.5)

    for seed in range(4):
        _step(together, seed)

    for name, parameter in together.named_parameters():
        expected = torch.full_like(parameter.main_grad, 0.5)
        for single in alone:
            expected = expected + single.get_parameter(name).main_grad
        assert_bitwise_equal(parameter.main_grad, expected, name)


@pytest.mark.usefixtures("unpoisoned_memory")
@pytest.mark.parametrize("delayed", [False, True])
def test_steps_with_buffers_are_repeated_by_their_launches(delayed: bool) -> None:
    module = _with_buffers(_module("fused"), delayed=delayed)
    alone = _with_buffers(_module("fused"), delayed=delayed)
    passes.forget()
    # Each alone takes the long way, or is recorded.
    for owner, seeds in ((alone, (0,)), (module, (0, 0, 0, 0))):
        for seed in seeds:
            _step(owner, seed)
            if delayed:
                owner.backward_dw()

    assert [known for known in passes.passes() if not isinstance(known, Pass)] == []
    for name, parameter in module.named_parameters():
        single = alone.get_parameter(name).main_grad
        expected = ((single + single) + single) + single
        assert_bitwise_equal(parameter.main_grad, expected, name)


@BACKENDS
def test_any_storage_of_a_buffer_has_the_same_bits(backend: str) -> None:
    module, other = _with_buffers(_module(backend)), _with_buffers(_module(backend))
    for parameter in other.parameters():
        # From an odd address on, with a gap behind each expert.
        size = parameter[0].numel() + 5
        memory = torch.zeros(EXPERTS * size + 1, device="cuda")[1:].view(EXPERTS, size)
        parameter.main_grad = memory[:, :-5].unflatten(1, parameter.shape[1:])

    for seed in range(2):
        _step(module, seed)
        _step(other, seed)

    for name, parameter in module.named_parameters():
        assert_bitwise_equal(other.get_parameter(name).main_grad, parameter.main_grad, name)


@BACKENDS
def test_a_buffer_to_be_overwritten_is_also_where_an_expert_has_no_rows(backend: str) -> None:
    expected = _with_buffers(_module(backend))
    module = _with_buffers(_module(backend), torch.nan)
    for parameter in module.parameters():
        parameter.overwrite_main_grad = True

    _step(expected)
    _step(module)

    for name, parameter in module.named_parameters():
        reference = expected.get_parameter(name).main_grad
        assert_bitwise_equal(parameter.main_grad + 0.0, reference, name)


@BACKENDS
@pytest.mark.parametrize("main_grad", [False, True])
def test_delayed_gradients_have_the_same_bits(main_grad: bool, backend: str) -> None:
    plain, module = _module(backend), _module(backend)
    if main_grad:
        plain, module = _with_buffers(plain), _with_buffers(module)
    module.weight_gradients = WeightGradients(main_grad=main_grad, delayed=True)

    for seed in range(2):
        assert_bitwise_equal(_step(module, seed), _step(plain, seed))
    for _ in range(2):
        module.backward_dw()

    attribute = "main_grad" if main_grad else "grad"
    for name, parameter in module.named_parameters():
        expected = getattr(plain.get_parameter(name), attribute)
        assert_bitwise_equal(getattr(parameter, attribute), expected, name)


@BACKENDS
def test_a_captured_step_adds_at_every_replay(backend: str) -> None:
    module, expected = _with_buffers(_module(backend)), _with_buffers(_module(backend))
    x, routing, flow = _microbatch(torch.bfloat16, 0)

    def step(of: Experts) -> None:
        of(x, routing).backward(flow)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(module)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(module)
    for parameter in module.parameters():
        parameter.main_grad.zero_()

    for _ in range(3):
        graph.replay()
        step(expected)

    for name, parameter in module.named_parameters():
        assert_bitwise_equal(parameter.main_grad, expected.get_parameter(name).main_grad, name)


def _peak(function: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@BACKENDS
def test_no_gradient_of_a_matrix_is_held_beside_its_buffer(backend: str) -> None:
    """A step of few tokens and large matrices takes less than one of them."""
    options = OPTIONS | {"hidden_size": 2048, "intermediate_size": 2048}
    module = Experts(**options, backend=backend, dtype=torch.bfloat16)
    x, routing, flow = _microbatch(torch.bfloat16, 0, tokens=16)
    x, flow = x.repeat(1, 8), flow.repeat(1, 8)

    def step() -> None:
        module(x, routing).backward(flow)

    step()
    module.zero_grad()
    plain = _peak(step)
    module.zero_grad()
    _with_buffers(module)
    step()
    buffered = _peak(step)

    smallest = min(module.down.nbytes, module.gate_up.nbytes)
    assert plain > smallest, f"{plain} of {smallest}"
    assert buffered < smallest / 2, f"{buffered} of {smallest}"


@BACKENDS
def test_frozen_weights_skip_their_products(backend: str) -> None:
    module = _module(backend)

    def kernels() -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _step(module)
            torch.cuda.synchronize()
        return [event.name for event in profile.events()]

    _step(module)
    whole = kernels()
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        module.get_parameter(name).requires_grad_(False)
    _step(module)
    frozen = kernels()

    def count(names: list[str]) -> int:
        return sum("weight_gradient" in name or "chunk_sums" in name for name in names)

    assert count(whole) == 4
    assert count(frozen) == 0
    assert len(frozen) < len(whole)
