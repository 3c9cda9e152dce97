"""Adapters over frozen experts: the bits of the merged layer, gradients, PEFT's weights."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import Activation, Layout, Routing, UnsupportedError, experts
from samebits.nn import Experts, LoRAExperts
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

EXPERTS, HIDDEN, COLUMNS, RANK = 3, 20, 12, 4
PREFIX = "base_model.model.model.layers.0.mlp.experts"


def _base(dtype: torch.dtype = torch.float32, **options: Any) -> Experts:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": COLUMNS}
    return Experts(**(sizes | options), dtype=dtype)


def _adapted(base: Experts, **options: Any) -> LoRAExperts:
    ranks = {"gate_up_rank": RANK, "down_rank": 2, "scaling": 1.75}
    adapted = LoRAExperts(base, **(ranks | options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return adapted


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Routing]:
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(7)])
    return torch.randn(7, HIDDEN).to(dtype), Routing(ids, torch.rand(7, 2))


STORED: list[dict[str, Any]] = [
    {},
    {"layout": Layout(interleave=1), "orientation": "in_out", "gate_up_bias": True},
    {"activation": Activation(kind="relu2", gated=False), "down_bias": True},
]


@pytest.mark.parametrize("options", STORED, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_has_the_bits_of_unmerged(
    options: dict[str, Any], shared: bool, dtype: torch.dtype
) -> None:
    base = _base(dtype, **options)
    adapted = _adapted(base, shared=shared)
    x, routing = _inputs(dtype)
    place = base.gate_up.data_ptr()
    untouched = base(x, routing)

    unmerged = adapted(x, routing)
    merged = adapted.merge()

    assert not torch.equal(unmerged, untouched)
    assert merged is base
    assert base.gate_up.data_ptr() == place
    assert_bitwise_equal(merged(x, routing), unmerged.detach())
    assert_bitwise_equal(adapted(x, routing).detach(), unmerged.detach())


def test_the_base_decides_whether_z_is_computed_again() -> None:
    x, routing = _inputs()
    kept, grads = [], []
    for recompute in (False, True):
        torch.manual_seed(5)
        adapted = _adapted(_base(recompute=recompute))
        with torch.no_grad():
            adapted.base.gate_up.fill_(0.1)
            adapted.base.down.fill_(0.2)
        saved: list[int] = []

        def keep(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = adapted(x, routing)
        out.sum().backward()
        kept.append(sum(saved))
        grads.append([p.grad for p in adapted.parameters() if p.requires_grad])

    # z has 2F numbers for each slot.
    assert kept[0] - kept[1] == 14 * 2 * COLUMNS
    for one, other in zip(*grads, strict=True):
        assert_bitwise_equal(one, other)


def test_a_fresh_adapter_changes_no_bit() -> None:
    base = _base(torch.bfloat16)
    x, routing = _inputs(torch.bfloat16)
    expected = base(x, routing)

    adapted = LoRAExperts(base, gate_up_rank=RANK, down_rank=RANK, scaling=2.0)

    assert_bitwise_equal(adapted(x, routing).detach(), expected.detach())


def test_gradients_are_those_of_the_formula() -> None:
    adapted = _adapted(_base(torch.float64))
    x, routing = _inputs(torch.float64)
    routing = Routing(routing.topk_ids, routing.topk_probs.double())
    leaves = [p for p in adapted.parameters() if p.requires_grad]
    assert [tuple(p.shape) for p in leaves] == [(3, 4, 20), (3, 24, 4), (3, 2, 12), (3, 20, 2)]

    actual = torch.autograd.grad(adapted(x, routing).square().sum(), leaves)

    a, b, c, d = leaves
    held = adapted.base.weights
    weights = held.map(lambda tensor: tensor)
    object.__setattr__(weights, "gate_up", held.gate_up + 1.75 * b @ a)
    object.__setattr__(weights, "down", held.down + 1.75 * d @ c)
    expected = torch.autograd.grad(experts(x, routing, weights).square().sum(), leaves)
    for value, exact in zip(actual, expected, strict=True):
        assert relative_error(value, exact) < 2.0**-40
    assert all(p.grad is None and not p.requires_grad for p in adapted.base.parameters())


def test_one_projection_alone() -> None:
    adapted = _adapted(_base(), gate_up_rank=0)
    x, routing = _inputs()

    adapted(x, routing).sum().backward()

    assert adapted.gate_up_a is None
    assert adapted.down_b is not None
    assert adapted.down_b.grad.any()
    assert_bitwise_equal(adapted.weights.gate_up, adapted.base.weights.gate_up)


def test_a_compiled_call_sees_a_new_scaling() -> None:
    x, routing = _inputs()
    base = _base()
    layers = [_adapted(base, scaling=s) for s in (0.5, 1.0, 2.0, 0.5)]
    compiled = torch.compile(
        lambda layer, x, ids, probs: layer(x, Routing(ids, probs)), backend="aot_eager"
    )

    for layer in layers:
        out = compiled(layer, x, routing.topk_ids, routing.topk_probs)
        assert_bitwise_equal(out.detach(), layer(x, routing).detach())


def _peft(parts: dict[str, str], rank: int = 2) -> dict[str, Tensor]:
    """What PEFT saves for ``parts``: its name of a linear layer → the part that it is."""
    tensors = {}
    for expert in range(EXPERTS):
        for name, part in parts.items():
            rows, columns = (HIDDEN, COLUMNS) if part == "down" else (COLUMNS, HIDDEN)
            tensors[f"{PREFIX}.{expert}.{name}.lora_A.weight"] = torch.randn(rank, columns)
            tensors[f"{PREFIX}.{expert}.{name}.lora_B.weight"] = torch.randn(rows, rank)
    return tensors


@pytest.mark.parametrize("layout", [Layout(), Layout(interleave=1), Layout(up_first=True)])
@pytest.mark.parametrize(
    "names",
    [
        {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
        {"w1": "gate", "w3": "up", "w2": "down"},
        {"down_proj": "down"},
    ],
)
def test_pefts_weights_are_those_of_its_linear_layers(
    names: dict[str, str], layout: Layout
) -> None:
    base = _base(layout=layout)
    halves = base.weights.to_layout(Layout()).map(lambda t: t.detach().clone())
    tensors = _peft(names)

    adapted = LoRAExperts.from_peft(base, tensors, PREFIX, scaling=0.5)

    merged = adapted.weights.to_layout(Layout())
    stored = {"gate": halves.gate_up[:, :COLUMNS], "up": halves.gate_up[:, COLUMNS:]}
    stored["down"] = halves.down
    found = {"gate": merged.gate_up[:, :COLUMNS], "up": merged.gate_up[:, COLUMNS:]}
    found["down"] = merged.down
    for name, part in names.items():
        for expert in range(EXPERTS):
            a, b = (tensors[f"{PREFIX}.{expert}.{name}.lora_{side}.weight"] for side in "AB")
            expected = stored[part][expert].double() + 0.5 * b.double() @ a.double()
            assert relative_error(found[part][expert], expected) < 2.0**-20


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({f"{PREFIX}.lora_A.weight": 1}, ValueError, "or of single experts, not both"),
        (
            {f"{PREFIX}.0.gate.lora_A.weight": 1},
            UnsupportedError,
            "is no adapter of a",
        ),
        ({f"{PREFIX}.0.up_proj.lora_magnitude_vector": 1}, UnsupportedError, "magnitude_vector is"),
        ({f"{PREFIX}.1.up_proj.lora_A.weight": None}, ValueError, r"be of 3 experts, got \[1\]"),
        ({f"{PREFIX}.3.up_proj.lora_A.weight": 1}, ValueError, r"be of 3 experts, got \[3\]"),
    ],
)
def test_what_does_not_say_where_it_belongs_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    tensors = _peft({"gate_proj": "gate", "up_proj": "up"})
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(2, HIDDEN)

    with pytest.raises(error, match=message):
        LoRAExperts.from_peft(_base(), tensors, PREFIX, scaling=1.0)


def _stacked(part: str, rows: int, columns: int, *, swapped: bool = False) -> dict[str, Tensor]:
    """What PEFT saves for a stacked parameter: experts outermost in A, innermost in B."""
    shape = (rows, columns) if swapped else (columns, rows)
    return {
        f"{PREFIX}.{part}lora_A.weight": torch.randn(2 * EXPERTS, shape[0]),
        f"{PREFIX}.{part}lora_B.weight": torch.randn(shape[1], 2 * EXPERTS),
    }


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("nested", ["", "base_layer."])
def test_pefts_stacked_parameters_are_told_by_their_shapes(nested: str, swapped: bool) -> None:
    base = _base(layout=Layout(interleave=1))
    before = {"gate_up": base.weights.gate_up.clone(), "down": base.weights.down.clone()}
    other = "base_layer." if not nested else ""
    tensors = {
        "gate_up": _stacked(nested, 2 * COLUMNS, HIDDEN, swapped=swapped),
        "down": _stacked(other, HIDDEN, COLUMNS, swapped=swapped),
    }

    adapted = LoRAExperts.from_peft(base, tensors["gate_up"] | tensors["down"], PREFIX, scaling=0.5)

    for part, pair in tensors.items():
        a, b = pair.values()
        # PEFT's own formula, in its own words: o r e, e r i -> e o i, or -> e i o.
        delta = torch.einsum(
            "ore,eri->eio" if swapped else "ore,eri->eoi",
            b.double().reshape(b.shape[0], 2, EXPERTS),
            a.double().reshape(EXPERTS, 2, -1),
        )
        expected = before[part].double() + 0.5 * delta
        assert relative_error(getattr(adapted.weights, part), expected) < 2.0**-20


def test_no_adapter_of_mixed_dtypes_is_narrowed() -> None:
    tensors = _peft({"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})
    tensors = {n: t if "down" in n else t.bfloat16() for n, t in tensors.items()}

    adapted = LoRAExperts.from_peft(_base(torch.bfloat16), tensors, PREFIX, scaling=1.0)

    assert adapted.gate_up_a is not None
    assert adapted.down_a is not None
    assert adapted.gate_up_a.dtype == adapted.down_a.dtype == torch.float32
    assert_bitwise_equal(adapted.down_a[2], tensors[f"{PREFIX}.2.down_proj.lora_A.weight"])


def test_a_name_that_is_there_twice_and_ranks_that_differ_are_errors() -> None:
    tensors = _peft({"gate_proj": "gate", "up_proj": "up"})
    name = f"{PREFIX}.1.up_proj.lora_A.weight"

    twice = tensors | {name.replace("_A.", "_A.default."): tensors[name] + 1}
    with pytest.raises(ValueError, match="must be the one of its kind, got a second one"):
        LoRAExperts.from_peft(_base(), twice, PREFIX, scaling=1.0)
    with pytest.raises(ValueError, match=r"up_proj\.A must have one shape"):
        LoRAExperts.from_peft(_base(), tensors | {name: tensors[name][:1]}, PREFIX, scaling=1.0)


def test_a_stacked_parameter_that_may_be_two_is_refused() -> None:
    square = Experts(num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=HIDDEN)
    tensors = _stacked("", HIDDEN, HIDDEN)

    with pytest.raises(UnsupportedError, match="down, a_over_rows=False or down, a_over_rows=True"):
        LoRAExperts.from_peft(square, tensors, PREFIX, scaling=1.0)
    adapted = LoRAExperts.from_peft(square, tensors, PREFIX, scaling=1.0, a_over_rows=False)
    assert adapted.gate_up_a is None
    plain = Experts(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        activation=Activation(kind="relu2", gated=False),
    )
    with pytest.raises(UnsupportedError, match=r"what it adapts: gate_up, .* or down"):
        LoRAExperts.from_peft(plain, tensors, PREFIX, scaling=1.0, a_over_rows=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_B.weight": None}, "must hold A and B"),
        ({"lora_A.weight": (7, HIDDEN)}, "have r·E columns of B and rows of A, with E = 3"),
        ({"lora_A.weight": (6, HIDDEN + 1)}, r"be over \(\d+, \d+\) or .* got"),
        ({"base_layer.lora_A.weight": (6, HIDDEN), "base_layer.lora_B.weight": (2 * COLUMNS, 6)},
         "be the one adapter of gate_up"),
    ],
)  # fmt: skip
def test_stacked_parameters_must_fit(
    change: dict[str, tuple[int, int] | None], message: str
) -> None:
    tensors = _stacked("", 2 * COLUMNS, HIDDEN)
    for name, shape in change.items():
        if shape is None:
            del tensors[f"{PREFIX}.{name}"]
        else:
            tensors[f"{PREFIX}.{name}"] = torch.zeros(shape)

    with pytest.raises(ValueError, match=message):
        LoRAExperts.from_peft(_base(), tensors, PREFIX, scaling=1.0)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs PEFT")
@pytest.mark.filterwarnings("ignore")
def test_what_peft_itself_saves_is_read() -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    class Layer(torch.nn.Module):
        """A model whose experts are stacked parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Module()
            self.experts.gate_up_proj = torch.nn.Parameter(base.weights.gate_up.detach().clone())
            self.experts.down_proj = torch.nn.Parameter(base.weights.down.detach().clone())

    base = _base()
    wanted = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=1, target_modules=[], target_parameters=wanted)
    model = get_peft_model(Layer(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    saved = get_peft_model_state_dict(model)

    adapted = LoRAExperts.from_peft(base, saved, "base_model.model.experts", scaling=0.5)

    merged = model.merge_and_unload()
    assert relative_error(adapted.weights.gate_up, merged.experts.gate_up_proj) < 2.0**-20
    assert relative_error(adapted.weights.down, merged.experts.down_proj) < 2.0**-20


def test_parts_and_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="must hold A and B of gate and up, or of down"):
        LoRAExperts.from_peft(_base(), _peft({"gate_proj": "gate"}), PREFIX, scaling=1.0)
    with pytest.raises(ValueError, match="got nothing"):
        LoRAExperts.from_peft(_base(), {}, PREFIX, scaling=1.0)
    wrong = _peft({"down_proj": "gate"})
    with pytest.raises(ValueError, match=r"down_a of .* must have shape \(3, 2, 12\)"):
        LoRAExperts.from_peft(_base(), wrong, PREFIX, scaling=1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gate_up_rank": 0, "down_rank": 0}, ValueError, "not both be 0"),
        ({"gate_up_rank": -1}, ValueError, "gate_up_rank must be >= 0"),
        ({"scaling": 0.0}, ValueError, "scaling must be"),
        ({"scaling": "1"}, TypeError, "scaling must be"),
        ({"dtype": torch.int32}, TypeError, "dtype must be one of bf16"),
    ],
)
def test_arguments_are_checked(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _adapted(_base(), **options)
    with pytest.raises(TypeError, match="base must be an Experts"):
        LoRAExperts(torch.nn.ReLU(), gate_up_rank=1, down_rank=1, scaling=1.0)  # type: ignore[arg-type]
