"""What ``MoE`` refuses, by its constructor and by a call."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from layers import LATENT, MOES, make_experts, make_router, tokens
from samebits.nn import MoE

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"router": nn.Linear(2, 2)}, TypeError, "router must be a Router, got Linear"),
        ({"experts": nn.Linear(2, 2)}, TypeError, "experts must be an Experts, got Linear"),
        (
            {"identity_experts": 2},
            ValueError,
            "router.num_experts must be experts.num_experts + identity_experts = 5 + 2, got 5",
        ),
        ({"identity_experts": -1}, ValueError, "identity_experts must be >= 0, got -1"),
        (
            {"latent_size": LATENT},
            ValueError,
            "experts.hidden_size must be latent_size = 32, got 48",
        ),
        (
            {"shared_gate": True},
            ValueError,
            "shared_gate must be False without shared, which alone",
        ),
        ({"identity_experts": 1.0}, TypeError, "identity_experts must be an int, got 1.0"),
        ({"identity_experts": True}, TypeError, "identity_experts must be an int, got True"),
        ({"latent_size": 32.0}, TypeError, "latent_size must be an int, got 32.0"),
        ({"latent_size": 0}, ValueError, "latent_size must be >= 1, got 0"),
        ({"shared_gate": 1}, TypeError, "shared_gate must be a bool, got 1"),
        ({"routed_scaling": "2"}, TypeError, "routed_scaling must be a plain Python number"),
        (
            {"router": make_router(dtype=torch.float64)},
            ValueError,
            "or none, got router torch.float64, experts torch.float32",
        ),
        (
            {"experts": make_experts(dtype=torch.float64)},
            ValueError,
            "router, experts and shared must all be float64, or none",
        ),
        (
            {"shared": make_experts(num_experts=1, dtype=torch.float64)},
            ValueError,
            "router, experts and shared must all be float64, or none",
        ),
        ({"shared": nn.Linear(2, 2)}, TypeError, "shared must be an Experts, got Linear"),
        ({"shared": "two"}, ValueError, "shared.num_experts must be 1, got 2"),
        (
            {"shared": "narrow"},
            ValueError,
            "shared.hidden_size must be router.hidden_size = 48, got 47",
        ),
        ({"routed_scaling": 0.0}, ValueError, "routed_scaling must be finite and > 0, got 0.0"),
        (
            {"routed_scaling": float("inf")},
            ValueError,
            "routed_scaling must be finite and > 0, got inf",
        ),
        (
            {"routed_scaling": True},
            TypeError,
            "routed_scaling must be a plain Python number, got True",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    shared = {
        "two": lambda: make_experts(num_experts=2),
        "narrow": lambda: make_experts(num_experts=1, hidden_size=47),
    }
    if options.get("shared") in shared:
        options = {"shared": shared[options["shared"]]()}

    with pytest.raises(error, match=re.escape(message)):
        MoE(**({"router": make_router(), "experts": make_experts()} | options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": 3}, TypeError, "x must be a float tensor, got int"),
        ({"x": torch.ones(3, 48, dtype=torch.int64)}, TypeError, "x must be a float tensor, got"),
        ({"x": torch.ones(3, 47)}, ValueError, "x must have shape (…, H) with H = 48, got (3, 47)"),
        ({"x": torch.tensor(1.0)}, ValueError, "x must have shape (…, H) with H = 48, got ()"),
        ({"losses": 1}, TypeError, "losses must be a bool, got 1"),
        ({"topk_ids": [0]}, TypeError, "topk_ids must be a Tensor, got list"),
        ({"topk_ids": torch.ones(9, 3)}, TypeError, "topk_ids must be int32 or int64, got"),
        ({"num_valid_tokens": 3}, TypeError, "num_valid_tokens must be an int32 tensor, got int"),
        (
            {"num_valid_tokens": torch.ones(2, dtype=torch.int32)},
            ValueError,
            "num_valid_tokens must have shape (1,), got (2,)",
        ),
    ],
)
def test_a_call_that_cannot_be_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        MOES["bare"]()(**({"x": tokens()} | options))


@pytest.mark.parametrize("name", ["bare", "identity"])
def test_ids_of_no_expert_are_refused(name: str) -> None:
    layer, x = MOES[name](), tokens()
    ids = layer.router(x).routing.topk_ids
    ids[4, 1] = layer.router.num_experts + 1

    with pytest.raises(ValueError, match="topk_ids must be in"):
        layer(x, topk_ids=ids)
