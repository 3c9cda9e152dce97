"""Emulations: the reference where nothing is moved, refusals, and Megatron's own code."""

from dataclasses import fields, replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from samebits import Activation, ExpertWeights, ProbPlacement, Routing, UnsupportedError
from samebits.emulate import EMULATIONS, RoundingPoints, emulated_experts, why_not
from samebits.formats import MXFP4, dequantize, quantize
from samebits.problem import Problem
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs, run, run_function
from samebits.testing.numerics import assert_bitwise_equal, bitwise_equal

T = 7
LIMITED = Activation(limit=2.0, linear_offset=1.0)
BF16 = replace(CASES["biases"], dtype="bf16", grad=False, activation=LIMITED)


@pytest.mark.reference
@pytest.mark.parametrize("name", sorted(CASES))
def test_without_points_it_is_the_reference(name: str) -> None:
    case = CASES[name]
    dtype = "bf16" if case.dtype == "fp32" else case.dtype
    problem = replace(case, dtype=dtype, out_dtype=None, grad=False)
    inputs = make_inputs(problem, T, distribution="dropped", valid_tokens=T - 2)

    found = run_function(problem, inputs, partial(emulated_experts, emulate=RoundingPoints()))

    assert_bitwise_equal(found["out"], run(problem, inputs, "reference")["out"])


@pytest.mark.reference
@pytest.mark.parametrize("point", [field.name for field in fields(RoundingPoints)])
def test_every_point_changes_bits(point: str) -> None:
    problem = BF16
    before = RoundingPoints()
    if point == "slope_once":
        problem = replace(problem, activation=Activation(alpha=1.702))
        before = RoundingPoints(operations=True)
    if point == "scaled":
        problem = replace(problem, norm_eps=1e-5)
    inputs = make_inputs(problem, T)
    outputs = [
        run_function(problem, inputs, partial(emulated_experts, emulate=points))["out"]
        for points in (before, replace(before, **{point: True}))
    ]

    assert not bitwise_equal(*outputs)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("hf_eager", {"placement": ProbPlacement.FC2_INPUT}, "fc2_output, not at fc2_input"),
        ("megatron_eager", {}, "fc1_input, fc2_input, not at fc2_output"),
        ("megatron_eager", {"placement": ProbPlacement.FC1_INPUT}, "K = 1 only, not 3"),
        (
            "megatron_batch_invariant",
            {
                "placement": ProbPlacement.FC2_INPUT,
                "activation": Activation(limit=1.0, limit_position="post"),
            },
            "before the activation only",
        ),
        (
            "megatron_eager",
            {
                "placement": ProbPlacement.FC2_INPUT,
                "activation": Activation(kind="situ", gate_softcap=4.0),
            },
            "it has no situ",
        ),
        (
            "megatron_eager",
            {"placement": ProbPlacement.FC2_INPUT, "norm_eps": 1e-5},
            "its experts have no norm",
        ),
        ("hf_eager", {"out_dtype": "fp32"}, "it returns bf16, not fp32"),
    ],
)
def test_what_a_framework_lacks_is_refused(
    name: str, change: dict[str, object], reason: str
) -> None:
    problem = replace(BF16, **change)  # type: ignore[arg-type]
    inputs = make_inputs(problem, T)

    assert reason in (why_not(name, problem) or "")
    with pytest.raises(UnsupportedError, match=reason):
        run_function(problem, inputs, partial(emulated_experts, emulate=name))


@pytest.mark.reference
def test_bad_arguments_are_refused() -> None:
    inputs = make_inputs(BF16, T)
    call = partial(emulated_experts, inputs.x, inputs.routing, inputs.weights)

    with pytest.raises(ValueError, match="unknown emulation 'vllm'; expected one of 'hf_eager'"):
        call(emulate="vllm")
    with pytest.raises(ValueError, match="x must have shape"):
        emulated_experts(inputs.x[0], inputs.routing, inputs.weights, emulate="hf_eager")
    ids = torch.full_like(inputs.routing.topk_ids, 77)
    with pytest.raises(ValueError, match="topk_ids must"):
        emulated_experts(
            inputs.x, replace(inputs.routing, topk_ids=ids), inputs.weights, emulate="hf_eager"
        )


