"""Drop-ins for Megatron-core's inference functions, and what its paths would drop."""

import inspect
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_megatron import COLUMNS, EXPERTS, HIDDEN, SIZES, with_megatron
from torch import Tensor
from torch.nn.functional import silu

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    ProbPlacement,
    Routing,
    UnsupportedError,
    experts,
)
from samebits.integrations.megatron import check, conflicts, inference_functions
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference


class ActivationType(Enum):
    SQUARED_RELU = "squared_relu"
    SWIGLU = "swiglu"
    NONE = "none"


def squared_relu(x: Tensor) -> Tensor:
    """Stand for Megatron-LM's function, which is known by its name."""
    return x


def quick_gelu(x: Tensor) -> Tensor:
    """Stand for Megatron-LM's function, which is known by its name."""
    return x


def _config(**options: Any) -> Any:
    sizes = SIZES | {"num_moe_experts": 2 * EXPERTS, "moe_router_topk": 2}
    return SimpleNamespace(**(sizes | {"activation_func": silu} | options))


def _arguments(rows: int = 2 * COLUMNS, topk: int = 2) -> dict[str, Any]:
    tokens = 6
    x = torch.randn(tokens, HIDDEN)
    x[4:] = float("nan")  # beyond the valid ones
    return {
        "hidden_states": x,
        "probs": torch.rand(tokens, topk),
        "fc1_weight": torch.randn(EXPERTS, rows, HIDDEN),
        "fc2_weight": torch.randn(EXPERTS, HIDDEN, COLUMNS),
        "activation_type": ActivationType.SWIGLU,
        "num_local_experts": EXPERTS,
        "local_expert_start": EXPERTS,
        "valid_tokens": torch.tensor(4, dtype=torch.int32),
        "routing_map": torch.stack([torch.randperm(2 * EXPERTS)[:topk] for _ in range(tokens)]),
    }


FC2 = ProbPlacement.FC2_INPUT
CASES: list[tuple[dict[str, Any], Activation, Layout, ProbPlacement]] = [
    ({}, Activation(), Layout(), FC2),
    (
        {"activation_func_clamp_value": 0.5},
        Activation(limit=0.5),
        Layout(),
        FC2,
    ),
    (
        {"moe_mlp_glu_interleave_size": 8},
        Activation(),
        Layout(interleave=8),
        ProbPlacement.FC2_INPUT,
    ),
    (
        {"activation_func": quick_gelu, "glu_linear_offset": 1.0},
        Activation(alpha=1.702, linear_offset=1.0),
        Layout(),
        FC2,
    ),
    (
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
        Activation(),
        Layout(),
        ProbPlacement.FC1_INPUT,
    ),
]


@pytest.mark.parametrize(("options", "activation", "layout", "placement"), CASES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_options_of_the_configuration_are_honoured(
    options: dict[str, Any],
    activation: Activation,
    layout: Layout,
    placement: ProbPlacement,
    out_dtype: torch.dtype | None,
) -> None:
    arguments = _arguments(topk=options.get("moe_router_topk", 2))
    out = None if out_dtype is None else torch.full((6, HIDDEN), 7.0, dtype=out_dtype)
    functions = inference_functions(_config(**options))

    results = [function(**arguments, out=out) for function in functions]

    expected = experts(
        arguments["hidden_states"],
        Routing(arguments["routing_map"], arguments["probs"], 2 * EXPERTS),
        ExpertWeights(gate_up=arguments["fc1_weight"], down=arguments["fc2_weight"], layout=layout),
        activation,
        placement=placement,
        expert_start=EXPERTS,
        num_valid_tokens=torch.tensor([4], dtype=torch.int32),
    )
    for result in results:
        assert_bitwise_equal(result, expected)
        assert out is None or result is out
    assert not expected[4:].any()


def test_bf16_activations_and_their_dtypes() -> None:
    arguments = {
        name: value.bfloat16() if name in ("hidden_states", "fc1_weight", "fc2_weight") else value
        for name, value in _arguments().items()
    }
    mcore, vllm = inference_functions(_config())

    rounded, wide = mcore(**arguments), vllm(**arguments, num_tokens_hint=4)

    assert rounded.dtype == torch.bfloat16
    assert wide.dtype == torch.float32
    assert_bitwise_equal(wide.bfloat16(), rounded)


def test_relu2_without_a_gate() -> None:
    config = _config(activation_func=squared_relu, gated_linear_unit=False)
    arguments = _arguments(rows=COLUMNS) | {"activation_type": ActivationType.SQUARED_RELU}

    out = inference_functions(config).mcore_fused_moe(**arguments)

    assert out[:4].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fc1_weight": object()}, UnsupportedError, "fc1_weight is a object: only BF16"),
        ({"activation_type": ActivationType.SQUARED_RELU}, ValueError, "fit the configuration's"),
        ({"activation_type": ActivationType.NONE}, UnsupportedError, "be one of SWIGLU"),
        ({"num_local_experts": 4}, ValueError, "hold num_local_experts = 4 experts"),
        ({"local_expert_start": 4}, ValueError, "expert_start must keep"),
        ({"out": torch.zeros(5, HIDDEN)}, ValueError, "out must have shape"),
        ({"out": torch.zeros(6, HIDDEN).double()}, ValueError, "out must have shape"),
        ({"routing_map": torch.ones(6, 2, dtype=torch.bool)}, TypeError, "routing_map must hold"),
        ({"routing_map": torch.ones(6, 2)}, TypeError, "routing_map must hold integers"),
        ({"disable_fused_quant_kernels": True}, UnsupportedError, "for MXFP8 only"),
    ],
)
def test_what_cannot_be_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        inference_functions(_config()).mcore_fused_moe(**(_arguments() | change))


