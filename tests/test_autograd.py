"""Backward under a dispatch mode (FLOP counters, memory trackers): it runs, with the same bits."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from samebits import RoutingRule
from samebits.nn import Experts, LoRAExperts, MoE, Router, RowLinear
from samebits.routing import Routing
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference


class _Watching(TorchDispatchMode):
    """Change nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _experts(**options: Any) -> Experts:
    return Experts(num_experts=4, hidden_size=8, intermediate_size=6, **options)


def _router(score: Any = "softmax") -> Router:
    return Router(hidden_size=8, num_experts=6, rule=RoutingRule(topk=2, score=score))


class _Fixed(nn.Module):
    """Experts with a routing that does not depend on ``x``."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0])[:, None] % 4
        out: Tensor = self.experts(x, Routing(ids, torch.full(ids.shape, 0.5)))
        return out


class _Probs(nn.Module):
    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        probs: Tensor = self.router(x).routing.topk_probs
        return probs.square()


def _layers() -> Iterator[tuple[str, nn.Module]]:
    shared = Experts(num_experts=1, hidden_size=8, intermediate_size=6)
    yield "reference", _Fixed(_experts(backend="reference"))
    yield "grouped", _Fixed(_experts(backend="grouped"))
    yield "lora", _Fixed(LoRAExperts(_experts(), gate_up_rank=2, down_rank=2, scaling=2.0))
    yield "softmax", _Probs(_router())
    yield "sigmoid", _Probs(_router("sigmoid"))
    yield "linear", RowLinear(8, 5)
    yield (
        "moe",
        MoE(
            router=_router(),
            experts=_experts(),
            shared=shared,
            shared_gate=True,
            identity_experts=2,
        ),
    )


LAYERS = dict(_layers())


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_same_under_a_dispatch_mode(name: str) -> None:
    layer = LAYERS[name]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    modes: list[AbstractContextManager[Any]] = [
        nullcontext(),
        _Watching(),
        FlopCounterMode(display=False),
    ]

    expected, *actual = [_gradients(layer, x, mode) for mode in modes]

    assert any(gradient.any() for gradient in expected)
    for gradients in actual:
        for got, wanted in zip(gradients, expected, strict=True):
            assert_bitwise_equal(got, wanted)


def _gradients(layer: nn.Module, x: Tensor, mode: AbstractContextManager[Any]) -> list[Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    # Not autograd.grad, which the counter's hooks refuse.
    with mode:
        layer(leaf).square().sum().backward()
    leaves = [leaf, *layer.parameters()]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
