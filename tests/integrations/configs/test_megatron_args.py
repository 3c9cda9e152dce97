"""What ``from_megatron_args`` reads of arguments and configurations, and what it refuses."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from real_megatron import with_megatron

from samebits import (
    Activation,
    Layout,
    ProbPlacement,
    Routing,
    RoutingRule,
    UnsupportedError,
    from_megatron_args,
)
from samebits.integrations.configs import SharedSpec
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference


SIZES = {
    "num_layers": 3,
    "hidden_size": 32,
    "moe_ffn_hidden_size": 24,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
}


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Stand for Megatron-LM's function, which is known by its name."""
    return x


SILU = {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
OAI = {
    "activation_func": quick_gelu,
    "gated_linear_unit": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}


def _spec(**options: Any) -> Any:
    return from_megatron_args(Namespace(**(SIZES | SILU | options)))[0]


def test_a_plain_configuration() -> None:
    spec = _spec()

    assert spec.activation == Activation()
    assert spec.placement is ProbPlacement.FC2_INPUT
    assert spec.rule == RoutingRule(topk=2, topk_first=True)
    assert (spec.hidden_size, spec.intermediate_size, spec.num_experts) == (32, 24, 8)


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        (OAI, Activation(alpha=1.702, limit=7.0, linear_offset=1.0)),
        ({"activation_func_clamp_value": 10.0}, Activation(limit=10.0)),
        (
            {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
            Activation(kind="gelu", gated=False),
        ),
    ],
)
def test_functions_of_a_configuration(options: dict[str, Any], activation: Activation) -> None:
    assert _spec(**options).activation == activation


@pytest.mark.parametrize(
    ("switch", "activation"),
    [
        ("swiglu", Activation()),
        ("quick_geglu", Activation(alpha=1.702)),
        ("squared_relu", Activation(kind="relu2", gated=False)),
    ],
)
def test_functions_of_a_command_line(switch: str, activation: Activation) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_moe_experts"}
    args = Namespace(num_experts=8, **sizes, **{switch: True})

    assert from_megatron_args(args)[0].activation == activation


def test_storage_placement_and_what_stands_beside() -> None:
    spec = _spec(
        moe_mlp_glu_interleave_size=12,
        moe_apply_probs_on_input=True,
        moe_router_topk=1,
        moe_shared_expert_intermediate_size=40,
        moe_shared_expert_gate=True,
        moe_latent_size=16,
        add_bias_linear=True,
    )

    assert spec.layout == Layout(interleave=12)
    assert spec.placement is ProbPlacement.FC1_INPUT
    assert spec.shared == SharedSpec(intermediate_size=40, gate=True)
    assert spec.latent_size == 16
    assert spec.biased


@pytest.mark.parametrize(
    ("frequency", "sparse"), [(1, [0, 1, 2]), (2, [0, 2]), ([0, 1, 1], [1, 2])]
)
def test_layers_that_have_experts(frequency: Any, sparse: list[int]) -> None:
    args = SIZES | SILU | {"moe_layer_freq": frequency}

    assert list(from_megatron_args(args)) == sparse


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"situ_beta": 4.0}, UnsupportedError, "does not read: situ_beta = 4.0"),
        ({"swiglu_limit": 0.0}, UnsupportedError, "does not read: swiglu_limit = 0.0"),
        ({"activation_func_clamp_value": 0.0}, ValueError, "limit must be finite and > 0"),
        ({"moe_apply_probs_on_input": True}, ValueError, "moe_router_topk must be 1 with"),
        ({"activation_func": torch.nn.functional.mish}, UnsupportedError, "of the gate 'mish'"),
        ({"moe_router_score_function": "tanh"}, UnsupportedError, "must be one of"),
        ({"moe_input_jitter_eps": 0.1}, UnsupportedError, "is noise on the router's input"),
        ({"moe_layer_freq": [1]}, ValueError, "one number for each of 3 layers"),
        ({"moe_layer_freq": "[1]"}, TypeError, "be an int or a list, already parsed"),
        ({"hidden_size": None}, ValueError, "must hold hidden_size"),
        ({"swiglu": True, "squared_relu": True}, ValueError, "swiglu must be off with"),
        (
            {"gated_linear_unit": False, "moe_mlp_glu_interleave_size": 4},
            ValueError,
            "must be None without a gate",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _spec(**options)


@with_megatron
def test_a_real_configuration_is_read() -> None:
    from megatron.core.activations import quick_gelu as real_quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_attention_heads=4,
        add_bias_linear=False,
        moe_mlp_glu_interleave_size=8,
        **SIZES | OAI | {"activation_func": real_quick_gelu},
    )

    spec = from_megatron_args(config)[0]

    assert spec.activation == Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
    assert spec.layout == Layout(interleave=8)
    assert not spec.biased


ROUTERS: list[dict[str, Any]] = [
    {},
    {"moe_router_pre_softmax": True},
    {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    {"moe_router_score_function": "sqrtsoftplus"},
    {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 4}
    | {"moe_router_group_topk": 2, "moe_router_topk": 4},
]


@with_megatron
@pytest.mark.parametrize("options", ROUTERS, ids=str)
def test_a_rule_chooses_what_megatron_chooses(options: dict[str, Any]) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    spec = _spec(**options)
    logits = torch.randn(50, 8)

    probs, chosen = topk_routing_with_score_function(
        logits,
        spec.rule.topk,
        use_pre_softmax=options.get("moe_router_pre_softmax", False),
        num_groups=options.get("moe_router_num_groups"),
        group_topk=options.get("moe_router_group_topk"),
        scaling_factor=options.get("moe_router_topk_scaling_factor"),
        score_function=options.get("moe_router_score_function", "softmax"),
    )

    routing = Routing.from_logits(logits, spec.rule)
    ours = torch.zeros(50, 8).scatter(1, routing.topk_ids, 1.0)
    assert_bitwise_equal(ours.bool(), chosen.bool())
    dense = torch.zeros(50, 8).scatter(1, routing.topk_ids, routing.topk_probs)
    assert relative_error(dense, probs) < 2.0**-22
