"""Megatron-LM's experts on this library: its own forward on the same parameters, and the call."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_megatron import (
    EXPERTS,
    HIDDEN,
    SIZES,
    Grouped,
    real_grouped,
    real_sequential,
    with_megatron,
)
from torch import Tensor, nn
from torch.nn.functional import silu

from samebits import ExpertWeights, ProbPlacement, UnsupportedError, grouped_experts
from samebits.integrations.megatron import adapt
from samebits.integrations.megatron.stacking import repoint, stacked, stacked_view
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

COUNTS = [4, 0, 9]
# bf16: two roundings of the outputs of products, and the activation's.
NORMWISE = 2e-2
MOVES = 0.2


def _config(**options: Any) -> Any:
    defaults = {"activation_func": silu, "recompute_modules": None}
    return SimpleNamespace(**(SIZES | defaults | options))


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rows = sum(COUNTS)
    x = torch.randn(rows, HIDDEN).to(dtype)
    return x, torch.tensor(COUNTS), torch.rand(rows) + 0.1


def _expected(module: Grouped, x: Tensor, probs: Tensor) -> Tensor:
    fc1 = torch.stack([getattr(module.linear_fc1, f"weight{e}") for e in range(EXPERTS)])
    fc2 = torch.stack([getattr(module.linear_fc2, f"weight{e}") for e in range(EXPERTS)])
    return grouped_experts(
        x,
        torch.tensor([0, 4, 4, 13]),
        ExpertWeights(gate_up=fc1, down=fc2),
        row_probs=probs,
        placement=ProbPlacement.FC2_INPUT,
    )


def test_the_call_and_every_gradient() -> None:
    module = Grouped(_config())
    x, counts, probs = _inputs()
    leaves = [x.requires_grad_(), probs.requires_grad_(), *module.parameters()]
    expected = _expected(module, x, probs)
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    identities = [id(p) for p in module.parameters()]

    adapt(module)
    out, bias = module(x, counts, probs)
    grads = torch.autograd.grad(out.square().sum(), leaves)

    assert bias is None
    assert [id(p) for p in module.parameters()] == identities
    assert_bitwise_equal(out, expected)
    for actual, grad in zip(grads, expected_grads, strict=True):
        assert_bitwise_equal(actual, grad)


def test_parameters_are_one_buffer_and_stay_it() -> None:
    module = Grouped(_config())
    adapt(module)
    x, counts, probs = _inputs()
    held = [getattr(module.linear_fc1, f"weight{e}") for e in range(EXPERTS)]

    assert stacked_view(held) is not None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x, counts, probs)[0].sum().backward()
    optimizer.step()

    assert stacked_view(held) is not None
    assert_bitwise_equal(module(x, counts, probs)[0], _expected(module, x, probs))


def test_a_distributed_optimizer_may_move_them_again() -> None:
    """Its buffer holds parameters of several modules side by side, in any order."""
    module = Grouped(_config())
    adapt(module)
    x, counts, probs = _inputs()
    buffer = torch.empty(sum(p.numel() for p in module.parameters()))
    position = 0
    for parameter in reversed(list(module.parameters())):
        part = buffer[position : position + parameter.numel()].view(parameter.shape)
        parameter.data = part.copy_(parameter.data)
        position += parameter.numel()
    with torch.no_grad():
        buffer.mul_(0.5)  # a step in its memory

    out, _ = module(x, counts, probs)
    out.sum().backward()

    assert_bitwise_equal(out, _expected(module, x, probs))
    assert all(p.grad is not None for p in module.parameters())


def test_a_refit_in_place_is_seen() -> None:
    module = Grouped(_config())
    adapt(module)
    x, counts, probs = _inputs()
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}

    module.load_state_dict(state)

    assert set(state) == {f"linear_fc{i}.weight{e}" for i in (1, 2) for e in range(EXPERTS)}
    assert_bitwise_equal(module(x, counts, probs)[0], _expected(module, x, probs))


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_a_parameter_that_changes_before_its_backward_is_an_error(expert: int) -> None:
    module = Grouped(_config())
    adapt(module)
    x, counts, probs = _inputs()
    out, _ = module(x.requires_grad_(), counts, probs)

    with torch.no_grad():
        getattr(module.linear_fc2, f"weight{expert}").add_(1)

    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.sum().backward()


def test_a_refit_by_other_objects_is_seen() -> None:
    module = Grouped(_config())
    adapt(module)
    x, counts, probs = _inputs()
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}

    module.load_state_dict(state, assign=True)

    assert_bitwise_equal(module(x, counts, probs)[0], _expected(module, x, probs))


def test_a_deep_copy_computes_with_its_own_parameters() -> None:
    module = Grouped(_config())
    adapt(module)
    x, counts, probs = _inputs()
    expected = module(x, counts, probs)[0]

    copied = deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()

    assert_bitwise_equal(copied(x, counts, probs)[0], expected)
    assert not module(x, counts, probs)[0].any()


def test_it_can_be_undone() -> None:
    module = Grouped(_config())

    adapt(module).remove()

    with pytest.raises(NotImplementedError):
        module(*_inputs())


def test_an_earlier_handle_does_not_undo_a_later_one() -> None:
    module = Grouped(_config())
    first, second = adapt(module), adapt(module)
    first.remove()
    assert module(*_inputs())[0].any()

    second.remove()

    with pytest.raises(NotImplementedError):
        module(*_inputs())


def test_one_stacked_parameter_is_read_as_it_is() -> None:
    module = Grouped(_config())
    x, counts, probs = _inputs()
    expected = _expected(module, x, probs)
    single = SimpleNamespace(config=_config(), local_experts=None)
    for name in ("linear_fc1", "linear_fc2"):
        held = [getattr(getattr(module, name), f"weight{e}") for e in range(EXPERTS)]
        setattr(single, name, SimpleNamespace(weight=torch.stack(held)))

    adapt(single)  # type: ignore[arg-type]

    assert_bitwise_equal(single.forward(x, counts, probs)[0], expected)


def test_a_module_of_single_experts() -> None:
    module = Grouped(_config())
    x, counts, probs = _inputs()
    expected = _expected(module, x, probs)
    sequential = nn.Module()
    sequential.config = _config()
    sequential.local_experts = nn.ModuleList()
    for expert in range(EXPERTS):
        local = nn.Module()
        for name in ("linear_fc1", "linear_fc2"):
            weight = getattr(getattr(module, name), f"weight{expert}")
            part = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            part.weight.data = weight.data.clone()
            setattr(local, name, part)
        sequential.local_experts.append(local)

    adapt(sequential)

    assert_bitwise_equal(sequential(x, counts, probs)[0], expected)


def test_biases_of_the_second_projection_are_multiplied() -> None:
    module = Grouped(_config(add_bias_linear=True), bias=True)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "weight" in name:
                parameter.zero_()
    adapt(module)
    x, counts, probs = _inputs()

    out, _ = module(x, counts, probs)

    bias = [getattr(module.linear_fc2, f"bias{e}") for e in (0, 2)]
    repeated = torch.cat([bias[0].expand(4, -1), bias[1].expand(9, -1)])
    assert_bitwise_equal(out, repeated * probs[:, None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8": "e4m3"}, "fp8 = 'e4m3': FP8 experts are Transformer Engine's"),
        ({"fp4": "e2m1"}, "fp4 = 'e2m1'"),
        ({"recompute_modules": ["moe_act"]}, r'use recompute_modules = \["moe"\]'),
        ({"fine_grained_activation_offloading": True}, "keeps its own activations"),
    ],
)
def test_what_it_does_not_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        adapt(Grouped(_config(**options)))
    with pytest.raises(UnsupportedError, match=message):
        adapt(Grouped(_config()), vars(_config(**options)))


@pytest.mark.parametrize("fused", [False, True])
def test_counts_that_are_not_of_the_rows_are_errors(fused: bool) -> None:
    module = Grouped(_config(gradient_accumulation_fusion=fused))
    adapt(module)
    x, _, probs = _inputs()

    for counts in ([4, 0, 10], [4, 9], [4, 0, 8, 1], [4, -1, 10]):
        with pytest.raises(ValueError, match="offsets must"):
            module(x, torch.tensor(counts), probs)
    with pytest.raises(TypeError, match="tokens_per_expert must hold integers"):
        module(x, torch.tensor([4.0, 0.0, 9.0]), probs)


def test_buffers_of_the_op_fuser_are_refused() -> None:
    module = Grouped(_config())
    adapt(module)

    with pytest.raises(UnsupportedError, match="are the op-fuser's"):
        module(*_inputs(), output_buffer=torch.zeros(13, HIDDEN))


def test_a_module_without_weights_is_refused_unchanged() -> None:
    module = nn.Module()
    module.config = _config()

    with pytest.raises(TypeError, match="have a weight of linear_fc1 for each expert"):
        adapt(module)
    assert "forward" not in vars(module)


def test_experts_of_different_shapes_are_refused_unchanged() -> None:
    module = Grouped(_config())
    module.linear_fc1.weight1 = nn.Parameter(torch.zeros(6, HIDDEN))
    places = [p.data_ptr() for p in module.parameters()]

    with pytest.raises(ValueError, match="have one shape for the weight of linear_fc1"):
        adapt(module)
    assert [p.data_ptr() for p in module.parameters()] == places


def test_stacking_views_evenly_spaced_memory_only() -> None:
    buffer = torch.randn(4, 6, 5)
    evenly = [buffer[i, 1:3] for i in (0, 1, 2, 3)]
    unevenly = [buffer[i] for i in (0, 1, 3)]
    backwards = [buffer[i] for i in (2, 1, 0)]
    apart = [torch.randn(2, 2), torch.randn(2, 2)]

    view = stacked_view(evenly)

    assert view is not None
    assert view.data_ptr() == evenly[0].data_ptr()
    assert_bitwise_equal(view, torch.stack(evenly))
    for tensors in (unevenly, backwards, apart):
        assert stacked_view(tensors) is None
        assert_bitwise_equal(stacked(tensors), torch.stack(tensors))
    repoint(apart)
    assert stacked_view(apart) is not None


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamp": {"activation_func_clamp_value": 0.5},
    "interleave": {"moe_mlp_glu_interleave_size": 8},
    "on_input": {"moe_apply_probs_on_input": True},
    "quick_geglu": {"quick": True},
    "offset": {"quick": True, "glu_linear_offset": 1.0},
    "oai": {"quick": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5},
    "oai_fused": {"quick": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5}
    | {"bias_activation_fusion": True},
    "plain_fused": {"bias_activation_fusion": True},
}


def _real(
    options: dict[str, Any], build: Callable[[Any, Any], Any] = real_grouped
) -> tuple[Any, Tensor, Tensor, Tensor]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = dict(options)
    function = quick_gelu if options.pop("quick", False) else silu
    config = TransformerConfig(**(SIZES | {"activation_func": function} | options))
    torch.manual_seed(1)
    module = build(config, torch.bfloat16)
    x, counts, probs = _inputs(torch.bfloat16)
    return module, x, counts, probs


@with_megatron
@pytest.mark.parametrize("name", OPTIONS)
def test_megatrons_own_forward_computes_the_same(name: str) -> None:
    module, x, counts, probs = _real(OPTIONS[name])
    # Its compiled functions, uncompiled: what they compute is asked here, not how fast.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        theirs, _ = module.forward(x, counts, probs)

    adapt(module)

    with torch.no_grad():
        ours, _ = module.forward(x, counts, probs)
    assert relative_error(ours, theirs) <= NORMWISE


# SequentialMLP has no interleave: `check` says so.
@with_megatron
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "interleave"])
def test_megatrons_own_sequence_of_experts_computes_the_same(name: str) -> None:
    module, x, counts, probs = _real(OPTIONS[name], real_sequential)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        theirs, _ = module.forward(x, counts, probs)

    adapt(module)

    with torch.no_grad():
        ours, _ = module.forward(x, counts, probs)
    assert relative_error(ours, theirs) <= NORMWISE


@with_megatron
@pytest.mark.parametrize("name", ["clamp", "interleave", "on_input", "quick_geglu", "offset"])
def test_every_option_moves_the_output(name: str) -> None:
    outputs = []
    for options in ("quick_geglu" if name == "offset" else "plain", name):
        module, x, counts, probs = _real(OPTIONS[options])
        adapt(module)
        with torch.no_grad():
            outputs.append(module.forward(x * 2, counts, probs * probs)[0])

    # quick_gelu is an approximation of silu to begin with.
    least = MOVES / 10 if name == "quick_geglu" else MOVES
    assert relative_error(outputs[1], outputs[0]) >= least
