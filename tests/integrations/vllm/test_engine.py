"""The library under vLLM's own layers, as far as its Python sources run without compiled parts."""

import dataclasses
import inspect
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import UnsupportedError
from samebits.integrations.vllm import Swap, fused, fused_experts, load, swap_in
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    # What importing it says of missing packages and of its own code is not ours.
    pytest.mark.filterwarnings("ignore"),
]

EXPERTS, HIDDEN, COLUMNS, TOKENS, TOPK = 4, 32, 24, 6, 2
# A name, and options beside it: of vLLM's layer, and of the class that computes it in torch.
CASES: dict[str, tuple[str, dict[str, Any], str | None, dict[str, Any]]] = {
    "silu": ("SILU", {}, "SiluAndMul", {}),
    "silu, clamped": (
        "SILU",
        {"swiglu_limit": 2.0},
        "SiluAndMulWithClamp",
        {"swiglu_limit": 2.0, "alpha": 1.0, "beta": 0.0},
    ),
    "gelu": ("GELU", {}, "GeluAndMul", {"approximate": "none"}),
    "gelu_tanh": ("GELU_TANH", {}, "GeluAndMul", {"approximate": "tanh"}),
    "swigluoai": ("SWIGLUOAI", {}, "SwigluOAIAndMul", {"alpha": 1.702, "limit": 7.0}),
    "swigluoai, packed": (
        "SWIGLUOAI_UNINTERLEAVE",
        {"swiglu_limit": 2.0, "swiglu_alpha": 1.5, "swiglu_beta": 0.5},
        "SiluAndMulWithClamp",
        {"swiglu_limit": 2.0, "alpha": 1.5, "beta": 0.5},
    ),
    "swiglustep": ("SWIGLUSTEP", {}, "SwigluStepAndMul", {"limit": 7.0}),
    "situ": (
        "SITU",
        {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0},
        "SituAndMul",
        {"beta": 2.0, "linear_beta": 3.0},
    ),
    "silu, no gate": ("SILU_NO_MUL", {}, None, {}),
    "gelu, no gate": ("GELU_NO_MUL", {}, None, {}),
    "gelu_tanh, no gate": ("GELU_TANH_NO_MUL", {}, None, {}),
    "relu2, no gate": ("RELU2_NO_MUL", {}, None, {}),
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM take this machine for one of its CPU builds."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    class Cuda(CpuPlatform):
        """Its configuration refuses experts without a gate elsewhere; nothing runs on a GPU."""

        def is_cuda_alike(self) -> bool:
            return True

    platform = Cuda()
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "current_platform" in vars(module):
            monkeypatch.setattr(module, "current_platform", platform)


@pytest.fixture
def in_the_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build layers as the engine does, with a backend that runs here, as none of its own does."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    def chosen(moe_config: Any) -> Any:
        return UnquantizedMoeBackend.TRITON, object

    monkeypatch.setattr(methods, "select_unquantized_moe_backend", chosen)
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def swapped() -> Iterator[Swap]:
    swap = swap_in()
    yield swap
    swap.remove()


def _moe_config(activation: str = "SILU", **options: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    defaults = {
        "num_experts": EXPERTS,
        "experts_per_token": TOPK,
        "hidden_dim": HIDDEN,
        "intermediate_size": COLUMNS,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation[activation],
        "device": "cpu",
        "routing_method": RoutingMethodType.Unspecified,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.float32,
    }
    return FusedMoEConfig(**(defaults | options))


def _kernel(moe_config: Any, **quant: Any) -> Any:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )

    from samebits.integrations.vllm.engine import SamebitsExperts

    experts = SamebitsExperts(moe_config, FusedMoEQuantConfig.make(**quant))
    return mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)


def _inputs(rows: int, topk: int = TOPK) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN),
        "w1": torch.randn(EXPERTS, rows, HIDDEN) * 0.5,
        "w2": torch.randn(EXPERTS, HIDDEN, COLUMNS) * 0.5,
        "topk_weights": torch.rand(TOKENS, topk) + 0.1,
        "topk_ids": torch.randint(EXPERTS, (TOKENS, topk), dtype=torch.int32),
    }


def _loop(inputs: dict[str, Tensor], act: Any, biases: Any = (None, None)) -> Tensor:
    """Return the layer in fp64, with vLLM's activation."""
    x, w1, w2, probs, ids = (
        inputs[name].double() if inputs[name].is_floating_point() else inputs[name]
        for name in ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    )
    first, second = (b if b is None else b.double() for b in biases)
    out = torch.zeros_like(x)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            z = w1[e] @ x[t] + (0 if first is None else first[e])
            y = w2[e] @ act(z[None])[0] + (0 if second is None else second[e])
            out[t] += probs[t, k] * y
    return out