@pytest.mark.reference
@pytest.mark.parametrize("emulate", [3, None, True])
def test_an_emulation_is_a_name_or_points(emulate: object) -> None:
    inputs = make_inputs(Problem.parse("H=16 F=24 E=4 K=2 dtype=fp32"), 5)

    with pytest.raises(TypeError, match="emulate must be one of hf_eager"):
        emulated_experts(inputs.x, inputs.routing, inputs.weights, emulate=emulate)  # type: ignore[arg-type]


@pytest.mark.reference
def test_quantised_weights_are_emulated_as_what_they_stand_for() -> None:
    inputs = make_inputs(Problem.parse("H=64 F=32 E=4 K=2 dtype=bf16"), 9)
    stored = quantize(inputs.weights, MXFP4)

    found, expected = (
        emulated_experts(inputs.x, inputs.routing, weights, emulate="hf_eager")
        for weights in (stored, dequantize(stored))
    )

    assert_bitwise_equal(found, expected)


@pytest.mark.reference
def test_nothing_but_the_emulation_knows_of_it() -> None:
    inputs = make_inputs(BF16, T)
    before = run(BF16, inputs, "reference")["out"]
    for name in EMULATIONS:
        with pytest.raises(ValueError, match="unknown backend"):
            run(BF16, inputs, name)
    assert_bitwise_equal(run(BF16, inputs, "reference")["out"], before)


class Exact:
    """A call in bf16 whose products have one value in whatever order they are summed.

    Tokens and ``gate_up`` are on coarse grids, so sums fit in fp32 exactly; a row of ``down`` has
    two numbers, so a sum of two is rounded once. Rounding points are all that is left to differ.
    """

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def grid(low: int, high: int, step: float, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=generator).bfloat16() * step

        E, H, F = problem.E, problem.H, problem.F
        self.x = grid(-4, 4, 1.0, T, H)
        self.gate_up = grid(-96, 96, 2.0**-8, E, problem.activation.columns * F, H)
        self.down = torch.zeros(E, H, F, dtype=torch.bfloat16)
        for _ in range(2):
            places = torch.randint(F, (E, H, 1), generator=generator)
            self.down.scatter_(2, places, grid(-96, 96, 2.0**-7, E, H, 1))
        self.gate_up_bias = self.down_bias = None
        if problem.gate_up_bias is not None:
            self.gate_up_bias = grid(-96, 96, 2.0**-6, E, problem.activation.columns * F)
            self.down_bias = grid(-96, 96, 2.0**-6, E, H)
        self.topk_ids = torch.rand(T, E, generator=generator).argsort(1)[:, : problem.K]
        self.topk_probs = torch.rand(T, problem.K, generator=generator)

    def emulated(self, problem: Problem, emulate: str | RoundingPoints) -> Tensor:
        weights = ExpertWeights(
            gate_up=self.gate_up,
            down=self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )
        return emulated_experts(
            self.x,
            Routing(self.topk_ids, self.topk_probs),
            weights,
            problem.activation,
            emulate=emulate,
            placement=problem.placement,
        )


