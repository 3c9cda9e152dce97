"""Kinds of faults that users reported elsewhere: options dropped or doubled, layouts mixed up.

Letters and numbers in the names are those of the project's list of faults.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    Problem,
    ProbPlacement,
    Routing,
    RoutingRule,
    experts,
)
from samebits.nn import Experts, MoE, Router
from samebits.testing.inputs import exact, make_inputs, plain, run
from samebits.testing.numerics import (
    assert_bitwise_equal,
    assert_within_budget,
    bitwise_equal,
)
from samebits.weights import merge_gate_up, split_gate_up

pytestmark = pytest.mark.reference

BOTH = pytest.mark.parametrize("backend", ["reference", "grouped"])
LAYOUTS = [
    Layout(),
    Layout(up_first=True),
    Layout(interleave=1),
    Layout(interleave=2, up_first=True),
]
T, H, F, E, K = 5, 48, 80, 3, 2
WIDE = torch.float64


def _routing(probs: tuple[float, ...] = (0.75, 0.25), tokens: int = T) -> Routing:
    topk = len(probs)
    ids = torch.stack([(torch.arange(topk) + t) % E for t in range(tokens)])
    return Routing(ids, torch.tensor([probs] * tokens), E)


def _zeros(**options: Any) -> ExpertWeights:
    tensors = {"gate_up": torch.zeros(E, 2 * F, H), "down": torch.zeros(E, H, F)}
    return ExpertWeights(**(tensors | options))


def _random(
    scale: float = 1.0, *, hidden: int = H, columns: int = F, **options: Any
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    return ExpertWeights(
        gate_up=torch.randn(E, 2 * columns, hidden, generator=generator) * scale,
        down=torch.randn(E, hidden, columns, generator=generator) * columns**-0.5,
        **options,
    )


def _x(tokens: int = T, hidden: int = H) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1))


# --- D: options dropped, doubled or hard-coded


@BOTH
def test_d9_limits_differ_by_layer_and_between_routed_and_shared(backend: str) -> None:
    def activation(limit: float | None) -> Activation:
        return Activation(limit=limit)

    x, router = _x() * 4, Router(hidden_size=H, num_experts=E, rule=RoutingRule(topk=K))
    sizes = {"hidden_size": H, "intermediate_size": F, "backend": backend}
    outputs = []
    for limit, shared_limit in ((None, 5.0), (4.0, None), (2.0, 7.0)):
        torch.manual_seed(0)
        layer = MoE(
            router=router,
            experts=Experts(num_experts=E, activation=activation(limit), **sizes),
            shared=Experts(num_experts=1, activation=activation(shared_limit), **sizes),
        )
        with torch.no_grad():
            for module in (layer.experts, layer.shared):
                module.gate_up.mul_(8)
        routing = router(x).routing
        routed = experts(x, routing, layer.experts.weights, activation(limit), backend=backend)
        ones = Routing(torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1), 1)
        shared = experts(x, ones, layer.shared.weights, activation(shared_limit), backend=backend)
        outputs.append(layer(x))
        assert_bitwise_equal(outputs[-1], routed + shared)
    assert not any(bitwise_equal(outputs[i], outputs[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@BOTH
def test_d9_limits_of_layers_do_not_go_stale_under_compile(backend: str) -> None:
    x, routing = _x() * 4, _routing()
    layers = []
    for limit in (None, 4.0, 2.0, 4.0):
        torch.manual_seed(0)
        sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": F}
        layers.append(Experts(**sizes, activation=Activation(limit=limit), backend=backend))

    def forward(layer: nn.Module, value: Tensor) -> Tensor:
        out: Tensor = layer(value * 8, routing)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, dynamic=True)
    for layer in layers:
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        out, expected = compiled(layer, leaves[0]), forward(layer, leaves[1])
        assert_bitwise_equal(out, expected)
        grads = [
            torch.autograd.grad(o.sum(), v)[0] for o, v in zip((out, expected), leaves, strict=True)
        ]
        assert_bitwise_equal(*grads)


@BOTH
@pytest.mark.parametrize("placement", [ProbPlacement.FC2_OUTPUT, ProbPlacement.FC2_INPUT])
def test_d13_the_down_bias_is_weighted_by_the_probability(
    backend: str, placement: ProbPlacement
) -> None:
    bias = torch.arange(1.0, E + 1)[:, None].expand(E, H).contiguous()

    out = experts(_x(), _routing(), _zeros(down_bias=bias), placement=placement, backend=backend)

    ids = _routing().topk_ids
    expected = 0.75 * (ids[:, :1] + 1) + 0.25 * (ids[:, 1:] + 1)
    assert_bitwise_equal(out, expected.float().expand(T, H).contiguous())


@BOTH
def test_d14_biases_make_an_output_of_nothing(backend: str) -> None:
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(E, 2 * F, generator=generator)
    second = torch.randn(E, H, generator=generator)
    weights = _random(gate_up_bias=first, down_bias=second)
    routing = _routing()

    out = experts(torch.zeros(T, H), routing, weights, backend=backend)

    def formula(dtype: torch.dtype) -> Tensor:
        gate, up = first.to(dtype).chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
        y = torch.einsum("ef,ehf->eh", h, weights.down.to(dtype)) + second.to(dtype)
        return (y[routing.topk_ids] * routing.topk_probs.to(dtype)[..., None]).sum(1)

    assert_within_budget(out, formula(torch.float32), formula(WIDE), torch.float32)


@BOTH
def test_d15_a_probability_on_the_input_is_applied_once(backend: str) -> None:
    weights, half = _random(), _routing((0.5,))
    ones = Routing(half.topk_ids, torch.ones(T, 1), E)

    out = experts(_x(), half, weights, placement=ProbPlacement.FC1_INPUT, backend=backend)

    assert_bitwise_equal(out, experts(_x() * 0.5, ones, weights, backend=backend))


@BOTH
def test_d16_each_slot_gets_its_own_scaled_token(backend: str) -> None:
    weights, probs, x = _random(), (0.9, 0.2), _x()
    routing = _routing(probs)

    out = experts(x, routing, weights, placement=ProbPlacement.FC1_INPUT, backend=backend)

    def formula(dtype: torch.dtype) -> Tensor:
        total = torch.zeros(T, H, dtype=dtype)
        wide = weights.map(lambda t: t.to(dtype))
        for k, p in enumerate(routing.topk_probs[0].to(dtype)):
            ones = Routing(routing.topk_ids[:, k : k + 1], torch.ones(T, 1, dtype=dtype), E)
            total += experts(x.to(dtype) * p, ones, wide, backend="reference")
        return total

    assert_within_budget(out, formula(torch.float32), formula(WIDE), torch.float32)


@BOTH
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_d19_a_routed_scaling_factor_is_applied_once(
    backend: str, renormalize: bool, with_shared: bool, factor: float
) -> None:
    sizes = {"hidden_size": H, "intermediate_size": F, "backend": backend}
    torch.manual_seed(0)
    routed, shared = Experts(num_experts=E, **sizes), Experts(num_experts=1, **sizes)
    router = Router(hidden_size=H, num_experts=E, rule=RoutingRule(topk=K, renormalize=renormalize))

    def layer(in_rule: float, after: float) -> Tensor:
        router.rule = replace(router.rule, scaling_factor=in_rule)
        parts: dict[str, Any] = {"shared": shared} if with_shared else {}
        out: Tensor = MoE(router=router, experts=routed, routed_scaling=after, **parts)(_x())
        return out

    ones = Routing(torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1), 1)
    beside = shared(_x(), ones) if with_shared else torch.zeros(())
    expected = routed(_x(), router(_x()).routing) * factor + beside
    assert_bitwise_equal(layer(factor, 1.0), expected)
    assert_bitwise_equal(layer(1.0, factor), expected)
    assert_bitwise_equal(layer(2.0, factor / 2), expected)


# --- L: layout, checkpoints, reloading


@BOTH
def test_l1_a_contiguous_checkpoint_loads_into_an_interleaved_module(backend: str) -> None:
    sizes: dict[str, Any] = {"num_experts": E, "hidden_size": H, "intermediate_size": 64}
    biases = {"gate_up_bias": True, "down_bias": True}
    halves = Experts(**sizes, **biases, backend=backend)
    blocks = Experts(**sizes, **biases, backend=backend, layout=Layout(interleave=32))

    blocks.load_weights(halves.weights)

    assert torch.equal(blocks.gate_up[:, 32:64], halves.gate_up[:, 64:96])
    assert_bitwise_equal(blocks(_x(), _routing()), halves(_x(), _routing()))
    for name, tensor in blocks.weights.to_layout(Layout()).named_tensors().items():
        assert_bitwise_equal(tensor, halves.weights.named_tensors()[name], name)
    assert not bitwise_equal(blocks.gate_up, halves.gate_up)


@BOTH
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
def test_l2_a_square_matrix_is_judged_by_the_forward_not_by_a_round_trip(
    backend: str, orientation: Any
) -> None:
    weights, x, routing = _random(hidden=64, columns=64), _x(hidden=64), _routing()
    tensors = [weights.gate_up, weights.down]
    stored = [t if orientation == "out_in" else t.transpose(1, 2).contiguous() for t in tensors]

    with pytest.raises(ValueError, match="orientation must be stated for square matrices"):
        ExpertWeights.from_storage(*stored)
    loaded = ExpertWeights.from_storage(*stored, orientation=orientation)

    wide = weights.map(lambda t: t.double())
    truth = experts(x.double(), routing, wide, backend="reference")
    budget = experts(x, routing, weights, backend="reference")
    assert_within_budget(experts(x, routing, loaded, backend=backend), budget, truth, torch.float32)
    wrong = replace(loaded, down=loaded.down.transpose(1, 2))
    assert not bitwise_equal(experts(x, routing, wrong, backend=backend), budget)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_l3_constant_gate_and_up_rows_tell_layouts_apart(backend: str, layout: Layout) -> None:
    def stored(gate: float, up: float, *shape: int) -> Tensor:
        parts = (torch.full((E, F, *shape), value) for value in (gate, up))
        return merge_gate_up(*parts, layout, 1)

    weights = ExpertWeights(
        gate_up=stored(1 / H, 2 / H, H),
        down=torch.full((E, H, F), 1 / F),
        gate_up_bias=stored(-3.0, 0.5),
        layout=layout,
    )
    x = torch.full((1, H), 2.0)

    out = experts(x, _routing((1.0,), tokens=1), weights, backend=backend)

    # The gate is 2·1 − 3 and up 2·2 + 0.5: any exchange of the two, or of their biases, shows.
    truth = torch.full((1, H), -1.0, dtype=WIDE).sigmoid() * -1.0 * 4.5
    assert_within_budget(out, truth.float(), truth, torch.float32)


def _shard(weights: ExpertWeights, rank: int, ranks: int) -> ExpertWeights:
    """One rank's columns: split into gate and up first, then cut."""
    size = F // ranks
    span = slice(rank * size, (rank + 1) * size)
    assert weights.gate_up_bias is not None
    gate, up = split_gate_up(weights.gate_up, weights.layout, 1)
    gate_bias, up_bias = split_gate_up(weights.gate_up_bias, weights.layout)
    return ExpertWeights(
        gate_up=merge_gate_up(gate[:, span], up[:, span], weights.layout, 1),
        down=weights.down[:, :, span],
        gate_up_bias=merge_gate_up(gate_bias[:, span], up_bias[:, span], weights.layout),
        # Added once, not on every rank.
        down_bias=weights.down_bias if rank == 0 else None,
        layout=weights.layout,
    )


