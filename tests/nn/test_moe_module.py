"""``MoE``: every part counts, losses come back with the output, and modules' life."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from layers import EXPERTS, HIDDEN, MOES, TOKENS, TOPK, make_experts, make_router, tokens
from samebits import Routing, RoutingRule, experts
from samebits.nn import Experts, MoE, MoEOutput, Router
from samebits.nn.sums import Parts, add_parts
from samebits.testing.numerics import (
    assert_bitwise_equal,
    assert_within_budget,
    bitwise_equal,
)

pytestmark = pytest.mark.reference

EVERY = pytest.mark.parametrize("name", sorted(MOES))


def _dtype(layer: MoE) -> torch.dtype:
    return layer.experts.gate_up.dtype


def _gradients(layer: MoE, x: Tensor, output: MoEOutput) -> dict[str, Tensor]:
    flow = torch.randn(output.out.shape, generator=torch.Generator().manual_seed(3))
    loss = (output.out.float() * flow).sum() + 0.5 * output.balance_loss + 0.25 * output.z_loss
    names, tensors = zip(("x", x), *layer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, tensors), strict=True))


def _plain(layer: MoE, x: Tensor) -> Tensor:
    """The layer once more from its docstring, without rounding points, in the dtype of ``x``."""
    reference: dict[str, Any] = {"backend": "reference"}

    def run(module: Experts, value: Tensor, routing: Routing) -> Tensor:
        return experts(value, routing, module.weights, module.activation, **reference)

    logits = linear(x, layer.router.weight, layer.router.bias)
    routing = Routing.from_logits(
        logits, layer.router.rule, selection_bias=layer.router.selection_bias
    )
    real = layer.experts.num_experts
    ids = torch.where(routing.topk_ids < real, routing.topk_ids, -1)
    value = x if layer.latent_down is None else linear(x, layer.latent_down.weight)
    total = run(layer.experts, value, Routing(ids, routing.topk_probs, real))
    if layer.latent_up is not None:
        total = linear(total, layer.latent_up.weight)
    identity = torch.where(routing.topk_ids >= real, routing.topk_probs, 0.0).sum(-1, keepdim=True)
    total = layer.routed_scaling * (total + identity * x)
    if layer.shared is None:
        return total
    gate = torch.ones(len(x), 1, dtype=x.dtype)
    if layer.shared_gate is not None:
        gate = torch.sigmoid(linear(x, layer.shared_gate.weight))
    zeros = torch.zeros(len(x), 1, dtype=torch.int64)
    return total + run(layer.shared, x, Routing(zeros, gate, 1))


@pytest.mark.parametrize("name", [name for name in sorted(MOES) if "bf16" not in name])
def test_output_and_gradients_equal_the_formula(name: str) -> None:
    layer = MOES[name]().double()
    x = tokens(dtype=torch.float64).requires_grad_()
    flow = torch.randn(x.shape, dtype=torch.float64)
    tensors = [x, *layer.parameters()]

    out = layer(x)

    exact = _plain(layer, x)
    assert_within_budget(out.detach(), exact.detach(), exact.detach(), torch.float64)
    grads, exact_grads = (torch.autograd.grad(o, tensors, flow) for o in (out, exact))
    for grad, truth in zip(grads, exact_grads, strict=True):
        whole = grad.reshape(1, -1), truth.reshape(1, -1)
        assert_within_budget(whole[0], whole[1], whole[1], torch.float64)


@EVERY
def test_every_parameter_gets_a_gradient(name: str) -> None:
    layer = MOES[name]()
    x = tokens(dtype=_dtype(layer)).requires_grad_()

    for parameter, grad in _gradients(layer, x, layer(x, losses=True)).items():
        assert grad.isfinite().all(), parameter
        assert (grad != 0).any(), parameter


def test_every_option_changes_the_output() -> None:
    x = tokens()
    outputs = []
    for name in ("bare", "shared", "gated-shared", "latent", "identity", "scaled"):
        torch.manual_seed(0)
        outputs.append(MOES[name]()(x))

    for i, first in enumerate(outputs):
        for second in outputs[i + 1 :]:
            assert not bitwise_equal(first, second)


def test_a_power_of_two_scales_exactly() -> None:
    torch.manual_seed(0)
    plain = MOES["bare"]()
    twice = MoE(router=plain.router, experts=plain.experts, routed_scaling=4.0)

    assert_bitwise_equal(twice(tokens()), plain(tokens()) * 4)


def test_identity_experts_return_their_input() -> None:
    router = Router(
        hidden_size=HIDDEN, num_experts=3, rule=RoutingRule(topk=2), selection_bias=True
    )
    layer = MoE(router=router, experts=make_experts(num_experts=1), identity_experts=2)
    assert router.selection_bias is not None
    router.selection_bias.copy_(torch.tensor([-9.0, 9.0, 9.0]))
    x = tokens()
    probs = router(x).routing.topk_probs

    assert_bitwise_equal(layer(x), (probs[:, :1] + probs[:, 1:]) * x)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_an_identity_expert_that_no_slot_chose_reads_nothing(poison: float) -> None:
    ids = torch.tensor([[0, 1], [-1, -1], [5, 5], [3, -1], [0, 5]])
    x = tokens(5)
    x[[0, 1, 2, 4]] = poison
    probs = torch.full((5, 2), 0.5)
    parts = Parts(torch.zeros(5, HIDDEN), x.requires_grad_(), ids, probs.requires_grad_(), None)

    out = add_parts(parts, range(3, 5), "1.0", torch.float32)
    d_x, d_probs = torch.autograd.grad(out.sum(), (x, probs))

    chosen = torch.tensor([False, False, False, True, False])
    assert_bitwise_equal(out[~chosen], torch.zeros(4, HIDDEN))
    assert_bitwise_equal(out[chosen], 0.5 * x[chosen])
    assert_bitwise_equal(d_x, torch.where(chosen[:, None], 0.5, 0.0).expand_as(x))
    assert_bitwise_equal(d_probs[~chosen], torch.zeros(4, 2))


@pytest.mark.parametrize("dropped", [-1, EXPERTS + 2])
def test_a_token_without_slots_gets_zeros_whatever_it_holds(dropped: int) -> None:
    layer, x = MOES["identity"](), tokens()
    x[2] = float("inf")
    ids = layer.router(tokens()).routing.topk_ids
    ids[2] = dropped

    with torch.no_grad():
        out = layer(x, topk_ids=ids)

    assert_bitwise_equal(out[2], torch.zeros(HIDDEN))
    assert out.isfinite().all()


@EVERY
@pytest.mark.parametrize("losses", [False, True])
def test_any_leading_shape_and_either_mode_give_the_same_bits(name: str, losses: bool) -> None:
    layer = MOES[name]()
    x = tokens(24, _dtype(layer))

    with torch.no_grad():
        flat = layer.train()(x)
        shaped = layer.eval()(x.reshape(2, 3, 4, HIDDEN), losses=losses)

    out = shaped.out if isinstance(shaped, MoEOutput) else shaped
    assert isinstance(shaped, MoEOutput) == losses
    assert_bitwise_equal(out, flat.reshape(2, 3, 4, HIDDEN))


@EVERY
def test_inference_has_the_bits_of_training(name: str) -> None:
    layer = MOES[name]()
    x = tokens(dtype=_dtype(layer))
    training = layer(x)

    with torch.no_grad():
        assert_bitwise_equal(layer(x), training.detach())


@EVERY
def test_losses_and_counts(name: str) -> None:
    layer = MOES[name]()
    x = tokens(dtype=_dtype(layer))
    routing, logits = layer.router(x)
    scores = torch.sigmoid(logits.detach().double())
    shares = (scores / scores.sum(-1, keepdim=True)).mean(0)

    output = layer(x, losses=True)

    counts = [int((routing.topk_ids == e).sum()) for e in range(layer.router.num_experts)]
    assert output.counts.tolist() == counts
    load = torch.tensor(counts, dtype=torch.float64) / (TOKENS * TOPK)
    balance = (len(counts) * (load * shares).sum())[None]
    z = torch.logsumexp(logits.detach().double(), -1).square().mean()[None]
    for loss, exact in ((output.balance_loss, balance), (output.z_loss, z)):
        assert loss.dtype == torch.float32
        assert_within_budget(loss.detach()[None], exact.float(), exact, torch.float32)


@EVERY
def test_no_tokens(name: str) -> None:
    layer = MOES[name]()
    x = tokens(0, _dtype(layer)).requires_grad_()

    output = layer(x, losses=True)

    assert (output.out.shape, output.out.dtype) == ((0, HIDDEN), _dtype(layer))
    assert output.balance_loss == output.z_loss == output.counts.sum() == 0
    for parameter, grad in _gradients(layer, x, output).items():
        assert (grad == 0).all(), parameter


@EVERY
def test_tokens_past_the_count_are_not_read_and_count_in_no_loss(name: str) -> None:
    layer = MOES[name]()
    live = tokens(5, _dtype(layer))
    results = []
    for filler in (float("nan"), 0.0):
        x = torch.cat([live, torch.full((4, HIDDEN), filler, dtype=live.dtype)]).requires_grad_()
        count = torch.tensor([5], dtype=torch.int32)
        output = layer(x, losses=True, num_valid_tokens=count)
        results.append(dict(output._asdict()) | _gradients(layer, x, output))

    poisoned, clean = results
    for quantity, value in poisoned.items():
        assert_bitwise_equal(value, clean[quantity], quantity)
    assert (poisoned["out"][5:] == 0).all()
    assert (poisoned["x"][5:] == 0).all()
    assert poisoned["counts"].sum() == 5 * TOPK
    alone = layer(live, losses=True)
    for quantity in ("balance_loss", "z_loss"):
        exact = getattr(alone, quantity).detach()[None]
        assert_within_budget(poisoned[quantity].detach()[None], exact, exact, torch.float32)


@EVERY
def test_replay_of_recorded_ids_has_the_bits_of_choosing(name: str) -> None:
    layer = MOES[name]()
    x = tokens(dtype=_dtype(layer)).requires_grad_()
    recorded = layer.router(x).routing.topk_ids
    first = layer(x, losses=True)

    second = layer(x, losses=True, topk_ids=recorded)

    for quantity in MoEOutput._fields:
        assert_bitwise_equal(getattr(second, quantity), getattr(first, quantity), quantity)
    assert not bitwise_equal(layer(x, topk_ids=(recorded + 1) % EXPERTS), first.out)
    grads, expected = _gradients(layer, x, second), _gradients(layer, x, first)
    for parameter, grad in grads.items():
        assert_bitwise_equal(grad, expected[parameter], parameter)


@pytest.mark.parametrize("reentrant", [True, False])
@EVERY
def test_checkpointing_changes_no_bit_and_counts_once(name: str, reentrant: bool) -> None:
    layer = MOES[name]()
    results = []
    for checkpointed in (False, True):
        x = tokens(dtype=_dtype(layer)).requires_grad_()
        layer.zero_grad()
        if checkpointed:
            output = checkpoint(lambda v: layer(v, losses=True), x, use_reentrant=reentrant)
        else:
            output = layer(x, losses=True)
        out, balance, z, counts = output
        (out.float().square().sum() + balance + z).backward()
        results.append([out, balance, z, counts, x.grad, *(p.grad for p in layer.parameters())])

    for plain, repeated in zip(*results, strict=True):
        assert_bitwise_equal(repeated, plain)


@EVERY
def test_one_graph_serves_every_token_count(name: str) -> None:
    layer = MOES[name]()
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        assert not any(node.target == "item" for node in graph.graph.nodes), "a float came in"
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counting)
    for count in (127, 193, 16):
        x = tokens(count, _dtype(layer))
        torch._dynamo.mark_dynamic(x, 0)
        results, expected = compiled(x, losses=True), layer(x, losses=True)
        for quantity in MoEOutput._fields:
            assert_bitwise_equal(getattr(results, quantity), getattr(expected, quantity), quantity)
    assert graphs == 1


def test_inductor_gives_the_bits_of_eager_in_both_directions() -> None:
    layer = MOES["whole"]()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)

    for count in (17, 33):
        x = tokens(count).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        flow = torch.randn(count, HIDDEN)
        tensors = [x, *layer.experts.parameters(), *layer.shared.parameters()]
        out, expected = compiled(x), layer(x)
        assert_bitwise_equal(out, expected)
        grads, truth = (torch.autograd.grad(o, tensors, flow) for o in (out, expected))
        for grad, exact in zip(grads[1:], truth[1:], strict=True):
            assert_bitwise_equal(grad, exact)


def test_gradients_of_sums_have_the_strides_that_the_compiler_is_told() -> None:
    routed, dout = torch.randn(5, 4), torch.randn(4, 5).T
    ids, probs = torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2)
    wanted = [True, False, False, False]

    grads = torch.ops.samebits.add_parts_backward(
        dout, routed, None, ids, probs, None, 0, 0, "1.0", "fp32", wanted
    )

    assert grads[0].stride() == routed.stride()


def test_layers_with_other_scalars_do_not_go_stale_under_compile() -> None:
    torch.manual_seed(0)
    parts = make_router(), make_experts()
    scalings = (1.0, 2.5, 4.0, 1.5, 2.5, 1.0)
    layers = [MoE(router=parts[0], experts=parts[1], routed_scaling=s) for s in scalings]
    x = tokens()

    def forward(layer: MoE, value: Tensor) -> Tensor:
        return layer(value)

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, dynamic=True)
    for layer in layers:
        assert_bitwise_equal(compiled(layer, x), layer(x))


@EVERY
def test_autocast_is_a_cast_of_all_but_the_router(name: str) -> None:
    layer = MOES[name]()
    narrow = copy.deepcopy(layer).bfloat16()
    # The router computes in fp32 from what it is given: give both the same values.
    with torch.no_grad():
        for target, source in (
            (layer.router.weight, narrow.router.weight),
            (layer.router.bias, narrow.router.bias),
            (layer.shared_gate, narrow.shared_gate),
        ):
            if isinstance(target, nn.Linear):
                target.weight.copy_(source.weight)
            elif target is not None:
                target.copy_(source)
    x = tokens(dtype=torch.bfloat16).to(_dtype(layer))

    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x, losses=True)

    expected = narrow(x.bfloat16(), losses=True)
    for quantity in MoEOutput._fields:
        assert_bitwise_equal(getattr(output, quantity), getattr(expected, quantity), quantity)


@EVERY
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal(name: str, copier: Any) -> None:
    layer = MOES[name]()
    x = tokens(dtype=_dtype(layer))

    twin = copier(layer)

    assert repr(twin) == repr(layer)
    assert_bitwise_equal(twin(x), layer(x))


@EVERY
def test_state_survives_safetensors(name: str, tmp_path: Path) -> None:
    layer = MOES[name]()
    x = tokens(dtype=_dtype(layer))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    torch.manual_seed(5)
    twin = MOES[name]()
    assert not bitwise_equal(twin(x), layer(x))

    twin.load_state_dict(load_file(tmp_path / "layer.safetensors"))

    assert_bitwise_equal(twin(x), layer(x))


def test_names_of_the_state() -> None:
    names = set(MOES["whole"]().state_dict())

    parts = ("gate_up", "down", "gate_up_bias", "down_bias")
    assert names == {
        *(f"experts.{part}" for part in parts),
        "shared.gate_up",
        "shared.down",
        "router.weight",
        "router.bias",
        "router.selection_bias",
        "shared_gate.weight",
        "latent_down.weight",
        "latent_up.weight",
    }


def test_fp64_throughout_computes_in_fp64() -> None:
    layer = MOES["shared"]().double()

    assert layer(tokens(dtype=torch.float64)).dtype == torch.float64


def test_representation() -> None:
    text = repr(MOES["whole"]())

    assert "latent_size=32, identity_experts=2, routed_scaling=2.5" in text
    assert "(shared): Experts(num_experts=1" in text
