"""``Experts``: parameters in any storage, their state, and everything modules go through."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from layers import (
    COLUMNS,
    EXPERTS,
    EXPERTS_OPTIONS,
    HIDDEN,
    TOKENS,
    make_experts,
    make_routing,
    tokens,
)
from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    PostExpertNorm,
    Routing,
    UnsupportedError,
    experts,
)
from samebits.nn import Experts
from samebits.testing.numerics import assert_bitwise_equal, bitwise_equal

pytestmark = pytest.mark.reference

EVERY = pytest.mark.parametrize("name", sorted(EXPERTS_OPTIONS))


def _gradients(module: Experts, out: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    flow = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return dict(zip(names, torch.autograd.grad(out, parameters, flow), strict=True))


@EVERY
def test_output_and_gradients_are_those_of_the_function(name: str) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name])
    x = tokens(dtype=module.gate_up.dtype)

    out = module(x, make_routing())

    expected = experts(
        x,
        make_routing(),
        module.weights,
        module.activation,
        placement=module.placement,
        backend=module.backend,
    )
    assert_bitwise_equal(out, expected)
    grads = _gradients(module, out)
    for parameter, grad in _gradients(module, expected).items():
        assert_bitwise_equal(grads[parameter], grad, parameter)
        assert (grad != 0).any(), parameter


@EVERY
def test_parameters_have_the_contract_names_and_storage(name: str) -> None:
    options = EXPERTS_OPTIONS[name]
    module = make_experts(**options)
    rows = module.activation.columns * COLUMNS
    shapes = {
        "gate_up": (EXPERTS, rows, HIDDEN),
        "down": (EXPERTS, HIDDEN, COLUMNS),
        "gate_up_bias": (EXPERTS, rows),
        "down_bias": (EXPERTS, HIDDEN),
        "norm_scale": (HIDDEN,),
    }
    if options.get("orientation") == "in_out":
        for matrix in ("gate_up", "down"):
            experts_, first, second = shapes[matrix]
            shapes[matrix] = (experts_, second, first)
    present = {"gate_up", "down"} | {n for n in ("gate_up_bias", "down_bias") if options.get(n)}
    present |= {"norm_scale"} if "norm" in options else set()

    state = {key: tuple(value.shape) for key, value in module.state_dict().items()}

    assert state == {key: shape for key, shape in shapes.items() if key in present}
    assert all(value.is_contiguous() for value in module.state_dict().values())
    assert module.weights.gate_up.data_ptr() == module.gate_up.data_ptr()


@EVERY
def test_inference_has_the_bits_of_training_in_either_mode(name: str) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name])
    x = tokens(dtype=module.gate_up.dtype)
    training = module.train()(x, make_routing())

    with torch.no_grad():
        inference = module.eval()(x, make_routing())

    assert_bitwise_equal(training.detach(), inference)


@EVERY
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal_and_independent(name: str, copier: Any) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name])
    x = tokens(dtype=module.gate_up.dtype)
    before = module(x, make_routing())

    twin = copier(module)

    assert repr(twin) == repr(module)
    assert_bitwise_equal(twin(x, make_routing()), before)
    with torch.no_grad():
        twin.down.zero_()
    assert_bitwise_equal(module(x, make_routing()), before)
    twin.load_state_dict(module.state_dict())
    assert_bitwise_equal(twin(x, make_routing()), before)


@EVERY
def test_meta_device_then_safetensors(name: str, tmp_path: Path) -> None:
    options = EXPERTS_OPTIONS[name]
    module = make_experts(**options)
    x = tokens(dtype=module.gate_up.dtype)
    path = tmp_path / "experts.safetensors"
    save_file(module.state_dict(), path)

    empty = make_experts(**options, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(load_file(path), assign=True)

    assert_bitwise_equal(empty(x, make_routing()), module(x, make_routing()))


def test_meta_device_then_reset() -> None:
    module = make_experts(**EXPERTS_OPTIONS["norm"], device="meta").to_empty(device="cpu")
    torch.manual_seed(7)
    module.reset_parameters()
    torch.manual_seed(7)
    twin = make_experts(**EXPERTS_OPTIONS["norm"])

    assert_bitwise_equal(module(tokens(), make_routing()), twin(tokens(), make_routing()))
    assert (module.norm_scale == 1).all()


def test_parameters_are_drawn_as_linear_layers_draw_them() -> None:
    module = make_experts(gate_up_bias=True, down_bias=True, num_experts=64)

    for name, size in (("gate_up", HIDDEN), ("down", COLUMNS), ("gate_up_bias", HIDDEN)):
        largest = float(getattr(module, name).detach().abs().max())
        assert 0.95 * size**-0.5 < largest <= size**-0.5


def test_on_the_meta_device_shapes_are_computed() -> None:
    module = make_experts(device="meta")
    routing = make_routing()
    routing = Routing(routing.topk_ids.to("meta"), routing.topk_probs.to("meta"), EXPERTS)

    out = module(tokens().to("meta"), routing)

    assert (out.shape, out.device.type) == ((TOKENS, HIDDEN), "meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cast_of_a_module_casts_every_parameter(dtype: torch.dtype) -> None:
    module = make_experts(**EXPERTS_OPTIONS["gpt-oss"]).to(dtype)

    assert module(tokens(dtype=dtype), make_routing()).dtype == dtype


@pytest.mark.parametrize("backend", ["grouped", "reference"])
@pytest.mark.parametrize("name", ["plain", "gpt-oss", "fc1-input", "fc2-input", "norm"])
def test_autocast_is_a_cast_of_tokens_and_parameters_and_nothing_else(
    name: str, backend: str
) -> None:
    # The gradient of the norm is the reference's alone.
    options = EXPERTS_OPTIONS[name] | {"backend": "reference" if name == "norm" else backend}
    module = make_experts(**options)
    narrow = copy.deepcopy(module).bfloat16()

    with torch.autocast("cpu", torch.bfloat16):
        out = module(tokens(), make_routing())
        grads = _gradients(module, out)

    expected = narrow(tokens(dtype=torch.bfloat16), make_routing())
    assert_bitwise_equal(out, expected)
    for parameter, grad in _gradients(narrow, expected).items():
        assert grads[parameter].dtype == torch.float32
        assert_bitwise_equal(grads[parameter].bfloat16(), grad, parameter)


@pytest.mark.parametrize("reentrant", [True, False])
@EVERY
def test_activation_checkpointing_changes_no_bit(name: str, reentrant: bool) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name])
    routing = make_routing()

    def layer(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return module(x, Routing(routing.topk_ids, probs, EXPERTS))

    results = []
    for checkpointed in (False, True):
        x = tokens(dtype=module.gate_up.dtype).requires_grad_()
        probs = routing.topk_probs.clone().requires_grad_()
        module.zero_grad()
        if checkpointed:
            out = checkpoint(layer, x, probs, use_reentrant=reentrant)
        else:
            out = layer(x, probs)
        out.square().sum().backward()
        results.append([out, x.grad, probs.grad, *(p.grad for p in module.parameters())])
    for plain, repeated in zip(*results, strict=True):
        assert_bitwise_equal(repeated, plain)


@EVERY
@pytest.mark.parametrize("grad", [True, False])
def test_one_graph_serves_every_token_count_with_the_bits_of_eager(name: str, grad: bool) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name]).requires_grad_(grad)
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=counting)
    for count in (127, 193, 16):
        x, routing = tokens(count, module.gate_up.dtype), make_routing(count)
        for tensor in (x, routing.topk_ids, routing.topk_probs):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_bitwise_equal(compiled(x, routing), module(x, routing))
    assert graphs == 1


@EVERY
def test_no_tokens(name: str) -> None:
    module = make_experts(**EXPERTS_OPTIONS[name])
    x = tokens(0, module.gate_up.dtype).requires_grad_()

    out = module(x, make_routing(0))

    assert (out.shape, out.dtype) == ((0, HIDDEN), module.gate_up.dtype)
    out.sum().backward()
    assert x.grad is not None
    for parameter, value in module.named_parameters():
        assert value.grad is not None, parameter
        assert (value.grad == 0).all(), parameter


def test_local_experts_add_up_to_the_whole() -> None:
    module = make_experts(backend="reference").double()
    x, routing = tokens(dtype=torch.float64), make_routing()
    whole = module(x, routing)
    parts = []
    for start, stop in ((0, 2), (2, 5)):
        local = make_experts(num_experts=stop - start).double()
        local.load_weights(
            ExpertWeights(gate_up=module.gate_up[start:stop], down=module.down[start:stop])
        )
        parts.append(local(x, routing, expert_start=start))

    assert not bitwise_equal(parts[0], whole)
    difference = (parts[0] + parts[1] - whole).abs().max()
    assert difference <= 64 * torch.finfo(torch.float64).eps * whole.abs().max()


def test_options_of_a_call_reach_the_function() -> None:
    module = make_experts(dtype=torch.bfloat16)
    x, routing = tokens(dtype=torch.bfloat16), make_routing()
    count = torch.tensor([4], dtype=torch.int32)

    wide = module(x, routing, out_dtype=torch.float32, num_valid_tokens=count)

    assert wide.dtype == torch.float32
    assert (wide[4:] == 0).all()
    assert_bitwise_equal(wide.bfloat16()[:4], module(x, routing, num_valid_tokens=count)[:4])


@pytest.mark.parametrize("source", ["plain", "in-out", "up-first", "interleave-16"])
@pytest.mark.parametrize("target", ["plain", "in-out", "up-first", "interleave-16"])
def test_load_weights_converts_layout_and_orientation_in_place(source: str, target: str) -> None:
    first, second = (make_experts(**EXPERTS_OPTIONS[n]) for n in (source, target))
    places = [parameter.data_ptr() for parameter in second.parameters()]

    second.load_weights(first.weights)

    assert [parameter.data_ptr() for parameter in second.parameters()] == places
    assert second.weights.layout == EXPERTS_OPTIONS[target].get("layout", Layout())
    loaded = second.weights.to_layout(first.layout)
    for name, tensor in first.weights.named_tensors().items():
        assert_bitwise_equal(loaded.named_tensors()[name].contiguous(), tensor.contiguous(), name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_up_bias": True}, "weights must hold"),
        ({"hidden_size": 47}, "weights must hold"),
        ({"activation": Activation(kind="relu2", gated=False)}, "weights must hold"),
        (
            {"norm": PostExpertNorm(eps=1e-5)},
            "norm must be None, as in this module, got PostExpertNorm",
        ),
    ],
)
def test_load_weights_that_do_not_fit_changes_nothing(
    options: dict[str, Any], message: str
) -> None:
    module, other = make_experts(), make_experts(**options)
    before = copy.deepcopy(module.state_dict())

    with pytest.raises(ValueError, match=message):
        module.load_weights(other.weights)

    for name, value in module.state_dict().items():
        assert_bitwise_equal(value, before[name], name)


@pytest.mark.parametrize(
    ("source", "target"),
    [("plain", "up-first"), ("interleave-16", "plain"), ("square", "square-in-out")],
)
def test_a_state_dict_of_another_storage_is_refused(
    source: str, target: str, tmp_path: Path
) -> None:
    square = {"intermediate_size": HIDDEN, "activation": Activation(kind="silu", gated=False)}
    options = EXPERTS_OPTIONS | {
        "square": square,
        "square-in-out": square | {"orientation": "in_out"},
    }
    first, second = (make_experts(**options[n]) for n in (source, target))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    before = copy.deepcopy(second.state_dict())

    with pytest.raises(RuntimeError, match=r"gate_up must be stored as .*, got "):
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    second.load_state_dict(before)
    first.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts": 0}, ValueError, "num_experts must be >= 1, got 0"),
        ({"activation": "silu"}, TypeError, "activation must be an Activation, got str"),
        (
            {"orientation": "transposed"},
            ValueError,
            "unknown orientation 'transposed'; expected one of",
        ),
        ({"backend": "fast"}, ValueError, "unknown backend 'fast'; expected one of"),
        ({"placement": "output"}, ValueError, "unknown placement 'output'; expected one of"),
        ({"num_experts": 3.0}, TypeError, "num_experts must be an int, got 3.0"),
        ({"hidden_size": True}, TypeError, "hidden_size must be an int, got True"),
        ({"intermediate_size": "3"}, TypeError, "intermediate_size must be an int, got '3'"),
        ({"gate_up_bias": 1}, TypeError, "gate_up_bias must be a bool, got 1"),
        ({"down_bias": "no"}, TypeError, "down_bias must be a bool, got 'no'"),
        ({"orientation": None}, TypeError, "orientation must be a str, got None"),
        ({"backend": []}, TypeError, "backend must be a str, got []"),
        ({"placement": 3}, TypeError, "placement must be a str, got 3"),
        ({"layout": "halves"}, TypeError, "layout must be a Layout, got str"),
        ({"norm": 1e-5}, TypeError, "norm must be a PostExpertNorm, got float"),
        ({"layout": Layout(interleave=3)}, ValueError, "interleave must divide F = 80"),
        (
            {"dtype": torch.float8_e4m3fn},
            TypeError,
            "gate_up must be bfloat16, float16, float32 or float64",
        ),
        (
            {"layout": Layout(interleave=1), "activation": Activation(kind="relu2", gated=False)},
            ValueError,
            "layout must be Layout() where there is no up part",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make_experts(**options)


def test_load_weights_takes_weights() -> None:
    with pytest.raises(TypeError, match="weights must be an ExpertWeights, got NoneType"):
        make_experts().load_weights(None)


def test_a_named_backend_is_strict() -> None:
    module = make_experts(backend="fused")

    with pytest.raises(UnsupportedError, match="backend 'fused' cannot run"):
        module(tokens(), make_routing())


def test_representation_names_every_option_that_is_not_neutral() -> None:
    assert repr(make_experts()) == (
        "Experts(num_experts=5, hidden_size=48, intermediate_size=80, activation=silu)"
    )
    assert repr(make_experts(**EXPERTS_OPTIONS["gpt-oss"])) == (
        "Experts(num_experts=5, hidden_size=48, intermediate_size=80, "
        "activation=silu(alpha=1.702,limit=2.0,linear_offset=1.0), layout=interleave=1, "
        "orientation=in_out, gate_up_bias=True, down_bias=True)"
    )