@with_megatron
def test_signatures_are_megatrons() -> None:
    module = pytest.importorskip("megatron.core.inference.moe", reason="needs megatron-core")
    ours = inference_functions(_config())

    for name in ("mcore_fused_moe", "vllm_fused_moe"):
        theirs = inspect.signature(getattr(module, name)).parameters
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(theirs)


OAI = {"activation_func": quick_gelu, "glu_linear_offset": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_mlp_glu_interleave_size": 7}, "does not divide moe_ffn_hidden_size = 24; use a"),
        ({"fp4": "e2m1", "activation_func_clamp_value": 7.0}, "use BF16 or MXFP8 experts"),
        ({"use_te_activation_func": True, **OAI}, "use bias_activation_fusion with patch_fused"),
        (
            {"use_transformer_engine_op_fuser": True, **OAI},
            r"constants of their own; use adapt\(\)",
        ),
        ({"moe_shared_expert_overlap": True, **OAI}, "use moe_shared_expert_overlap=False"),
        (
            {"moe_grouped_gemm": False, "moe_mlp_glu_interleave_size": 8},
            "SequentialMLP reads halves; use moe_grouped_gemm=True",
        ),
        (
            {
                "transformer_impl": "inference_optimized",
                "inference_grouped_gemm_backend": "flashinfer",
                "moe_apply_probs_on_input": True,
            },
            r"FlashInfer multiplies the output; use inference_functions\(config\)",
        ),
        (
            {"transformer_impl": "inference_optimized", "activation_func_clamp_value": 7.0},
            "inference_grouped_gemm_backend=vllm with activation_func_clamp_value",
        ),
    ],
)
def test_a_dropped_option_is_named_with_its_alternative(
    options: dict[str, Any], message: str
) -> None:
    config = _config(**options)

    with pytest.raises(ValueError, match=message):
        check(config)


def test_the_size_of_dense_layers_is_not_that_of_experts() -> None:
    sizes = {"moe_ffn_hidden_size": 24, "ffn_hidden_size": 100}
    assert conflicts(_config(**sizes, moe_mlp_glu_interleave_size=8)) == []

    for size in (0, 5):
        (line,) = conflicts(_config(**sizes, moe_mlp_glu_interleave_size=size))
        assert f"size = {size} does not divide moe_ffn_hidden_size = 24" in line
    absent = sizes | {"moe_ffn_hidden_size": None}
    (line,) = conflicts(_config(**absent, moe_mlp_glu_interleave_size=8))
    assert "does not divide ffn_hidden_size = 100" in line


def test_every_option_that_flashinfer_drops_is_named() -> None:
    options = {"moe_apply_probs_on_input": True, "activation_func_clamp_value": 7.0}
    path = {
        "transformer_impl": "inference_optimized",
        "inference_grouped_gemm_backend": "flashinfer",
    }

    first, second = conflicts(_config(**options, **path))

    assert "with moe_apply_probs_on_input: FlashInfer" in first
    assert "with activation_func_clamp_value: its experts" in second


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe_mlp_glu_interleave_size": 8, "moe_grouped_gemm": True},
        {"use_te_activation_func": True},
        {"use_transformer_engine_op_fuser": True},
        {"transformer_impl": "inference_optimized"},
        {"fp4": "e2m1"},
        {"bias_activation_fusion": True, "activation_func_clamp_value": 7.0, **OAI},
    ],
)
def test_a_configuration_that_is_honoured_has_no_conflict(options: dict[str, Any]) -> None:
    assert conflicts(_config(**options)) == []


@with_megatron
def test_a_fused_swiglu_without_a_clamp_is_a_conflict() -> None:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    clamps = "clamp_value" in inspect.signature(weighted_bias_swiglu_impl).parameters
    config = _config(bias_activation_fusion=True, activation_func_clamp_value=7.0)

    assert bool(conflicts(config)) is not clamps