@BOTH
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_l4_l5_l7_shards_of_columns_add_up_to_the_whole(
    backend: str, ranks: int, layout: Layout
) -> None:
    biases = {"gate_up_bias": torch.randn(E, 2 * F), "down_bias": torch.randn(E, H)}
    weights = _random(layout=layout, **biases).map(lambda t: t.double())
    x, routing = _x().double(), _routing()
    whole = experts(x, routing, weights, backend="reference")

    shards = [_shard(weights, rank, ranks) for rank in range(ranks)]
    total = sum(experts(x, routing, shard, backend=backend) for shard in shards)

    assert isinstance(total, Tensor)
    assert_within_budget(total, whole, whole, WIDE)
    rejoined = [
        torch.cat([split_gate_up(shard.gate_up, layout, 1)[part] for shard in shards], 1)
        for part in (0, 1)
    ]
    assert_bitwise_equal(merge_gate_up(*rejoined, layout, 1), weights.gate_up)


@BOTH
def test_l9_either_orientation_of_a_rectangular_checkpoint_is_recognised(backend: str) -> None:
    weights, x, routing = _random(), _x(), _routing()
    transposed = (t.transpose(1, 2).contiguous() for t in (weights.gate_up, weights.down))

    loaded = ExpertWeights.from_storage(*transposed)

    wide = weights.map(lambda t: t.double())
    truth = experts(x.double(), routing, wide, backend="reference")
    budget = experts(x, routing, weights, backend="reference")
    assert_within_budget(experts(x, routing, loaded, backend=backend), budget, truth, torch.float32)


