"""FP8 experts of transformers: the weights that it dequantises, the layer of ours."""

from types import SimpleNamespace

import pytest
import torch
from fp8_modules import build
from torch import nn
from transformers.integrations import finegrained_fp8

from samebits import Routing, UnsupportedError, experts
from samebits.checks.models.experts import judge_case
from samebits.formats import dequantize
from samebits.integrations.transformers import attach, fp8, fp8_case, tiny
from samebits.integrations.transformers.provider import Transformers
from samebits.integrations.transformers.translation import ATTRIBUTE
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights

pytestmark = pytest.mark.reference

OAI = {"swiglu_limit": 1.0, "swiglu_alpha": 1.702}
MODULES = {
    "blocks": {},
    "blocks-limit": {"options": {"swiglu_limit": 1.0}},
    "blocks-e8m0": {"scale_fmt": "ue8m0", "options": OAI},
    "ragged": {"columns": 192, "hidden": 256},
    "tensor": {"block_size": None, "columns": 80},
    "no-gate": {"has_gate": False},
    "fp4": {
        "expert_dtype": "fp4",
        "scale_fmt": "ue8m0",
        "columns": 96,
        "options": {"mlp_gate_softcap": 2.0, "mlp_up_softcap": 3.0},
    },
}


def tokens(hidden, dtype=torch.bfloat16):
    x = torch.randn(7, hidden).to(dtype).requires_grad_()
    probs = torch.rand(7, 2).requires_grad_()
    return x, torch.randint(0, 5, (7, 2)), probs


def theirs(module):
    """Return the weights that transformers makes of the module's tensors on loading."""
    converter = finegrained_fp8.Fp8Dequantize(SimpleNamespace())
    first = fp8.first_name(module)

    def one(name):
        values, scales = getattr(module, name), getattr(module, name + "_scale_inv")
        if values.shape[1] % scales.shape[1]:
            pytest.skip("transformers dequantises whole blocks only")
        return converter._dequantize_one(values, scales, output_dtype=torch.bfloat16)

    return ExpertWeights(gate_up=one(first), down=one("down_proj"))


@pytest.mark.parametrize("name", MODULES)
def test_bits_of_the_layer_of_the_dequantised_weights(name):
    module = build(**MODULES[name])
    (row,) = attach(module)
    x, ids, probs = tokens(module.hidden_dim)

    out = module(x, ids, probs)

    translation = getattr(module, ATTRIBUTE)
    weights = dequantize(fp8.quantized_weights_of(module, translation, torch.bfloat16))
    expected = experts(x, Routing(ids, probs), weights, translation.activation)
    assert_bitwise_equal(out.detach(), expected.detach())
    grads, own = (torch.autograd.grad(o.float().sum(), (x, probs)) for o in (out, expected))
    for grad, value in zip(grads, own, strict=True):
        assert_bitwise_equal(grad, value)
    assert row.activation == translation.activation.key
    assert fp8.NOTE in row.note


def test_scales_of_16_bits_are_widened():
    """Qwen's FP8 checkpoints keep them in bf16."""
    module = build()
    module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv.data.bfloat16()

    matrix = fp8.matrix_of(module, "gate_up_proj")

    assert_bitwise_equal(matrix.dequantize(torch.bfloat16), theirs(module).gate_up)
    module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv.data.double()
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn with .*float64 scales"):
        fp8.matrix_of(module, "gate_up_proj")


@pytest.mark.parametrize("name", [n for n in MODULES if n != "ragged"])
def test_weights_are_those_that_transformers_dequantises(name):
    module = build(**MODULES[name])
    attach(module)

    held = fp8.quantized_weights_of(module, getattr(module, ATTRIBUTE), torch.bfloat16)

    dense, expected = dequantize(held), theirs(module)
    assert_bitwise_equal(dense.gate_up, expected.gate_up)
    assert_bitwise_equal(dense.down, expected.down)


@pytest.mark.parametrize("found", fp8_case.found(), ids=lambda found: found.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_check_passes_ours(found, dtype):
    findings = list(judge_case(found.build(), Transformers(), ["samebits"], dtype))

    verdicts = [f.verdict for f in findings if f.implementation == "samebits"]
    assert len(verdicts) >= 6
    assert set(verdicts) == {"pass"}


def test_a_dropped_limit_is_caught():
    class Forgetful(fp8_case.TinyFP8):
        def _runnable(self, dtype):
            module = super()._runnable(dtype)
            module.limit = None
            return module

    case = Forgetful(fp8_case.found()[0], tiny.DEFAULT_SIZES)

    findings = judge_case(case, Transformers(), ["samebits"], torch.float32)

    assert "fail" in {f.verdict for f in findings if f.implementation == "samebits"}


def test_scales_of_gate_and_up_apart():
    """As a checkpoint's are when they are put one behind the other: 2 blocks each, not 3."""
    module = build(columns=192, hidden=128)
    scales = torch.rand(5, 4, 1) + 0.5
    module.gate_up_proj_scale_inv = nn.Parameter(scales, requires_grad=False)

    held = fp8.matrix_of(module, "gate_up_proj")

    assert held.format.block == (64, 128)
    dense = held.dequantize(torch.float32)
    for row, block in (
        (0, 0),
        (127, 0),
        (128, 1),
        (191, 1),
        (192, 2),
        (319, 2),
        (320, 3),
        (383, 3),
    ):
        expected = module.gate_up_proj[:, row].float() * scales[:, block]
        assert_bitwise_equal(dense[:, row], expected.detach())


def test_rows_of_scales_that_may_mean_two_things_are_refused():
    with pytest.raises(UnsupportedError, match=r"FP8Experts: F = 80 is no multiple of its blocks"):
        attach(build(columns=80))


def test_static_activation_scales_are_refused():
    with pytest.raises(UnsupportedError, match="its activation_scheme is 'static'"):
        attach(build(activation_scheme="static"))


def test_fp4_with_fp32_scales_is_refused():
    with pytest.raises(UnsupportedError, match=r"FP4 with torch\.float32 scales, not E8M0"):
        attach(build(expert_dtype="fp4"))


def test_scales_of_another_shape_are_refused():
    module = build()
    module.down_proj_scale_inv = nn.Parameter(torch.ones(5, 3, 1))

    with pytest.raises(UnsupportedError, match=r"scales have shape \(5, 3, 1\), not \(5, 1, 1\)"):
        attach(module)


def test_a_gate_that_is_changed_after_attach_is_seen():
    module = build(**MODULES["blocks-limit"])
    attach(module)
    x, ids, probs = tokens(128)
    before = module(x, ids, probs)

    module.limit = 0.25

    assert not torch.equal(module(x, ids, probs), before)


def test_compiled_code_runs_it():
    module = build(**MODULES["blocks-e8m0"])
    attach(module)
    x, ids, probs = tokens(128)

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    with torch.no_grad():
        assert_bitwise_equal(compiled(x, ids, probs), module(x, ids, probs))
