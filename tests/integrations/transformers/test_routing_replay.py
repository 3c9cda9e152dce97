"""The routing of transformers' own routers, recorded and replayed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from samebits import UnsupportedError
from samebits.integrations.transformers import attach
from samebits.integrations.transformers.routing import recording, replaying
from samebits.replay import RecordError
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    | {"norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 6, "intermediate_size": 24, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 24, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_intermediate_size": 24, "moe_k": 2}
    | {"moe_layer_start_index": 0},
}
LAGUNA: dict[str, Any] = {
    "num_experts": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
    "mlp_layer_types": ["sparse"] * 2,
    "layer_types": ["full_attention"] * 2,
    "num_attention_heads_per_layer": [4, 4],
}


def _model(name: str, options: dict[str, Any] | None = None) -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **(SIZES | HEADS | special | (options or TINY[name])))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    attach(model)
    return model


def _tokens() -> Tensor:
    return torch.arange(3, 15).reshape(2, 6)


@pytest.mark.parametrize("name", TINY)
def test_recording_changes_next_to_nothing_and_replaying_nothing(name: str) -> None:
    model, tokens = _model(name), _tokens()
    plain = model(tokens).logits

    with torch.inference_mode(), recording(model) as recorder:
        rollout = model(tokens).logits
    with replaying(model, recorder.record(), "same"):
        trained = model(tokens).logits

    # The probabilities are this library's: the same choice, other last bits.
    assert relative_error(rollout, plain) < 2.0**-18
    assert_bitwise_equal(trained.detach(), rollout.clone())


@pytest.mark.parametrize("probs", ["computed", "recorded"])
def test_the_choice_holds_where_the_routers_have_moved(probs: Any) -> None:
    model, tokens = _model("qwen3_moe"), _tokens()
    with torch.inference_mode(), recording(model) as recorder:
        model(tokens)
    record = recorder.record()
    gates = [layer.mlp.gate for layer in model.model.layers]
    with torch.no_grad():
        for gate in gates:
            gate.weight.normal_()

    with replaying(model, record, probs), recording(model) as again:
        model(tokens).logits.square().sum().backward()

    replayed = again.record()
    for name, layer in record.layers.items():
        assert_bitwise_equal(replayed.layers[name].topk_ids, layer.topk_ids)
        if probs == "recorded":
            assert_bitwise_equal(replayed.layers[name].topk_probs, layer.topk_probs)
    assert all(gate.weight.grad is not None and gate.weight.grad.any() for gate in gates)


def test_recomputed_layers_are_recorded_once() -> None:
    model, tokens = _model("qwen3_moe"), _tokens()
    model.train()
    model.gradient_checkpointing_enable()

    with recording(model) as recorder:
        model(tokens).logits.sum().backward()

    assert recorder.record().tokens == tokens.numel()


def test_logits_that_a_router_has_capped_already_are_no_logits() -> None:
    tokens = _tokens()
    model = _model("laguna", LAGUNA)
    with torch.inference_mode(), recording(model) as recorder:
        model(tokens)
    assert recorder.record().tokens == tokens.numel()

    capped = _model("laguna", LAGUNA | {"moe_router_logit_softcapping": 0.5})
    message = "gate computes other probabilities from its logits than its configuration says"
    with pytest.raises(UnsupportedError, match=message), recording(capped):
        capped(tokens)


def test_a_router_that_moved_has_other_probabilities() -> None:
    model, tokens = _model("mixtral"), _tokens()
    with torch.inference_mode(), recording(model) as recorder:
        model(tokens)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.add_(0.1 * torch.randn(6, 32))

    with (
        pytest.raises(RecordError, match=r"layers\.1\.mlp\.gate computes other probabilities"),
        replaying(model, recorder.record(), "same"),
    ):
        model(tokens)


def test_what_does_not_fit_is_named() -> None:
    model, tokens = _model("mixtral"), _tokens()
    with torch.inference_mode(), recording(model) as recorder:
        model(tokens)

    with (
        pytest.raises(ValueError, match="be called with the record's T = 12 tokens, got 6"),
        replaying(model, recorder.record()),
    ):
        model(tokens[:1])
    with pytest.raises(ValueError, match="model must have a configuration"), recording(nn.ReLU()):
        pass
    config = AutoConfig.for_model("llama", **(SIZES | HEADS))
    dense = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match="unknown model type 'llama'"), recording(dense):
        pass
