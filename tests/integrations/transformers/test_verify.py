"""attach() against every decorated class, and against classes written to fool it."""

import copy

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from samebits.errors import UnsupportedError
from samebits.integrations.transformers import attach, tiny, zoo
from samebits.integrations.transformers.oracle import Float64Casts
from samebits.testing.numerics import assert_bitwise_equal, judge

pytestmark = pytest.mark.reference

SIZES = tiny.DEFAULT_SIZES


def run(module, implementation, x, ids, probs):
    """Return the output and every gradient by name."""
    module.config._experts_implementation = implementation
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out = module(x, ids, probs)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "d_x": x.grad, "d_probs": probs.grad} | grads


def misjudged(found):
    """Return what of one class is over budget in fp32, with its judgement."""
    module = tiny.build(found, SIZES)
    attach(module)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SIZES.T, SIZES.H, generator=generator)
    ids = torch.stack(
        [torch.randperm(SIZES.E, generator=generator)[: SIZES.K] for _ in range(SIZES.T)]
    )
    probs = torch.rand(SIZES.T, SIZES.K, generator=generator)
    ours = run(copy.deepcopy(module), "samebits", x, ids, probs)
    plain = run(copy.deepcopy(module), "eager", x, ids, probs)
    with Float64Casts():
        exact = run(module.double(), "eager", x.double(), ids, probs.double())
    return {
        f"{found.name} {name}": str(judgement)
        for name, value in ours.items()
        for judgement in [
            judge(value, plain[name], exact[name], torch.float32, per_expert="proj" in name)
        ]
        if not judgement.passed
    }


def test_every_decorated_class_is_right():
    classes = [found for found in zoo.discover() if isinstance(found, zoo.ExpertsClass)]
    assert len(classes) >= 50
    wrong = {}
    for found in classes:
        wrong |= misjudged(found)
    assert not wrong


# Classes whose code reads submodules, functions and parts of functions, each in its own way.
@pytest.mark.parametrize(
    "model", ["gemma4", "muse_spark", "inkling2", "beam", "nemotron_h", "lfm2_moe"]
)
def test_compiled_without_graph_breaks(model):
    classes = [found for found in zoo.discover() if isinstance(found, zoo.ExpertsClass)]
    (found,) = [f for f in classes if f.name.startswith(model + ".")] or [None]
    if found is None:
        pytest.skip(f"this transformers has no {model}")
    module = tiny.build(found, SIZES)
    attach(module)
    module.config._experts_implementation = "samebits"
    arguments = (
        torch.randn(SIZES.T, SIZES.H),
        torch.tensor([[0, 3, 1]] * SIZES.T),
        torch.rand(SIZES.T, 3),
    )
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(compiled(*arguments), module(*arguments))