def _activation(case: str) -> Any:
    import vllm.model_executor.layers.activation as layers

    name, _, kind, attributes = CASES[case]
    if kind is not None:
        forward = getattr(layers, kind).forward_native
        if isinstance(
            inspect.getattr_static(getattr(layers, kind), "forward_native"), staticmethod
        ):
            return forward
        return lambda z: forward(SimpleNamespace(**attributes), z)
    functions = torch.nn.functional
    return {
        "SILU_NO_MUL": functions.silu,
        "GELU_NO_MUL": functions.gelu,
        "GELU_TANH_NO_MUL": lambda z: functions.gelu(z, approximate="tanh"),
        "RELU2_NO_MUL": lambda z: functions.relu(z).square(),
    }[name]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("on_cpu")
def test_vllms_kernel_with_our_experts_computes_its_own_activation(case: str) -> None:
    name, options, _, _ = CASES[case]
    config = _moe_config(name, **options)
    inputs = _inputs(COLUMNS * (2 if config.is_act_and_mul else 1))

    out = _kernel(config).apply(
        **inputs,
        activation=config.activation,
        global_num_experts=-1,
        expert_map=None,
        apply_router_weight_on_input=False,
    )

    assert relative_error(out, _loop(inputs, _activation(case))) < 1e-6


@pytest.mark.usefixtures("on_cpu")
def test_every_activation_of_this_vllm_is_covered() -> None:
    from vllm.model_executor.layers.fused_moe.activation import (
        MoEActivation,
        apply_moe_activation_supported,
    )

    computed = {member.name for member in MoEActivation if apply_moe_activation_supported(member)}
    assert computed == {name for name, *_ in CASES.values()}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_and_the_function_have_the_same_bits(biased: bool) -> None:
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

    config = _moe_config("SWIGLUOAI", has_bias=biased)
    inputs = _inputs(2 * COLUMNS)
    biases = torch.randn(EXPERTS, 2 * COLUMNS), torch.randn(EXPERTS, HIDDEN)
    quant = {"w1_bias": biases[0], "w2_bias": biases[1]} if biased else {}

    out = _kernel(config, **quant).apply(
        **inputs,
        activation=config.activation,
        global_num_experts=EXPERTS,
        expert_map=None,
        apply_router_weight_on_input=False,
    )

    quant_config = biased_moe_quant_config(*biases) if biased else None
    expected = fused_experts(**inputs, activation=config.activation, quant_config=quant_config)
    assert_bitwise_equal(out, expected)
    act = _activation("swigluoai")
    assert relative_error(out, _loop(inputs, act, biases if biased else (None, None))) < 1e-6


@pytest.mark.usefixtures("on_cpu")
def test_probabilities_on_the_input_are_multiplied_once() -> None:
    config = _moe_config(experts_per_token=1)
    inputs = _inputs(2 * COLUMNS, topk=1)

    out = _kernel(config).apply(
        **inputs,
        activation=config.activation,
        global_num_experts=-1,
        expert_map=None,
        apply_router_weight_on_input=True,
    )

    assert_bitwise_equal(out, fused_experts(**inputs, apply_router_weight_on_input=True))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_maps_of_vllm_add_up(placement: str) -> None:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    inputs = _inputs(2 * COLUMNS)
    whole = fused_experts(**inputs)
    total = torch.zeros_like(whole)
    for rank in range(3):
        number, expert_map, _ = determine_expert_map(3, rank, EXPERTS, placement)
        held = (expert_map >= 0).nonzero()[:, 0]
        assert len(held) == number
        config = _moe_config(num_local_experts=number)
        part = inputs | {"w1": inputs["w1"][held], "w2": inputs["w2"][held]}
        total += _kernel(config).apply(
            **part,
            activation=config.activation,
            global_num_experts=EXPERTS,
            expert_map=expert_map,
            apply_router_weight_on_input=False,
        )
    assert relative_error(total, whole.double()) < 1e-6


def test_the_function_has_vllms_signature() -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    theirs = inspect.signature(fused_moe.fused_experts).parameters
    ours = inspect.signature(fused_experts).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        default = getattr(parameter.default, "value", parameter.default)
        assert ours[name].default == default, name
        assert ours[name].kind == parameter.kind, name


def test_every_field_of_its_configuration_is_read_or_of_quantised_experts() -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    fields = {field.name for field in dataclasses.fields(FusedMoEQuantConfig)}
    assert fields == fused._READ | fused._QUANTISED_ONLY
    for name in fused._QUANTISED:
        assert hasattr(FusedMoEQuantConfig, name), name


