"""A scalar that changes after attach() is seen, in eager and under torch.compile."""

import copy

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from samebits.errors import UnsupportedError
from samebits.integrations.transformers import attach, register
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

E, H, F = 4, 16, 12
SEQUENCE = (7.0, 3.0, 1.5, 7.0, 3.0)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def build(cls=GptOssExperts, config=GptOssConfig):
    module = cls(config(num_local_experts=E, hidden_size=H, intermediate_size=F))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    module.config._experts_implementation = "samebits"
    register()
    return module


def inputs(tokens=6):
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(tokens)])
    x = torch.randn(tokens, H, generator=generator)
    return x, ids, torch.rand(tokens, 2, generator=generator)


def expected(module, limit, arguments):
    """Return what a new module with that limit computes, uncompiled."""
    fresh = build()
    fresh.load_state_dict(module.state_dict())
    fresh.limit = limit
    attach(fresh)
    return fresh(*arguments)


def test_limits_bind_in_these_tests():
    module = build()
    values = [expected(module, limit, inputs()).detach() for limit in (7.0, 3.0, 1.5)]
    assert relative_error(values[0], values[1]) > 0.01
    assert relative_error(values[1], values[2]) > 0.01


def test_eager_follows_the_module():
    module = build()
    attach(module)
    for limit in SEQUENCE:
        module.limit = limit
        assert_bitwise_equal(module(*inputs()), expected(module, limit, inputs()))


def test_eager_translates_an_unattached_module():
    module = build()
    assert_bitwise_equal(module(*inputs()), expected(module, 7.0, inputs()))


def _gate_without_clamp(self, z):
    gate, up = z[..., ::2], z[..., 1::2]
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def test_a_gate_replaced_on_the_class_is_seen(monkeypatch):
    module = build()
    attach(module)
    monkeypatch.setattr(GptOssExperts, "_apply_gate", _gate_without_clamp)
    twin = copy.deepcopy(module)
    twin.config._experts_implementation = "eager"
    after, exact = (m(*inputs()).detach() for m in (module, twin))
    assert relative_error(after, exact) < 1e-5


def test_a_gate_replaced_on_the_instance_is_refused():
    module = build()
    attach(module)
    module._apply_gate = lambda z: z[..., ::2]
    with pytest.raises(UnsupportedError, match="replaced on the instance"):
        module(*inputs())


def test_a_replaced_activation_is_seen():
    module = build(MixtralExperts, MixtralConfig)
    attach(module)
    before = module(*inputs()).detach()
    module.act_fn = torch.nn.GELU()
    twin = copy.deepcopy(module)
    twin.config._experts_implementation = "eager"
    after, exact = (m(*inputs()).detach() for m in (module, twin))
    assert relative_error(after, exact) < relative_error(before, exact)
    assert attach(module)[0].activation == "gelu"


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiling_an_unattached_module_raises_and_names_attach(fullgraph):
    compiled = torch.compile(build(), fullgraph=fullgraph)
    with pytest.raises(
        NotImplementedError if not fullgraph else RuntimeError, match=r"attach\(model\)"
    ):
        compiled(*inputs())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_module_raises_where_a_scalar_changed(fullgraph):
    module = build()
    attach(module)
    compiled = torch.compile(module, fullgraph=fullgraph)
    assert_bitwise_equal(compiled(*inputs()), expected(module, 7.0, inputs()))
    module.limit = 3.0
    error = NotImplementedError if not fullgraph else RuntimeError
    with pytest.raises(error, match=r"limit changed since attach"):
        compiled(*inputs())


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_attach_again_serves_every_value(dynamic, grad):
    module = build()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for tokens, limit in enumerate(SEQUENCE, start=5):
        module.limit = limit
        attach(module)
        x, ids, probs = inputs(tokens)
        x.requires_grad_(grad)
        out, reference = compiled(x, ids, probs), expected(module, limit, (x, ids, probs))
        assert_bitwise_equal(out, reference)
        if grad:
            grads = [torch.autograd.grad(value.square().sum(), x)[0] for value in (out, reference)]
            assert_bitwise_equal(*grads)


def test_tokens_do_not_recompile():
    module = build()
    attach(module)
    compiled = torch.compile(module, fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 5, 8, 13):
            compiled(*inputs(tokens))
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(*inputs(21))
