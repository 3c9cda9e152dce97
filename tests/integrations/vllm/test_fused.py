"""vLLM's ``fused_experts`` on this library: names, options, maps; without vLLM."""

import subprocess
import sys
import tomllib
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import Activation, ExpertWeights, Layout, ProbPlacement, Routing, UnsupportedError
from samebits import experts as run
from samebits.integrations.vllm import activation_of, fused_experts, load
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parents[3]
POINT = {"name": "samebits", "group": "vllm.general_plugins"}
EXPERTS, HIDDEN, COLUMNS, TOKENS, TOPK = 6, 16, 24, 7, 2
OAI = {"limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}
NAMES: dict[str, tuple[Activation, Layout]] = {
    "silu": (Activation(), Layout()),
    "gelu": (Activation(kind="gelu"), Layout()),
    "gelu_tanh": (Activation(kind="gelu_tanh"), Layout()),
    "gelu_pytorch_tanh": (Activation(kind="gelu_tanh"), Layout()),
    "swigluoai": (Activation(**OAI), Layout(interleave=1)),
    "swiglustep": (Activation(limit=7.0, limit_position="post"), Layout()),
    "silu_no_mul": (Activation(gated=False), Layout()),
    "gelu_no_mul": (Activation(kind="gelu", gated=False), Layout()),
    "gelu_tanh_no_mul": (Activation(kind="gelu_tanh", gated=False), Layout()),
    "relu2_no_mul": (Activation(kind="relu2", gated=False), Layout()),
}


def _config(**options: Any) -> Any:
    """Return what is read of a FusedMoEQuantConfig of unquantised experts."""
    names = ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta", "w1_bias", "w2_bias")
    return SimpleNamespace(**(dict.fromkeys(names) | options))


def _inputs(columns: int = 2, held: int = EXPERTS) -> tuple[Tensor, ...]:
    return (
        torch.randn(TOKENS, HIDDEN) * 0.5,
        torch.randn(held, columns * COLUMNS, HIDDEN),
        torch.randn(held, HIDDEN, COLUMNS),
        torch.rand(TOKENS, TOPK) + 0.1,
        torch.randint(EXPERTS, (TOKENS, TOPK), dtype=torch.int32),
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_its_activation(name: str) -> None:
    activation, layout = NAMES[name]
    x, w1, w2, probs, ids = _inputs(activation.columns)

    assert activation_of(name) == (activation, layout)
    expected = run(
        x,
        Routing(ids, probs, EXPERTS),
        ExpertWeights(gate_up=w1, down=w2, layout=layout),
        activation,
    )
    member = Enum("MoEActivation", {"X": name}).X
    assert_bitwise_equal(fused_experts(x, w1, w2, probs, ids, member), expected)
    assert_bitwise_equal(fused_experts(x, w1, w2, probs, ids, name), expected)


@pytest.mark.parametrize("name", ["silu", "swigluoai", "swiglustep"])
@pytest.mark.parametrize(
    "option", [{"gemm1_clamp_limit": 1.0}, {"gemm1_alpha": 1.3}, {"gemm1_beta": 0.25}]
)
def test_every_option_moves_the_output(name: str, option: dict[str, float]) -> None:
    inputs = _inputs()

    without = fused_experts(*inputs, name)
    with_it = fused_experts(*inputs, name, quant_config=_config(**option))

    assert relative_error(with_it, without.double()) > 0.02


def test_packed_gpt_oss_needs_its_three_numbers() -> None:
    numbers = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}
    assert activation_of("swigluoai_uninterleave", **numbers) == (Activation(**OAI), Layout())
    for missing in numbers:
        options = {name: value for name, value in numbers.items() if name != missing}
        with pytest.raises(
            ValueError, match=r"gemm1_\w+ must be given for activation swigluoai_un"
        ):
            activation_of("swigluoai_uninterleave", **options)


def test_soft_caps() -> None:
    situ = Activation(kind="situ", gate_softcap=4.0, up_softcap=25.0)
    assert activation_of("situ", situ_beta=4.0, situ_linear_beta=25.0)[0] == situ
    with pytest.raises(ValueError, match="activation_situ_beta must be given"):
        activation_of("situ")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("relu2", {}, UnsupportedError, "vLLM does not compute"),
        ("mish", {}, UnsupportedError, "unknown activation of vLLM 'mish'"),
        ("silu", {"limit": 0.0}, ValueError, "None means no clamp"),
        ("gelu", {"alpha": 1.702}, ValueError, "alpha must be 1.0 for kind 'gelu'"),
        ("relu2_no_mul", {"limit": 7.0}, ValueError, "limit must be None"),
        ("silu", {"situ_beta": 4.0}, ValueError, "gate_softcap must be None"),
    ],
)
def test_what_an_activation_does_not_use_is_an_error(
    name: str, options: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        activation_of(name, **options)


def test_biases_follow_the_layout_of_their_rows() -> None:
    x, w1, w2, probs, ids = _inputs()
    biases = torch.randn(EXPERTS, 2 * COLUMNS), torch.randn(EXPERTS, HIDDEN)
    activation, layout = NAMES["swigluoai"]

    out = fused_experts(
        x,
        w1,
        w2,
        probs,
        ids,
        "swigluoai",
        quant_config=_config(w1_bias=biases[0], w2_bias=biases[1]),
    )

    weights = ExpertWeights(
        gate_up=w1, down=w2, gate_up_bias=biases[0], down_bias=biases[1], layout=layout
    )
    assert_bitwise_equal(out, run(x, Routing(ids, probs, EXPERTS), weights, activation))


def test_probabilities_on_the_input() -> None:
    x, w1, w2, probs, ids = _inputs()
    expected = run(
        x,
        Routing(ids, probs, EXPERTS),
        ExpertWeights(gate_up=w1, down=w2),
        placement=ProbPlacement.FC1_INPUT,
    )

    out = fused_experts(x, w1, w2, probs, ids, apply_router_weight_on_input=True)

    assert_bitwise_equal(out, expected)
    biased = _config(w1_bias=torch.randn(EXPERTS, 2 * COLUMNS))
    with pytest.raises(UnsupportedError, match="multiplies the bias too"):
        fused_experts(x, w1, w2, probs, ids, apply_router_weight_on_input=True, quant_config=biased)


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_ranks_with_a_map_add_up_to_the_whole(ranks: int, placement: str) -> None:
    x, w1, w2, probs, ids = _inputs()
    ids[3] = -1
    x, w1, w2, probs = (t.double() for t in (x, w1, w2, probs))
    whole = fused_experts(x, w1, w2, probs, ids)

    total = torch.zeros_like(whole)
    chunks = torch.arange(EXPERTS).tensor_split(ranks)
    for rank in range(ranks):
        held = chunks[rank] if placement == "linear" else torch.arange(rank, EXPERTS, ranks)
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[held] = torch.arange(len(held), dtype=torch.int32)
        total += fused_experts(
            x,
            w1[held],
            w2[held],
            probs,
            ids,
            global_num_experts=EXPERTS,
            expert_map=expert_map,
        )

    assert not whole[3].any()
    assert relative_error(total, whole) < 1e-14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_num_experts": 8}, "global_num_experts must be -1 or E = 6 without an expert_map"),
        ({"expert_map": torch.ones(6, dtype=torch.int32)}, "expert_map must hold each of 6 local"),
        (
            {"expert_map": torch.arange(8), "global_num_experts": 6},
            r"expert_map must have shape \(global_num_experts,\) = \(6,\), got \(8,\)",
        ),
    ],
)
def test_maps_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_experts(*_inputs(), **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_ids_and_probabilities_of_other_dtypes(dtype: torch.dtype) -> None:
    x, w1, w2, probs, ids = _inputs()

    out = fused_experts(x, w1, w2, probs.bfloat16(), ids.to(dtype))

    assert_bitwise_equal(out, fused_experts(x, w1, w2, probs.bfloat16().float(), ids))


def test_options_that_nobody_would_read_are_refused() -> None:
    with pytest.raises(TypeError, match="quant_config must be a FusedMoEQuantConfig, got dict"):
        fused_experts(*_inputs(), quant_config={"gemm1_clamp_limit": 1.0})
    with pytest.raises(TypeError, match="apply_router_weight_on_input must be a bool"):
        fused_experts(*_inputs(), apply_router_weight_on_input="no")  # type: ignore[arg-type]


def test_ids_and_maps_that_are_no_integers_are_refused() -> None:
    x, w1, w2, probs, ids = _inputs()

    for given in (ids > 2, ids.float()):
        with pytest.raises(TypeError, match="topk_ids must hold integers"):
            fused_experts(x, w1, w2, probs, given)
        with pytest.raises(TypeError, match="expert_map must hold integers"):
            fused_experts(x, w1, w2, probs, ids, expert_map=torch.arange(EXPERTS).to(given.dtype))


@pytest.mark.parametrize(
    "option",
    [
        {"quant_dtype": torch.float8_e4m3fn},
        {"weight_quant_dtype": "int4"},
        {"block_shape": [128, 128]},
        {"per_act_token_quant": True},
        {"w1_scale": torch.ones(6)},
        {"w2_zp": torch.ones(6)},
        {"a1_gscale": torch.ones(1)},
    ],
)
def test_quantised_experts_are_refused(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(UnsupportedError, match=rf"quant_config\.{name} = .*quantised experts"):
        fused_experts(*_inputs(), quant_config=_config(**option))


def test_the_package_names_its_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    point = EntryPoint(value=project["entry-points"]["vllm.general_plugins"]["samebits"], **POINT)
    assert point.load() is load


def test_importing_it_imports_nothing_of_vllm() -> None:
    code = "import sys, samebits.integrations.vllm; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inputs_are_not_modified() -> None:
    inputs = _inputs()
    before = [tensor.clone() for tensor in inputs]

    fused_experts(*inputs, "silu", apply_router_weight_on_input=True)

    for tensor, copy in zip(inputs, before, strict=True):
        assert_bitwise_equal(tensor, copy)