STRIDED = {
    "columns of a wider tensor": lambda x: torch.cat([x, x, x], 1)[:, H : 2 * H],
    "transposed": lambda x: x.T.contiguous().T,
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row": lambda x: torch.cat([x, x], 1)[:1, :H],
    "one row expanded": lambda x: x[:1].expand(T, H),
}


@BOTH
@pytest.mark.parametrize("view", STRIDED)
def test_l11_views_of_tokens_are_read_as_what_they_show(backend: str, view: str) -> None:
    weights, x = _random(), STRIDED[view](_x())
    routing = _routing(tokens=len(x))
    copies = [x.contiguous().clone().requires_grad_(), x.detach().requires_grad_()]
    before = x.detach().clone()

    results = []
    for leaf in copies:
        out = experts(leaf, routing, weights, backend=backend)
        results.append((out, torch.autograd.grad(out.square().sum(), leaf)[0]))

    for strided, dense in zip(*results, strict=True):
        assert_bitwise_equal(strided.contiguous(), dense)
    assert_bitwise_equal(x.detach().contiguous(), before)


@BOTH
def test_l11_views_of_parameters_are_read_as_what_they_show(backend: str) -> None:
    problem = Problem(H=H, F=F, E=E, K=K, dtype="fp32", grad=True)
    inputs = make_inputs(problem, T)
    dense = inputs.weights
    packed = torch.cat([dense.gate_up, dense.down.transpose(1, 2)], 1)
    strided = replace(dense, gate_up=packed[:, : 2 * F], down=packed[:, 2 * F :].transpose(1, 2))
    oracle, budget = exact(problem, inputs), plain(problem, inputs)

    out = experts(inputs.x, inputs.routing, strided, backend=backend)

    assert_within_budget(out, budget["out"], oracle["out"], torch.float32)