class _Linear(torch.nn.Module):
    """Megatron's linear with ``skip_bias_add``: the product in its dtype, and the bias beside."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x @ self.weight.T, self.bias


def _megatron(exact: Exact, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return Megatron's own rows, sorted by expert, and the token of each."""
    mlp = pytest.importorskip("megatron.core.transformer.mlp", reason="needs megatron-core")
    activation = problem.activation
    config = SimpleNamespace(
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=activation.gated,
        activation_func=torch.nn.functional.silu,
        activation_func_clamp_value=activation.limit,
        glu_linear_offset=activation.linear_offset,
    )
    rows, tokens = [], []
    for expert in range(problem.E):
        token, choice = torch.where(exact.topk_ids == expert)
        bias, bias2 = exact.gate_up_bias, exact.down_bias
        module = SimpleNamespace(
            config=config,
            activation_func=config.activation_func,
            linear_fc1=_Linear(exact.gate_up[expert], None if bias is None else bias[expert]),
            linear_fc2=_Linear(exact.down[expert], None if bias2 is None else bias2[expert]),
        )
        x, p = exact.x[token], exact.topk_probs[token, choice]
        if problem.placement == ProbPlacement.FC1_INPUT:
            x, p = (p[:, None] * x).to(x.dtype), torch.ones_like(p)
        rows.append(mlp.MLP.forward(module, x, p)[0])
        tokens.append(token)
    return torch.cat(rows), torch.cat(tokens)


MEGATRON = {
    "plain": replace(BF16, activation=Activation(), gate_up_bias=None, down_bias=None),
    "limit": replace(BF16, activation=LIMITED, gate_up_bias="bf16", down_bias="bf16"),
}
PLACED = [
    (name, placement) for name in MEGATRON for placement in ("fc2_input", "fc1_input")
]  # fmt: skip


def _placed(name: str, placement: str) -> Problem:
    topk = 1 if placement == "fc1_input" else 3
    return replace(MEGATRON[name], placement=ProbPlacement(placement), K=topk)


@pytest.mark.reference
@pytest.mark.parametrize(("name", "placement"), PLACED)
def test_megatron_eager_has_the_bits_of_megatron(name: str, placement: str) -> None:
    moe_utils = pytest.importorskip(
        "megatron.core.transformer.moe.moe_utils", reason="needs megatron-core"
    )
    problem = _placed(name, placement)
    exact = Exact(problem)

    rows, tokens = _megatron(exact, problem)
    expected = moe_utils.unpermute(rows, tokens, exact.x.shape)

    # On CPU torch adds the rows of one call in fp32; test_atomics_round is about GPUs.
    points = replace(EMULATIONS["megatron_eager"].points, additions=False)
    assert_bitwise_equal(exact.emulated(problem, points), expected)
    assert not bitwise_equal(exact.emulated(problem, RoundingPoints()), expected)


@pytest.mark.reference
@pytest.mark.parametrize(("name", "placement"), PLACED)
def test_megatron_batch_invariant_has_the_bits_of_megatron(name: str, placement: str) -> None:
    invariant = pytest.importorskip(
        "megatron.core.transformer.moe.batch_invariant", reason="needs megatron-core >= 0.20"
    )
    problem = _placed(name, placement)
    exact = Exact(problem)

    rows, tokens = _megatron(exact, problem)
    experts = exact.topk_ids.flatten().sort(stable=True).values
    routed = torch.zeros(T, problem.E, dtype=torch.bool)
    routed[tokens, experts] = True
    places = invariant.build_inverse_permutation_map(
        routed, experts * T + tokens, tokens, len(tokens)
    )
    expected = invariant.unpermute(
        rows, exact.x.shape, probs=None, num_experts=problem.E, inverse_map=places
    )

    assert_bitwise_equal(exact.emulated(problem, "megatron_batch_invariant"), expected)
    if problem.K > 1:
        assert not bitwise_equal(exact.emulated(problem, "megatron_eager"), expected)


@pytest.mark.gpu
def test_atomics_round(device: torch.device) -> None:
    """What Megatron sums with: each addition rounds to the dtype, in whatever order they come."""
    rows = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    places = torch.zeros(3, 4096, dtype=torch.int64, device=device)
    found = torch.zeros(1, 4096, dtype=torch.bfloat16, device=device)
    found = found.scatter_add_(0, places, rows.to(device))[0].cpu()
    possible = [(rows[i] + rows[j]) + rows[k] for i, j, k in permutations(range(3))]

    assert torch.stack([found == one for one in possible]).any(0).all()
    assert not bitwise_equal(found, rows.float().sum(0).bfloat16())
