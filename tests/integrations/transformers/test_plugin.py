import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, NemotronHConfig
from transformers.integrations import finegrained_fp8, moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from samebits.errors import UnsupportedError
from samebits.integrations.transformers import attach, plugin, register
from samebits.integrations.transformers.translation import ATTRIBUTE, is_current, weights_of
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = pytest.mark.reference

E, H, F, K, T = 5, 24, 16, 2, 11


def gpt_oss():
    return GptOssExperts(GptOssConfig(num_local_experts=E, hidden_size=H, intermediate_size=F))


def mixtral(**options):
    config = MixtralConfig(num_local_experts=E, hidden_size=H, intermediate_size=F, **options)
    return MixtralExperts(config)


def nemotron():
    config = NemotronHConfig(n_routed_experts=E, hidden_size=H, moe_intermediate_size=F)
    return NemotronHExperts(config)


BUILDERS = [gpt_oss, mixtral, nemotron]


def filled(module, implementation="samebits"):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    module.config._experts_implementation = implementation
    return module


def eager(module):
    twin = copy.deepcopy(module)
    twin.config._experts_implementation = "eager"
    return twin


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])
    return x, ids, torch.rand(T, K, generator=generator)


def results(module, x, ids, probs):
    """Return the output and every gradient by name."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    module.zero_grad()
    out = module(x, ids, probs)
    out.square().sum().backward()
    grads = {f"d_{name}": p.grad.clone() for name, p in module.named_parameters()}
    return {"out": out.detach(), "d_x": x.grad, "d_probs": probs.grad} | grads


@pytest.mark.parametrize("build", BUILDERS)
def test_output_and_gradients_are_within_budget_of_the_class(build):
    module = filled(build())
    attach(module)
    x, ids, probs = inputs()
    exact = results(eager(module).double(), x.double(), ids, probs.double())
    ours, plain = results(module, x, ids, probs), results(eager(module), x, ids, probs)
    for name, value in ours.items():
        assert_within_budget(
            value, plain[name], exact[name], torch.float32, name, per_expert="proj" in name
        )


def test_weights_are_views_of_the_parameters():
    module = filled(gpt_oss())
    attach(module)
    weights = weights_of(module, getattr(module, ATTRIBUTE))
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    held = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    assert [t.data_ptr() for t in held] == [getattr(module, n).data_ptr() for n in names]


def test_the_table_says_what_was_found():
    (row,) = attach(gpt_oss())
    assert (row.path, row.cls, row.orientation) == ("", "GptOssExperts", "in_out")
    assert row.activation == "silu(alpha=1.702,limit=7.0,linear_offset=1.0)"
    assert row.layout == "interleave=1"
    assert "own forward" in row.verified
    assert row.activation in str(attach(gpt_oss()))


def test_scalars_come_from_the_module():
    module = gpt_oss()
    module.limit, module.alpha = 3, 1.25
    assert attach(module)[0].activation == "silu(alpha=1.25,limit=3.0,linear_offset=1.0)"


def test_register_and_attach_are_idempotent():
    register()
    module = filled(gpt_oss())
    first = attach(module)
    translation = getattr(module, ATTRIBUTE)
    register()
    assert attach(module) == first
    assert getattr(module, ATTRIBUTE) is translation
    assert moe.ALL_EXPERTS_FUNCTIONS["samebits"] is plugin.experts_forward


def test_both_interfaces_know_the_name():
    register()
    assert finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["samebits"] is plugin.experts_forward


def test_importing_imports_nothing_of_transformers():
    code = (
        "import sys, samebits.integrations.transformers;"
        "sys.exit(any(name.split('.')[0] == 'transformers' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_missing_part_of_transformers_is_an_import_error(monkeypatch):
    monkeypatch.delattr(moe, "ExpertsInterface")
    with pytest.raises(ImportError, match="has no ExpertsInterface"):
        attach(gpt_oss())


def test_missing_transformers_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5\.17"):
        register()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("build", [gpt_oss, lambda: mixtral(hidden_act="gelu_pytorch_tanh")])
def test_a_copy_stays_attached(build, copied):
    module = filled(build())
    attach(module)
    twin = copied(module)
    assert is_current(twin, getattr(twin, ATTRIBUTE))
    assert_bitwise_equal(twin(*inputs()), module(*inputs()))
    assert not any("samebits" in name for name in module.state_dict())


def test_new_parameters_are_seen():
    module = filled(gpt_oss())
    attach(module)
    module.to(torch.bfloat16)
    assert module(*inputs(torch.bfloat16)).dtype == torch.bfloat16
    module.to(torch.float32)
    module.load_state_dict({n: 2 * p for n, p in module.state_dict().items()})
    x, ids, probs = inputs()
    with torch.no_grad():
        plain = eager(module)(x, ids, probs)
        exact = eager(module).double()(x.double(), ids, probs.double())
        assert_within_budget(module(x, ids, probs), plain, exact, torch.float32)


def test_attach_works_on_the_meta_device():
    with torch.device("meta"):
        assert attach(gpt_oss())[0].activation.startswith("silu(alpha")


def test_sentinel_ids_contribute_nothing():
    module = filled(gpt_oss())
    attach(module)
    module._is_expert_parallel = True
    x, ids, probs = inputs()
    marked = ids.clone()
    marked[::2, 0], marked[1::4, 1] = E, E + 3
    dropped = marked >= E
    ours = results(module, x, marked, probs.masked_fill(dropped, float("nan")))
    assert torch.equal(ours["d_probs"][dropped], torch.zeros(int(dropped.sum())))
    silenced = probs.masked_fill(dropped, 0.0)
    plain = results(module, x, ids, silenced)
    exact = results(eager(module).double(), x.double(), ids, silenced.double())
    for name in ("out", "d_x", "d_gate_up_proj", "d_down_proj"):
        assert_within_budget(ours[name], plain[name], exact[name], torch.float32, name)


@pytest.mark.skipif(
    not hasattr(gpt_oss(), "_is_expert_parallel"), reason="transformers 5.17 has no such flag"
)
def test_ids_out_of_range_raise_without_expert_parallelism():
    module = filled(gpt_oss())
    attach(module)
    x, ids, probs = inputs()
    with pytest.raises(ValueError, match="topk_ids must be in"):
        module(x, ids + E, probs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_probabilities_and_ids(dtype):
    module = filled(gpt_oss())
    attach(module)
    x, ids, probs = inputs()
    expected = module(x, ids, probs.to(dtype).float())
    assert_bitwise_equal(module(x, ids.to(torch.int32), probs.to(dtype)), expected)


def test_autocast_returns_the_dtype_it_was_given():
    module = filled(gpt_oss())
    attach(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(*inputs()).dtype == torch.float32


def tiny_model(cls=GptOssForCausalLM, config=GptOssConfig, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"hidden_size": H, "intermediate_size": F, "num_key_value_heads": 1}
    sizes |= {"num_local_experts": E, "num_experts_per_tok": K}
    return cls(config(**(sizes | options))).eval()


def test_a_whole_model_trains_and_generates():
    model = tiny_model()
    tokens = torch.arange(24).reshape(2, 12) % 61
    model.set_experts_implementation("eager")
    expected = model(tokens).logits.detach()
    exact = copy.deepcopy(model).double()(tokens).logits.detach()
    generated = model.generate(tokens, max_new_tokens=5, do_sample=False)
    table = attach(model)
    assert [row.path for row in table] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert model.get_experts_implementation()[""] == "samebits"
    output = model(tokens, labels=tokens)
    assert_within_budget(output.logits.detach(), expected, exact, torch.float32)
    output.loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].mlp.experts.parameters())
    assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), generated)


def test_a_refused_module_leaves_the_model_as_it_was():
    model = tiny_model()
    model.model.layers[1].mlp.experts.limit = "seven"
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts"):
        attach(model)
    assert model.config._experts_implementation == "eager"
    assert not hasattr(model.model.layers[0].mlp.experts, ATTRIBUTE)


def test_each_layer_has_its_own_activation():
    model = tiny_model()
    model.model.layers[1].mlp.experts.limit = 2.0
    assert [row.activation.split(",")[1] for row in attach(model)] == ["limit=7.0", "limit=2.0"]


def test_a_model_without_experts_is_an_error():
    with pytest.raises(ValueError, match="must hold an experts module, got Linear"):
        attach(nn.Linear(2, 2))


@pytest.mark.parametrize("model", [None, "gpt2", nn.Linear])
def test_only_modules_can_be_attached(model):
    with pytest.raises(TypeError, match="model must be a Module, got "):
        attach(model)
