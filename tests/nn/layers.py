"""Layers that the tests of ``samebits.nn`` are about: one per feature, one with every option."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits import Activation, Layout, PostExpertNorm, ProbPlacement, Routing, RoutingRule
from samebits.nn import Experts, MoE, Router

TOKENS, HIDDEN, LATENT, COLUMNS, EXPERTS, TOPK = 9, 48, 32, 80, 5, 3
GPT_OSS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)


def make_experts(**options: Any) -> Experts:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": COLUMNS}
    return Experts(**(sizes | options))


EXPERTS_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt-oss": {
        "activation": GPT_OSS,
        "layout": Layout(interleave=1),
        "orientation": "in_out",
        "gate_up_bias": True,
        "down_bias": True,
    },
    "up-first": {"layout": Layout(up_first=True)},
    "interleave-16": {"layout": Layout(interleave=16)},
    "in-out": {"orientation": "in_out"},
    "relu2": {"activation": Activation(kind="relu2", gated=False), "gate_up_bias": True},
    "fc1-input": {"placement": ProbPlacement.FC1_INPUT},
    "fc2-input": {"placement": ProbPlacement.FC2_INPUT, "down_bias": True},
    "norm": {"norm": PostExpertNorm(eps=1e-5), "backend": "reference"},
    "bf16": {"dtype": torch.bfloat16},
}


def make_routing(tokens: int = TOKENS, *, experts: int = EXPERTS, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :TOPK]
    return Routing(ids, torch.rand(tokens, TOPK, generator=generator), experts)


def tokens(count: int = TOKENS, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_router(experts: int = EXPERTS, **options: Any) -> Router:
    rule = RoutingRule(topk=TOPK, score="sigmoid", renormalize=True, scaling_factor=1.5)
    return Router(**({"hidden_size": HIDDEN, "num_experts": experts, "rule": rule} | options))


def _shared(**options: Any) -> Experts:
    activation = Activation(limit=1.0, limit_position="post")
    return make_experts(num_experts=1, intermediate_size=64, activation=activation, **options)


def _whole(dtype: torch.dtype | None = None) -> MoE:
    return MoE(
        router=make_router(EXPERTS + 2, bias=True, selection_bias=True, dtype=dtype),
        experts=make_experts(hidden_size=LATENT, **EXPERTS_OPTIONS["gpt-oss"], dtype=dtype),
        shared=_shared(dtype=dtype),
        shared_gate=True,
        latent_size=LATENT,
        identity_experts=2,
        routed_scaling=2.5,
    )


MOES: dict[str, Callable[[], MoE]] = {
    "bare": lambda: MoE(router=make_router(), experts=make_experts()),
    "shared": lambda: MoE(router=make_router(), experts=make_experts(), shared=_shared()),
    "gated-shared": lambda: MoE(
        router=make_router(), experts=make_experts(), shared=_shared(), shared_gate=True
    ),
    "latent": lambda: MoE(
        router=make_router(), experts=make_experts(hidden_size=LATENT), latent_size=LATENT
    ),
    "identity": lambda: MoE(
        router=make_router(EXPERTS + 2), experts=make_experts(), identity_experts=2
    ),
    "scaled": lambda: MoE(router=make_router(), experts=make_experts(), routed_scaling=2.5),
    "whole": _whole,
    "whole-bf16": lambda: _whole(torch.bfloat16),
}
