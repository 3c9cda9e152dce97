"""Quantised experts as a module, and adapters over them."""

from typing import Any

import pytest
import torch

from samebits import Routing, RoutingRule, UnsupportedError
from samebits.activation import Activation
from samebits.formats import FP8, MXFP4, MXFP8, NVFP4, WeightFormat, dequantize, quantize
from samebits.nn import Experts, LoRAExperts, MoE, QuantizedExperts, Router
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout, PostExpertNorm

pytestmark = pytest.mark.reference

OPTIONS: dict[str, Any] = {
    "activation": Activation(alpha=1.702, limit=2.0, linear_offset=1.0),
    "layout": Layout(interleave=1),
    "gate_up_bias": True,
    "down_bias": True,
    "norm": PostExpertNorm(eps=1e-5),
    "dtype": torch.bfloat16,
}


def _base(weight_format: WeightFormat = MXFP4) -> tuple[QuantizedExperts, Experts]:
    """Return quantised experts, and the dense ones that they stand for."""
    dense = Experts(num_experts=4, hidden_size=48, intermediate_size=80, **OPTIONS)
    weights = quantize(dense.weights, weight_format)
    dense.load_weights(dequantize(weights))
    return QuantizedExperts(weights, dense.activation), dense


def _tokens() -> tuple[torch.Tensor, Routing]:
    return torch.randn(7, 48).bfloat16(), Routing(torch.randint(4, (7, 2)), torch.rand(7, 2))


@pytest.mark.parametrize("weight_format", [FP8, MXFP8, MXFP4, NVFP4], ids=str)
def test_module_has_the_bits_of_the_dense_one(weight_format: WeightFormat) -> None:
    module, dense = _base(weight_format)
    x, routing = _tokens()

    assert_bitwise_equal(module(x, routing), dense(x, routing))


@pytest.mark.parametrize("weight_format", [FP8, NVFP4], ids=str)
def test_casts_move_no_number_of_a_format(weight_format: WeightFormat) -> None:
    module, _ = _base(weight_format)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    module.float().bfloat16()

    for name, tensor in module.state_dict().items():
        assert_bitwise_equal(tensor, before[name])


def test_state_dict_goes_into_a_module_of_the_same_kind() -> None:
    module, _ = _base()
    other, _ = _base()
    x, routing = _tokens()

    other.load_state_dict(module.state_dict())

    assert_bitwise_equal(other(x, routing), module(x, routing))
    assert "format=mxfp4" in repr(module)


def test_state_dict_of_another_layout_or_format_is_refused() -> None:
    module, dense = _base()
    halves = quantize(dense.weights.to_layout(Layout()), MXFP4)
    nvfp4 = quantize(dense.weights, NVFP4)

    for weights, actual in ((halves, "mxfp4 torch.bfloat16 halves"), (nvfp4, "nvfp4")):
        other = QuantizedExperts(weights, dense.activation)
        with pytest.raises(RuntimeError, match=f"be stored as mxfp4 .*interleave=1, got {actual}"):
            module.load_state_dict(other.state_dict())


def test_adapters_over_quantised_experts_have_the_bits_of_those_over_dense_ones() -> None:
    module, dense = _base()
    x, routing = _tokens()
    names = ("gate_up_a", "gate_up_b", "down_a", "down_b")
    quantised, plain = (
        LoRAExperts(base, gate_up_rank=3, down_rank=2, scaling=2.0) for base in (module, dense)
    )
    with torch.no_grad():
        for name in names:
            getattr(plain, name).copy_(getattr(quantised, name).normal_(std=0.1))

    outs = [adapted(x, routing) for adapted in (quantised, plain)]

    assert_bitwise_equal(*(out.detach() for out in outs))
    grads = [
        torch.autograd.grad(out.float().square().sum(), [getattr(adapted, n) for n in names])
        for out, adapted in zip(outs, (quantised, plain), strict=True)
    ]
    for own, theirs in zip(*grads, strict=True):
        assert own.abs().sum() > 0
        assert_bitwise_equal(own, theirs)


def test_a_whole_layer_has_the_bits_of_the_dense_one() -> None:
    """Quantised routed experts and a quantised shared expert that every token goes to."""
    module, dense = _base()
    shared = Experts(num_experts=1, hidden_size=48, intermediate_size=32, dtype=torch.bfloat16)
    packed = QuantizedExperts(quantize(shared.weights, NVFP4))
    shared.load_weights(dequantize(packed.weights))
    router = Router(hidden_size=48, num_experts=4, rule=RoutingRule(topk=2))
    x = torch.randn(7, 48).bfloat16()

    quantised = MoE(router=router, experts=module, shared=packed, routed_scaling=2.5)
    plain = MoE(router=router, experts=dense, shared=shared, routed_scaling=2.5)

    assert_bitwise_equal(quantised(x).detach(), plain(x).detach())


def test_merging_into_a_format_is_refused() -> None:
    adapted = LoRAExperts(_base()[0], gate_up_rank=0, down_rank=2, scaling=1.0)

    with pytest.raises(UnsupportedError, match="cannot be merged into mxfp4"):
        adapted.merge()
    assert adapted.weights.dtype == torch.bfloat16


def test_bad_arguments_are_named() -> None:
    module, dense = _base()

    with pytest.raises(TypeError, match="weights must be a QuantizedWeights, got ExpertWeights"):
        QuantizedExperts(dense.weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown backend 'fussed'"):
        QuantizedExperts(module.weights, backend="fussed")
    with pytest.raises(ValueError, match="unknown placement"):
        QuantizedExperts(module.weights, placement="somewhere")  # type: ignore[arg-type]
