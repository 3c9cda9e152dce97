"""Experts that transformers' interface does not reach, held to their own code."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from samebits.errors import UnsupportedError
from samebits.integrations.transformers import replace_experts
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

HIDDEN, COLUMNS, EXPERTS = 16, 24, 5


def _llama4() -> nn.Module:
    config = SimpleNamespace(
        num_experts_per_tok=2,
        hidden_size=HIDDEN,
        intermediate_size=COLUMNS,
        num_local_experts=EXPERTS,
        hidden_act="silu",
    )
    return Llama4TextMoe(config)


def _step() -> nn.Module:
    config = SimpleNamespace(
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=COLUMNS,
        hidden_act="silu",
    )
    return Step3p7Experts(config, swiglu_limit=0.5)


def _dbrx() -> nn.Module:
    return DbrxExperts(
        SimpleNamespace(
            hidden_size=HIDDEN,
            ffn_hidden_size=COLUMNS,
            moe_num_experts=EXPERTS,
            ffn_act_fn={"name": "gelu"},
        )
    )


def _longcat() -> nn.Module:
    config = SimpleNamespace(
        expert_ffn_hidden_size=COLUMNS,
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_local_experts=EXPERTS,
        zero_expert_num=3,
        hidden_act="silu",
        num_experts_per_tok=3,
        routed_scaling_factor=2.0,
    )
    return LongcatFlashMoE(config)


def _jetmoe() -> nn.Module:
    return JetMoeMoE(
        SimpleNamespace(
            hidden_size=HIDDEN,
            intermediate_size=COLUMNS,
            activation_function="silu",
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
        )
    )


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama4": _llama4,
    "step": _step,
    "dbrx": _dbrx,
    "longcat": _longcat,
    "jetmoe": _jetmoe,
}


def _module(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    module = BUILDERS[name]().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def _arguments(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x = torch.randn(2, 7, HIDDEN, dtype=dtype)
    if name in ("step", "dbrx"):
        rows = x.reshape(-1, HIDDEN) if name == "step" else x
        ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(14)])
        return rows, ids, torch.rand(14, 2, dtype=dtype)
    return (x,)


def _run(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in arguments]
    out = module(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    wanted = [t for t in (*leaves, *module.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(
        out.square().sum(), wanted, allow_unused=True, materialize_grads=True
    )
    return out.detach().reshape(-1, HIDDEN), list(grads)


@pytest.mark.parametrize("name", BUILDERS)
def test_output_and_gradients_are_the_classs_own(name: str) -> None:
    module, arguments = _module(name), _arguments(name)
    theirs, their_grads = _run(module, arguments)

    replace_experts(module)
    ours, our_grads = _run(module, arguments)

    assert relative_error(ours, theirs) < 2.0**-20  # some of their code computes in fp32
    for ours_grad, theirs_grad in zip(our_grads, their_grads, strict=True):
        assert relative_error(ours_grad, theirs_grad) < 2.0**-18


@pytest.mark.parametrize("name", BUILDERS)
def test_parameters_stay_and_it_can_be_undone(name: str) -> None:
    module, arguments = _module(name), _arguments(name)
    held = {n: (id(p), p.data_ptr()) for n, p in module.named_parameters()}
    kinds = [type(m) for m in module.modules()]
    before, _ = _run(module, arguments)

    replaced = replace_experts(module)
    assert [type(m) for m in module.modules()] != kinds
    assert {n: (id(p), p.data_ptr()) for n, p in module.named_parameters()} == held
    replaced.remove()

    assert [type(m) for m in module.modules()] == kinds
    assert not [key for m in module.modules() for key in vars(m) if "samebits" in key]
    assert_bitwise_equal(_run(module, arguments)[0], before)


def test_bf16_is_rounded_where_the_contract_says() -> None:
    module, arguments = _module("step", torch.bfloat16), _arguments("step", torch.bfloat16)
    theirs, _ = _run(module, arguments)
    exact, _ = _run(copy.deepcopy(module).double(), tuple(_widened(arguments)))

    replace_experts(module)
    ours, _ = _run(module, arguments)

    assert ours.dtype == torch.bfloat16
    assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact)


def _widened(arguments: tuple[Tensor, ...]) -> list[Tensor]:
    return [a.double() if a.is_floating_point() else a for a in arguments]


def test_a_copy_is_replaced_too() -> None:
    module, arguments = _module("longcat"), _arguments("longcat")
    replace_experts(module)

    copied = copy.deepcopy(module)

    assert_bitwise_equal(_run(copied, arguments)[0], _run(module, arguments)[0])
    assert copied.experts.gate_up_proj.data_ptr() != module.experts.gate_up_proj.data_ptr()


def test_a_model_generates() -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=31,
        hidden_size=HIDDEN,
        intermediate_size=COLUMNS,
        intermediate_size_mlp=COLUMNS,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=EXPERTS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    tokens = torch.arange(3, 9)[None]
    theirs = model(tokens).logits

    replaced = replace_experts(model)

    assert replaced == ("model.layers.0.feed_forward", "model.layers.1.feed_forward")
    assert relative_error(model(tokens).logits, theirs) < 2.0**-16
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape[1] > 6


def test_a_gate_that_is_not_known_changes_nothing() -> None:
    module = nn.Sequential(_module("dbrx"), _module("dbrx"))
    module[1].mlp.activation_fn = ACT2FN["mish"]
    kinds = [type(m) for m in module.modules()]

    with pytest.raises(UnsupportedError, match=r"the gate of DbrxExperts \(1\) is no activation"):
        replace_experts(module)
    assert [type(m) for m in module.modules()] == kinds


def test_a_model_without_such_experts_is_named() -> None:
    with pytest.raises(ValueError, match=r"model must hold one of Llama4TextMoe, .* got ReLU"):
        replace_experts(nn.ReLU())


def test_what_is_replaced_already_is_left() -> None:
    module = nn.Sequential(_module("step"), _module("dbrx"))
    first = replace_experts(module[0])

    assert replace_experts(module) == ("1",)
    assert replace_experts(module) == ()
    first.remove()
    assert replace_experts(module) == ("0",)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_limit_or_a_function_that_changes_is_read_again(compiled: bool) -> None:
    torch.compiler.reset()
    module, arguments = _module("step"), _arguments("step")
    theirs = copy.deepcopy(module)
    replace_experts(module)
    forward = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    forward(*arguments)

    for name, value in {"limit": 0.125, "act_fn": ACT2FN["gelu"]}.items():
        setattr(module, name, value)
        setattr(theirs, name, value)
        if compiled:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="a gate has changed"):
                forward(*arguments)
            module(*arguments)
        assert relative_error(forward(*arguments), theirs(*arguments)) < 2.0**-20


@pytest.mark.parametrize("name", BUILDERS)
def test_it_compiles_into_one_graph(name: str) -> None:
    torch.compiler.reset()
    module, arguments = _module(name), _arguments(name)
    replace_experts(module)

    compiled = torch.compile(module, backend="eager", fullgraph=True)

    assert_bitwise_equal(_run(compiled, arguments)[0], _run(module, arguments)[0])


def test_a_pickle_is_replaced_too() -> None:
    module, arguments = _module("llama4"), _arguments("llama4")
    replace_experts(module)

    loaded = pickle.loads(pickle.dumps(module))

    assert type(loaded) is type(module)
    assert_bitwise_equal(_run(loaded, arguments)[0], _run(module, arguments)[0])


def test_a_class_that_came_on_top_is_left_alone() -> None:
    """What ``fully_shard`` does to a module's class."""
    module, arguments = _module("step"), _arguments("step")
    replaced = replace_experts(module)
    before, _ = _run(module, arguments)

    module.__class__ = type("FSDPStep3p7Experts", (type(module),), {})
    assert_bitwise_equal(_run(module, arguments)[0], before)
    with pytest.raises(UnsupportedError, match="FSDPStep3p7Experts is a class that came after"):
        replaced.remove()
    assert type(module).__name__ == "FSDPStep3p7Experts"

    other = _module("step")
    other.__class__ = type("FSDPStep3p7Experts", (type(other),), {})
    with pytest.raises(UnsupportedError, match="call replace_experts before fully_shard"):
        replace_experts(other)