@BOTH
def test_l13_weights_refitted_in_place_are_seen_by_compiled_code(backend: str) -> None:
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": F}
    torch.manual_seed(0)
    module, trained = (Experts(**sizes, backend=backend) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    old = compiled(_x(), _routing())
    places = [p.data_ptr() for p in module.parameters()]

    with torch._dynamo.config.patch(error_on_recompile=True):
        module.load_weights(trained.weights)
        refitted = compiled(_x(), _routing())

    assert [p.data_ptr() for p in module.parameters()] == places
    assert_bitwise_equal(refitted, trained(_x(), _routing()))
    assert not bitwise_equal(refitted, old)


# --- C: recomputation


@BOTH
def test_c1_near_ties_are_routed_alike_when_recomputed(backend: str) -> None:
    sizes = {"hidden_size": H, "intermediate_size": F, "backend": backend}
    layer = MoE(
        router=Router(hidden_size=H, num_experts=E, rule=RoutingRule(topk=1)),
        experts=Experts(num_experts=E, **sizes),
    )
    with torch.no_grad():
        # Every token finds the experts exactly tied.
        layer.router.weight.copy_(layer.router.weight[:1].expand(E, H))
    results = []
    for reentrant in (None, True, False):
        x = _x().requires_grad_()
        layer.zero_grad()
        out = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])

    assert (layer.router(_x()).routing.topk_ids == 0).all()
    for repeated in results[1:]:
        for first, second in zip(results[0], repeated, strict=True):
            assert_bitwise_equal(second, first)


@BOTH
def test_c1_what_is_saved_has_shapes_that_do_not_depend_on_the_routing(backend: str) -> None:
    x = _x().requires_grad_()
    shapes = []
    for ids in (torch.zeros(T, K), torch.full((T, K), -1), _routing().topk_ids):
        saved: list[torch.Size] = []

        def pack(tensor: Tensor, saved: list[torch.Size] = saved) -> Tensor:
            saved.append(tensor.shape)
            return tensor

        routing = Routing(ids.long(), torch.ones(T, K), E)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            experts(x, routing, _random(), backend=backend)
        shapes.append(saved)

    assert shapes[0] == shapes[1] == shapes[2] != []


@BOTH
def test_c2_a_recomputed_forward_counts_once(backend: str) -> None:
    sizes = {"hidden_size": H, "intermediate_size": F, "backend": backend}
    layer = MoE(
        router=Router(hidden_size=H, num_experts=E, rule=RoutingRule(topk=K), selection_bias=True),
        experts=Experts(num_experts=E, **sizes),
    )
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = _x().requires_grad_()

    out, _, _, counts = checkpoint(lambda v: layer(v, losses=True), x, use_reentrant=False)
    out.sum().backward()

    assert counts.sum() == T * K
    assert_bitwise_equal(counts, layer(x, losses=True).counts)
    for name, value in layer.state_dict().items():
        assert_bitwise_equal(value, before[name], name)


@BOTH
def test_every_gradient_of_every_option_is_there(backend: str) -> None:
    problem = Problem(
        H=H, F=F, E=E, K=K, dtype="fp32", gate_up_bias="fp32", down_bias="fp32", grad=True
    )

    for name, value in run(problem, make_inputs(problem, 33), backend).items():
        assert (value != 0).any(), name
