"""gpt-oss in MXFP4 through the experts interface: packed again, bit for bit."""

import copy

import pytest
import torch
from fp8_modules import build
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from samebits import UnsupportedError
from samebits.checks.models.experts import judge_case
from samebits.formats import FP8, MXFP4
from samebits.formats.loading import from_gpt_oss
from samebits.integrations.transformers import attach, pack_experts, packed_case
from samebits.integrations.transformers.provider import Transformers
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

HIDDEN, COLUMNS, EXPERTS = 64, 96, 4


def checkpoint(layer):
    """Return the experts' tensors of one layer as a checkpoint has them: any bytes."""
    generator = torch.Generator().manual_seed(layer)
    tensors = {}
    for name, rows, columns in (
        ("gate_up_proj", 2 * COLUMNS, HIDDEN),
        ("down_proj", HIDDEN, COLUMNS),
    ):
        groups = columns // 32
        shape = (EXPERTS, rows, groups, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape[:3], generator=generator, dtype=torch.uint8)
        # A block whose numbers are small for its scale, as quantisers other than ours leave them.
        blocks[0, 0, 0] = 0x11
        tensors[f"e.{name}_blocks"], tensors[f"e.{name}_scales"] = blocks, scales
        tensors[f"e.{name}_bias"] = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
    return tensors


def model():
    """Return gpt-oss as ``Mxfp4Config(dequantize=True)`` loads it."""
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=COLUMNS,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    made = GptOssForCausalLM(config).bfloat16()
    for number, layer in enumerate(made.model.layers):
        tensors, experts = checkpoint(number), layer.mlp.experts
        with torch.no_grad():
            for name in ("gate_up_proj", "down_proj"):
                stored = (tensors[f"e.{name}_{part}"] for part in ("blocks", "scales"))
                getattr(experts, name).copy_(convert_moe_packed_tensors(*stored))
                getattr(experts, name + "_bias").copy_(tensors[f"e.{name}_bias"])
    return made


def test_logits_are_those_of_the_dense_model_and_weights_those_of_the_checkpoint():
    made = model()
    attach(made)
    ids = torch.arange(12)[None]
    before = made(ids).logits

    paths = pack_experts(made, MXFP4)

    assert paths == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert_bitwise_equal(made(ids).logits.detach(), before.detach())
    for number, layer in enumerate(made.model.layers):
        assert layer.mlp.experts.gate_up_proj is None
        held = layer.mlp.experts.samebits_packed.weights
        stored = from_gpt_oss(checkpoint(number), "e")
        assert_bitwise_equal(
            held.gate_up.dequantize(torch.float32), stored.gate_up.dequantize(torch.float32)
        )
        assert held.gate_up.values.shape == stored.gate_up.values.shape


def test_packing_twice_and_attaching_again_change_nothing():
    made = model()
    pack_experts(made, MXFP4)
    ids = torch.arange(5)[None]
    before = made(ids).logits

    assert pack_experts(made, MXFP4) == ()

    assert len(attach(made)) == 2
    assert_bitwise_equal(copy.deepcopy(made)(ids).logits.detach(), before.detach())


def test_gradients_flow_around_packed_experts():
    made = model()
    pack_experts(made, MXFP4)

    made(torch.arange(5)[None]).logits.sum().backward()

    assert made.model.embed_tokens.weight.grad is not None
    assert made.model.layers[0].mlp.experts.down_proj_bias.grad is not None


def test_weights_that_would_change_are_refused_and_nothing_is_touched():
    made = model()
    with torch.no_grad():
        made.model.layers[1].mlp.experts.down_proj[1, 2, 3] *= 1.01

    with pytest.raises(UnsupportedError, match=r"down of model.layers.1.mlp.experts: 1 of 24576"):
        pack_experts(made, MXFP4)

    assert made.model.layers[0].mlp.experts.gate_up_proj is not None
    assert pack_experts(made, MXFP4, exact=False) != ()


def test_any_class_of_the_interface_is_packed():
    module = MixtralExperts(
        MixtralConfig(num_local_experts=3, hidden_size=32, intermediate_size=48)
    ).bfloat16()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    module.config._experts_implementation = "samebits"
    x = torch.randn(5, 32).bfloat16()
    ids, probs = torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    attach(module)
    before = module(x, ids, probs)

    assert pack_experts(module, FP8, exact=False) == ("",)

    error = (module(x, ids, probs) - before).norm() / before.norm()
    assert 0 < error < 0.1


def test_a_limit_that_changes_afterwards_is_seen():
    made = model()
    attach(made)
    made.model.layers[0].mlp.experts.limit = 0.5
    changed = made(torch.arange(5)[None]).logits.detach()
    made.model.layers[0].mlp.experts.limit = 7.0
    pack_experts(made, MXFP4)
    assert not torch.equal(made(torch.arange(5)[None]).logits, changed)

    made.model.layers[0].mlp.experts.limit = 0.5

    assert_bitwise_equal(made(torch.arange(5)[None]).logits.detach(), changed)


def test_quantised_modules_and_bad_arguments_are_refused():
    with pytest.raises(UnsupportedError, match="holds quantised weights already"):
        pack_experts(build(), MXFP4)
    with pytest.raises(TypeError, match="weight_format must be a WeightFormat, got str"):
        pack_experts(model(), "mxfp4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_check_passes_it(dtype):
    (found,) = packed_case.found()

    findings = list(judge_case(found.build(), Transformers(), ["samebits", "eager"], dtype))

    for implementation, verdict in (("samebits", "pass"), ("eager", "unsupported")):
        assert {f.verdict for f in findings if f.implementation == implementation} == {verdict}