def test_quantised_configurations_of_vllm_are_refused() -> None:
    from vllm.model_executor.layers.fused_moe.config import (
        fp8_w8a8_moe_quant_config,
        int4_w4a16_moe_quant_config,
    )

    scales = torch.ones(EXPERTS), torch.ones(EXPERTS)
    fp8 = fp8_w8a8_moe_quant_config(*scales)
    int4 = int4_w4a16_moe_quant_config(*scales, None, None)
    for config in (fp8, int4):
        with pytest.raises(UnsupportedError, match=r"quant_config\.\w+ = .*quantised experts"):
            fused_experts(**_inputs(2 * COLUMNS), quant_config=config)


@pytest.mark.usefixtures("on_cpu", "in_the_engine")
def test_layers_that_are_built_after_the_swap_run_on_this_library(swapped: Swap) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe, routed_experts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    from samebits.integrations.vllm.engine import SamebitsExperts, SamebitsRoutedExperts

    layer = routed_experts.RoutedExperts.__new__(routed_experts.RoutedExperts)

    assert type(layer) is SamebitsRoutedExperts
    method = layer._get_quant_method("model.layers.0.mlp.experts", None, _moe_config())
    assert method.experts_cls is SamebitsExperts
    assert method.unquantized_backend is UnquantizedMoeBackend.TRITON
    assert fused_moe.fused_experts is fused_experts

    message = r"cannot be the experts of a: --moe-backend triton asks for another"
    with pytest.raises(UnsupportedError, match=message):
        layer._get_quant_method("a", None, _moe_config(moe_backend="triton"))
    with pytest.raises(UnsupportedError, match="LoRA"):
        layer._get_quant_method("a", None, _moe_config(is_lora_enabled=True))

    swapped.remove()
    assert fused_moe.fused_experts is not fused_experts
    assert type(routed_experts.RoutedExperts.__new__(routed_experts.RoutedExperts)) is not type(
        layer
    )


@pytest.mark.usefixtures("on_cpu", "in_the_engine", "swapped")
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_of_vllm_from_its_construction_to_its_output(biased: bool) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    config = _moe_config("SWIGLUOAI", has_bias=biased, swiglu_limit=3.0)
    manager = SimpleNamespace(
        expert_map=None,
        expert_mask=None,
        routing_tables=None,
        local_num_experts=EXPERTS,
        placement_strategy="linear",
    )
    layer: Any = RoutedExperts(
        "model.layers.0.mlp.experts",
        torch.float32,
        config,
        None,
        manager,
        swiglu_limit=3.0,
    )
    inputs = _inputs(2 * COLUMNS)
    with torch.no_grad():
        layer.w13_weight.copy_(inputs["w1"])
        layer.w2_weight.copy_(inputs["w2"])
        for name in ("w13_bias", "w2_bias") if biased else ():
            getattr(layer, name).normal_()
    layer.quant_method.process_weights_after_loading(layer)

    out = layer.quant_method.apply(
        layer,
        inputs["hidden_states"],
        inputs["topk_weights"],
        inputs["topk_ids"],
        shared_experts=None,
        shared_experts_input=None,
    )

    quant = SimpleNamespace(
        gemm1_clamp_limit=3.0,
        w1_bias=layer.w13_bias if biased else None,
        w2_bias=layer.w2_bias if biased else None,
    )
    expected = fused_experts(**inputs, activation="swigluoai", quant_config=quant)
    assert_bitwise_equal(out, expected.detach())


@pytest.mark.usefixtures("on_cpu")
def test_quantised_layers_are_refused_when_they_are_built(
    swapped: Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import routed_experts
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    class Fp8(FusedMoEMethodBase):
        """Stand for a quantised method."""

    Fp8.__abstractmethods__ = frozenset()
    monkeypatch.setattr(routed_experts, "resolve_quant_method", lambda *_: Fp8(_moe_config()))
    layer = routed_experts.RoutedExperts.__new__(routed_experts.RoutedExperts)
    with pytest.raises(UnsupportedError, match=r"experts of b: its experts are quantised \(Fp8\)"):
        layer._get_quant_method("b", object(), _moe_config())


@pytest.mark.parametrize(
    ("named", "swaps"), [(None, False), ([], False), (["other"], False), (["samebits"], True)]
)
def test_the_plugin_waits_to_be_named(
    named: list[str] | None, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.envs
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.setattr(vllm.envs, "VLLM_PLUGINS", named, raising=False)
    logging.getLogger("samebits").setLevel(logging.INFO)
    load()
    load()  # each process may call it more than once

    assert ("RoutedExperts" in op_registry_oot) == swaps
    assert (fused_moe.fused_experts is fused_experts) == swaps
    swap_in().remove()
    assert "RoutedExperts" not in op_registry_oot
    assert fused_moe.fused_experts is not fused_experts


def test_another_plugins_layer_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    monkeypatch.setitem(op_registry_oot, "RoutedExperts", SimpleNamespace)
    with pytest.raises(UnsupportedError, match="another plug-in has replaced RoutedExperts"):
        swap_in()
