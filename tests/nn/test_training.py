"""What training loops do with a layer: compile, accumulate, scale, freeze; on CPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from layers import (
    COLUMNS,
    EXPERTS,
    EXPERTS_OPTIONS,
    HIDDEN,
    MOES,
    TOPK,
    make_experts,
    make_routing,
    tokens,
)
from samebits import ExpertWeights, Routing, experts
from samebits.nn import Experts
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

BACKENDS = pytest.mark.parametrize("backend", ["reference", "grouped"])
EVERY = pytest.mark.parametrize("name", sorted(EXPERTS_OPTIONS))


def _step(layer: Callable[..., Tensor], module: Experts, count: int = 9, seed: int = 0) -> None:
    x, routing = tokens(count, module.gate_up.dtype, seed), make_routing(count, seed=seed)
    layer(x.requires_grad_(), routing).square().sum().backward()


def _grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", ["gpt-oss", "fc1-input", "norm", "bf16"])
def test_one_compiled_step_serves_every_token_count_with_the_bits_of_eager(name: str) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name])
    twin = copy.deepcopy(module)
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=counting)
    for count in (12, 33, 17):
        _step(module, module, count)
        _step(compiled, twin, count)

        for parameter, grad in _grads(module).items():
            assert_bitwise_equal(_grads(twin)[parameter], grad, parameter)
    assert graphs == 1


@pytest.mark.parametrize("name", ["whole", "whole-bf16"])
def test_a_compiled_checkpointed_layer_under_autocast_has_the_bits_of_eager(name: str) -> None:
    layer = MOES[name]()
    twin = copy.deepcopy(layer)
    x = tokens(dtype=next(layer.parameters()).dtype)

    def step(run: Callable[[Tensor], Tensor]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = run(x.clone().requires_grad_())
        out.float().square().sum().backward()

    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager")
    step(layer)
    step(lambda leaf: checkpoint(compiled, leaf, use_reentrant=False))

    for parameter, grad in _grads(layer).items():
        assert_bitwise_equal(_grads(twin)[parameter], grad, parameter)


@BACKENDS
@EVERY
def test_microbatches_add_up_in_their_order(name: str, backend: str) -> None:
    module = make_experts(**(EXPERTS_OPTIONS[name] | {"backend": backend}))
    alone = []
    for seed in range(3):
        single = copy.deepcopy(module)
        _step(single, single, seed=seed)
        alone.append(_grads(single))

    places = []
    for seed in range(3):
        _step(module, module, seed=seed)
        places.append({n: grad.data_ptr() for n, grad in _grads(module).items()})

    assert places[0] == places[1] == places[2]
    for parameter, total in _grads(module).items():
        expected = alone[0][parameter] + alone[1][parameter] + alone[2][parameter]
        assert_bitwise_equal(total, expected, parameter)


def _events(function: Callable[[], object]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as result:
        function()
    return list(result.events())


@pytest.mark.parametrize("name", ["plain", "in-out", "interleave-16", "gpt-oss"])
def test_gradients_come_in_the_storage_of_their_parameters_without_a_copy(name: str) -> None:
    module = make_experts(**(EXPERTS_OPTIONS[name] | {"backend": "grouped"}))
    shapes = [list(module.gate_up.shape), list(module.down.shape)]
    shapes += [[shape[0], shape[2], shape[1]] for shape in shapes]

    def moved(events: list[Any]) -> list[str]:
        names = ("aten::clone", "aten::copy_", "aten::contiguous", "aten::add", "aten::add_")
        large = [event for event in events if any(shape in shapes for shape in event.input_shapes)]
        return [event.name for event in large if event.name in names]

    first = _events(lambda: _step(module, module))
    second = _events(lambda: _step(module, module))

    for matrix in (module.gate_up, module.down):
        assert matrix.grad is not None
        assert matrix.grad.stride() == matrix.stride()
    assert moved(first) == []
    # The sum of two microbatches, in place.
    assert moved(second) == ["aten::add_", "aten::add_"]


def test_views_of_one_stacked_buffer_get_a_gradient_without_a_copy() -> None:
    """The parameters of all layers in one tensor, as some trainers hold them."""
    buffer = nn.Parameter(torch.randn(2, EXPERTS, 3 * COLUMNS * HIDDEN) / 8)

    def weights(layer: int) -> ExpertWeights:
        parts = buffer[layer].split([2 * COLUMNS * HIDDEN, COLUMNS * HIDDEN], 1)
        return ExpertWeights(
            gate_up=parts[0].unflatten(1, (2 * COLUMNS, HIDDEN)),
            down=parts[1].unflatten(1, (HIDDEN, COLUMNS)),
        )

    out = experts(experts(tokens(), make_routing(), weights(0)), make_routing(), weights(1))
    out.square().sum().backward()

    own = [weights(layer).map(lambda t: t.detach().clone().requires_grad_()) for layer in (0, 1)]
    out = experts(experts(tokens(), make_routing(), own[0]), make_routing(), own[1])
    out.square().sum().backward()
    assert buffer.grad is not None
    for layer in (0, 1):
        expected = [own[layer].gate_up.grad.flatten(1), own[layer].down.grad.flatten(1)]
        assert_bitwise_equal(buffer.grad[layer], torch.cat(expected, 1))


def _products(module: Experts, x: Tensor, routing: Routing) -> float:
    """Floating-point operations of the products of one backward."""
    out = module(x, routing)
    events = _events(lambda: out.backward(torch.ones_like(out)))
    return sum(event.flops or 0 for event in events if event.name in ("aten::mm", "aten::bmm"))


# In units of R·H·F operations: what the products of each gradient cost.
OF_DH, OF_DX, OF_GATE_UP, OF_DOWN = 2, 4, 4, 2


def _cost(grouped: int, reference: int | None = None) -> dict[str, int]:
    # The reference runs its forward again, and has the outputs that probabilities multiply.
    forward = OF_GATE_UP + OF_DOWN
    return {
        "grouped": grouped,
        "reference": forward + (grouped if reference is None else reference),
    }


@pytest.mark.parametrize(
    ("wanted", "cost"),
    [
        ({"x", "probs", "gate_up", "down"}, _cost(OF_DH + OF_DX + OF_GATE_UP + OF_DOWN)),
        ({"x", "probs", "gate_up"}, _cost(OF_DH + OF_DX + OF_GATE_UP)),
        ({"gate_up", "down"}, _cost(OF_DH + OF_GATE_UP + OF_DOWN)),
        ({"x", "probs"}, _cost(OF_DH + OF_DX)),
        ({"x"}, _cost(OF_DH + OF_DX)),
        ({"probs"}, _cost(OF_DH, reference=0)),
        ({"gate_up"}, _cost(OF_DH + OF_GATE_UP)),
        ({"down"}, _cost(OF_DOWN)),
        ({"gate_up_bias"}, _cost(OF_DH)),
        ({"down_bias"}, _cost(0)),
    ],
)
@BACKENDS
def test_what_is_frozen_costs_no_product(
    wanted: set[str], cost: dict[str, int], backend: str
) -> None:
    # fp64, where every product is an aten::mm.
    module = make_experts(gate_up_bias=True, down_bias=True, backend=backend, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in wanted)
    routing = make_routing()
    probs = routing.topk_probs.double().requires_grad_("probs" in wanted)
    x = tokens(dtype=torch.float64).requires_grad_("x" in wanted)

    flops = _products(module, x, Routing(routing.topk_ids, probs, EXPERTS))

    assert flops == cost[backend] * x.shape[0] * TOPK * HIDDEN * COLUMNS


def test_gradients_of_tokens_do_not_depend_on_what_is_frozen() -> None:
    module = make_experts(**EXPERTS_OPTIONS["gpt-oss"])
    frozen = copy.deepcopy(module).requires_grad_(False)
    grads = []
    for layer in (module, frozen):
        x = tokens().requires_grad_()
        layer(x, make_routing()).square().sum().backward()
        grads.append(x.grad)

    assert_bitwise_equal(grads[1], grads[0])


def _scaled_run(scale: float, *, steps: int = 3) -> tuple[Experts, Any, list[bool]]:
    """Train in fp16 under autocast, with fp32 parameters; return what was stepped."""
    torch.manual_seed(2)
    module = make_experts(**EXPERTS_OPTIONS["gpt-oss"])
    # Gradients are small here: a step of any size that shows in fp32 will do.
    optimizer = torch.optim.SGD(module.parameters(), lr=1e6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    moved = []
    for seed in range(steps):
        optimizer.zero_grad()
        before = copy.deepcopy(module.state_dict())
        with torch.autocast("cpu", torch.float16):
            out = module(tokens(seed=seed), make_routing(seed=seed))
        loss = out.float().square().mean() * 1e-7
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = [bool((before[n] != value).any()) for n, value in module.state_dict().items()]
        assert len(set(changed)) == 1
        moved.append(changed[0])
    return module, scaler, moved


def test_scaled_gradients_survive_fp16_and_overflows_skip_the_step() -> None:
    _, _, unscaled = _scaled_run(1.0)
    _, scaler, scaled = _scaled_run(2.0**20)
    _, halved, overflowed = _scaled_run(2.0**60)

    # Without a factor every gradient is below what fp16 can hold: parameters do not move.
    assert unscaled == [False, False, False]
    assert scaled == [True, True, True]
    assert scaler.get_scale() == 2.0**20
    assert overflowed == [False, False, False]
    assert halved.get_scale() == 2.0**57