def decorated(**members):
    """Return an experts class with a plain forward through ``_apply_gate`` and these members."""

    class Custom(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, hidden, columns = 3, config.hidden_size, config.intermediate_size
            self.gate_up_proj = nn.Parameter(torch.zeros(3, 2 * columns, hidden))
            self.down_proj = nn.Parameter(torch.zeros(3, hidden, columns))
            self.act_fn = nn.SiLU()
            self.setup()

        def setup(self):
            pass

        def _apply_gate(self, z):
            gate, up = z.chunk(2, -1)
            return self.act_fn(gate) * up

        def forward(self, x, ids, probs):
            out = torch.zeros_like(x)
            for e in range(self.num_experts):
                token, k = torch.where(ids == e)
                h = self._apply_gate(x[token] @ self.gate_up_proj[e].T)
                out = out.index_add(0, token, h @ self.down_proj[e].T * probs[token, k, None])
            return out

    for name, member in members.items():
        setattr(Custom, name, member)
    return use_experts_implementation(Custom)


def build(**members):
    return decorated(**members)(MixtralConfig(hidden_size=8, intermediate_size=4))


def test_a_plain_class_of_ones_own_is_translated():
    assert attach(build())[0].activation == "silu"


def limited(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate.clamp(max=self.config.swiglu_limit)) * up.clamp(
        -self.config.swiglu_limit, self.config.swiglu_limit
    )


def test_numbers_of_the_configuration_are_read_at_each_call():
    module = build(_apply_gate=limited)
    module.config.swiglu_limit = 5.0
    assert attach(module)[0].activation == "silu(limit=5.0)"
    module.config.swiglu_limit = 2.0
    assert attach(module)[0].activation == "silu(limit=2.0)"


def learned_slope(self):
    self.slope = nn.Parameter(torch.ones(()))


def hidden_tensor(self):
    # Not a parameter and not a buffer; it equals the neutral value now and may not later.
    self.__dict__["slope"] = torch.ones(())


def with_slope(self, z):
    gate, up = z.chunk(2, -1)
    return gate * torch.sigmoid(self.slope * gate) * up


def while_training(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate) * (up if self.training else 2 * up)


def drops_the_last_expert(self, x, ids, probs):
    out = torch.zeros_like(x)
    for e in range(self.num_experts - 1):
        token, k = torch.where(ids == e)
        h = self._apply_gate(x[token] @ self.gate_up_proj[e].T)
        out = out.index_add(0, token, h @ self.down_proj[e].T * probs[token, k, None])
    return out


def weighs_the_input(self, x, ids, probs):
    out = torch.zeros_like(x)
    for e in range(self.num_experts):
        token, k = torch.where(ids == e)
        h = self._apply_gate(x[token] * probs[token, k, None] @ self.gate_up_proj[e].T)
        out = out.index_add(0, token, h @ self.down_proj[e].T)
    return out


def counts(self, z):
    self.calls = 1
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate) * up


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"setup": learned_slope, "_apply_gate": with_slope}, "do not announce: slope"),
        ({"setup": hidden_tensor, "_apply_gate": with_slope}, "reads the tensor slope"),
        ({"_apply_gate": while_training}, r"depends on train\(\)"),
        ({"setup": lambda self: setattr(self, "act_fn", nn.Dropout(0.1))}, "applies dropout"),
        ({"forward": drops_the_last_expert}, "outputs or gradients differ"),
        ({"forward": weighs_the_input}, "outputs or gradients differ"),
        ({"_apply_gate": counts}, "sets calls while it runs"),
        ({"_apply_gate": lambda self, z: z @ z}, "fails on a small copy"),
        ({"setup": lambda self: setattr(self, "act_fn", nn.Mish())}, r"_apply_gate \(Mish\) is no"),
        ({"setup": lambda self: delattr(self, "down_proj")}, "lacks down_proj"),
    ],
)
def test_a_class_that_is_not_understood_is_refused(members, reason):
    with pytest.raises(UnsupportedError, match=reason):
        attach(build(**members))


def test_a_forward_that_ignores_the_overridden_gate_is_refused():
    class Clamped(MixtralExperts):
        def _apply_gate(self, z):
            gate, up = z.chunk(2, -1)
            return self.act_fn(gate.clamp(max=7)) * up.clamp(-7, 7)

    module = Clamped(MixtralConfig(num_local_experts=3, hidden_size=8, intermediate_size=4))
    with pytest.raises(UnsupportedError, match=r"is no activation|outputs or gradients differ"):
        attach(module)


def test_a_gate_replaced_on_an_instance_is_refused():
    module = build()
    module._apply_gate = lambda z: z
    with pytest.raises(UnsupportedError, match="replaced on the instance"):
        attach(module)


def test_a_limit_that_the_class_ignores_is_noted():
    config = MixtralConfig(num_local_experts=3, hidden_size=8, intermediate_size=4)
    config.expert_swiglu_limit_list = [0.0, 4.0]
    config.share_expert_swiglu_limit_list = [5.0]
    (row,) = attach(MixtralExperts(config))
    assert "does not apply config.expert_swiglu_limit_list = [0.0, 4.0]" in row.note
    assert "share" not in row.note
