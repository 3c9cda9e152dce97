"""Gradients of parameters that go into ``main_grad``, or come later: where, and which bits."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layers import COLUMNS, EXPERTS, EXPERTS_OPTIONS, HIDDEN, make_experts, make_routing, tokens
from samebits import UnsupportedError, WeightGradients, experts
from samebits.nn import Experts
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weight_gradients import Owner

pytestmark = pytest.mark.reference

BACKENDS = pytest.mark.parametrize("backend", ["reference", "grouped"])
STORAGES = pytest.mark.parametrize("name", sorted(set(EXPERTS_OPTIONS) - {"bf16"}))


def _module(name: str = "gpt-oss", backend: str = "reference", **options: Any) -> Experts:
    return make_experts(**(EXPERTS_OPTIONS[name] | {"backend": backend} | options))


def _with_main_grads(module: Experts, value: float = 0.0, *, delayed: bool = False) -> Experts:
    module = copy.deepcopy(module)
    module.weight_gradients = WeightGradients(main_grad=True, delayed=delayed)
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, value, dtype=torch.float32)
    return module


def _step(module: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Run forward and backward of one microbatch; return the gradient of its tokens."""
    x, routing = tokens(dtype=dtype, seed=seed).requires_grad_(), make_routing(seed=seed)
    flow = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 7)).to(dtype)
    module(x, routing).backward(flow)
    assert x.grad is not None
    return x.grad


def _grads(module: nn.Module) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return grads


def _main_grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.main_grad for name, parameter in module.named_parameters()}


@STORAGES
@BACKENDS
def test_every_storage_gets_the_bits_that_autograd_would_get(name: str, backend: str) -> None:
    plain = _module(name, backend)
    module = _with_main_grads(plain)

    dx, expected_dx = _step(module), _step(plain)

    assert_bitwise_equal(dx, expected_dx)
    for parameter, grad in _grads(plain).items():
        # A sum that starts from a buffer of zeros has no negative zeros.
        assert_bitwise_equal(_main_grads(module)[parameter], grad + 0.0, parameter)
        assert module.get_parameter(parameter).grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_rounded_to_the_working_dtype(dtype: torch.dtype) -> None:
    plain = _module(dtype=dtype)
    module = _with_main_grads(plain)

    _step(module, dtype)
    _step(plain, dtype)

    for name, grad in _grads(plain).items():
        exact = _main_grads(module)[name]
        assert_bitwise_equal(exact.to(dtype) + 0.0, grad + 0.0, name)
        assert (exact != grad.float()).any(), name


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_microbatches_are_added_in_their_order_each_with_one_rounding(
    backend: str, dtype: torch.dtype
) -> None:
    module = _module(backend=backend, dtype=dtype)
    alone = []
    for seed in range(4):
        single = _with_main_grads(module)
        _step(single, dtype, seed)
        alone.append(_main_grads(single))

    together = _with_main_grads(module, value=0.5)
    for seed in range(4):
        _step(together, dtype, seed)

    for name, total in _main_grads(together).items():
        expected = torch.full_like(total, 0.5)
        for single in alone:
            expected = expected + single[name]
        assert_bitwise_equal(total, expected, name)


def test_a_buffer_of_the_working_dtype_is_rounded_once_for_each_microbatch() -> None:
    module = _with_main_grads(_module(dtype=torch.bfloat16))
    narrow = copy.deepcopy(module)
    for parameter in narrow.parameters():
        parameter.main_grad = torch.full(parameter.shape, 0.5, dtype=torch.bfloat16)

    _step(module, torch.bfloat16)
    _step(narrow, torch.bfloat16)

    for name, exact in _main_grads(module).items():
        assert_bitwise_equal(_main_grads(narrow)[name], (exact + 0.5).bfloat16(), name)


@BACKENDS
def test_a_buffer_to_be_overwritten_is(backend: str) -> None:
    module = _with_main_grads(_module(backend=backend))
    expected = _with_main_grads(_module(backend=backend))
    expected.load_state_dict(module.state_dict())
    for parameter in module.parameters():
        parameter.main_grad.fill_(torch.nan)
        parameter.overwrite_main_grad = True

    _step(module)
    _step(expected)

    for name, grad in _main_grads(module).items():
        assert_bitwise_equal(grad + 0.0, _main_grads(expected)[name], name)


def test_a_buffer_that_its_owner_makes_late_is_asked_for() -> None:
    module = _with_main_grads(_module())
    asked = []
    for name, parameter in module.named_parameters():
        buffer = parameter.main_grad
        del parameter.main_grad
        # As Megatron's FSDP does: the buffer exists from the backward on.
        parameter.get_main_grad = lambda name=name, buffer=buffer: asked.append(name) or buffer

    out = module(tokens(), make_routing())
    assert asked == []
    out.sum().backward()

    assert sorted(asked) == sorted(_main_grads(module))
    assert all(grad.any() for grad in _main_grads(module).values())


def test_owners_that_watch_hooks_get_the_flag_and_a_placeholder() -> None:
    module = _with_main_grads(_module())
    for parameter in module.parameters():
        parameter.grad_added_to_main_grad = False
    module.down.zero_out_wgrad = True

    _step(module)

    assert all(parameter.grad_added_to_main_grad for parameter in module.parameters())
    assert {p.grad.shape == p.shape for p in module.parameters()} == {True}
    assert (module.down.grad == 0).all()


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("policy", [None, WeightGradients(main_grad=True)])
def test_hooks_of_megatron_count_every_gradient_once(
    policy: WeightGradients | None, zeroed: bool
) -> None:
    """What its data-parallel wrapper does with ``.grad`` once it is there."""
    plain = _module()
    module = _with_main_grads(plain)
    module.weight_gradients = policy
    nodes = []
    for parameter in module.parameters():
        parameter.grad_added_to_main_grad = False
        if zeroed:
            parameter.zero_out_wgrad = True

        def hook(*_: Any, parameter: Any = parameter) -> None:
            assert parameter.grad is not None
            if not parameter.grad_added_to_main_grad or zeroed:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(hook)

    _step(module)
    _step(plain)

    for name, grad in _grads(plain).items():
        assert_bitwise_equal(_main_grads(module)[name], grad + 0.0, name)


def test_an_attribute_that_nobody_asked_for_changes_nothing() -> None:
    plain = _module()
    module = _with_main_grads(plain)
    module.weight_gradients = None

    _step(module)
    _step(plain)

    assert all((grad == 0).all() for grad in _main_grads(module).values())
    for name, grad in _grads(plain).items():
        assert_bitwise_equal(_grads(module)[name], grad, name)


@BACKENDS
@pytest.mark.parametrize("main_grad", [False, True])
@STORAGES
def test_delayed_gradients_have_the_bits_of_the_others(
    name: str, main_grad: bool, backend: str
) -> None:
    plain = _module(name, backend)
    module = _with_main_grads(plain, delayed=True)
    module.weight_gradients = WeightGradients(main_grad=main_grad, delayed=True)
    expected_dx = [_step(plain, seed=seed) for seed in range(3)]

    dx = [_step(module, seed=seed) for seed in range(3)]

    for got, wanted in zip(dx, expected_dx, strict=True):
        assert_bitwise_equal(got, wanted)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all((grad == 0).all() for grad in _main_grads(module).values())
    for left in (2, 1, 0):
        module.backward_dw()
        assert module.weight_gradients.pending == left
    result = _main_grads(module) if main_grad else _grads(module)
    for parameter, grad in _grads(plain).items():
        assert_bitwise_equal(result[parameter] + 0.0, grad + 0.0, parameter)
        assert result[parameter].is_contiguous()


def test_one_call_takes_the_oldest_microbatch_and_none_is_no_error() -> None:
    plain = _module()
    module = _with_main_grads(plain, delayed=True)
    _step(module, seed=0)
    _step(module, seed=1)
    _step(plain, seed=0)

    module.backward_dw()

    for name, grad in _grads(plain).items():
        assert_bitwise_equal(_main_grads(module)[name], grad + 0.0, name)
    module.backward_dw()
    before = copy.deepcopy(_main_grads(module))
    module.backward_dw()
    plain.backward_dw()
    for name, grad in _main_grads(module).items():
        assert_bitwise_equal(grad, before[name], name)


def test_delayed_gradients_leave_the_placeholder_for_the_hooks_that_follow() -> None:
    module = _with_main_grads(_module(), delayed=True)
    for parameter in module.parameters():
        parameter.grad_added_to_main_grad = False

    _step(module)
    assert not any(parameter.grad_added_to_main_grad for parameter in module.parameters())
    module.backward_dw()

    assert all(parameter.grad_added_to_main_grad for parameter in module.parameters())
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("delayed", [False, True])
def test_hooks_of_parameters_run_without_a_gradient(delayed: bool) -> None:
    module = _with_main_grads(_module(), delayed=delayed)
    seen: list[Tensor | None] = []
    module.down.register_hook(seen.append)
    module.down.register_post_accumulate_grad_hook(lambda down: seen.append(down.grad))

    _step(module)
    module.backward_dw()

    assert seen == [None, None]
    assert module.down.main_grad.any()


def test_parameters_that_changed_before_backward_dw_are_an_error() -> None:
    module = _with_main_grads(_module(), delayed=True)
    _step(module)
    with torch.no_grad():
        module.down.mul_(2)

    with pytest.raises(ValueError, match="must keep their values between backward and backward_dw"):
        module.backward_dw()


def test_parameters_that_were_replaced_before_backward_dw_are_an_error() -> None:
    module = _with_main_grads(_module(), delayed=True)
    _step(module)
    module.down = nn.Parameter(module.down.detach().clone())

    with pytest.raises(UnsupportedError, match=r"down was replaced .* hint: delayed=False"):
        module.backward_dw()


@pytest.mark.parametrize("delayed", [False, True])
def test_frozen_parameters_need_no_buffer(delayed: bool) -> None:
    plain = _module()
    module = _with_main_grads(plain, delayed=delayed)
    for either in (plain, module):
        either.down.requires_grad_(False)
    del module.down.main_grad

    _step(module)
    _step(plain)
    module.backward_dw()

    for name in ("gate_up", "gate_up_bias", "down_bias"):
        assert_bitwise_equal(_main_grads_of(module, name), _main_grads_of(plain, name, "grad"))
    module.requires_grad_(False)
    assert module(tokens(), make_routing()).grad_fn is None


def _main_grads_of(module: Experts, name: str, attribute: str = "main_grad") -> Tensor:
    return getattr(module.get_parameter(name), attribute) + 0.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_adds_once(reentrant: bool) -> None:
    plain = _module()
    module = _with_main_grads(plain)
    routing = make_routing()

    def layer(x: Tensor) -> Tensor:
        return module(x, routing)

    x = tokens().requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    plain(tokens().requires_grad_(), routing).square().sum().backward()

    for name, grad in _grads(plain).items():
        assert_bitwise_equal(_main_grads(module)[name], grad + 0.0, name)


def test_autocast_rounds_values_but_no_gradient() -> None:
    plain = _module()
    narrow = _with_main_grads(copy.deepcopy(plain).bfloat16())
    module = _with_main_grads(plain)

    with torch.autocast("cpu", torch.bfloat16):
        out = module(tokens(), make_routing())
    out.backward(torch.ones_like(out))
    out = narrow(tokens(dtype=torch.bfloat16), make_routing())
    out.backward(torch.ones_like(out))

    for name, grad in _main_grads(narrow).items():
        assert_bitwise_equal(_main_grads(module)[name], grad, name)


def test_gradients_of_tokens_alone_still_fill_buffers() -> None:
    """torch does not tell a function which of its gradients a call of the engine is about."""
    module = _with_main_grads(_module())
    x = tokens().requires_grad_()

    torch.autograd.grad(module(x, make_routing()).sum(), x)

    assert all(grad.any() for grad in _main_grads(module).values())


def test_the_function_takes_a_destination() -> None:
    module = _module("plain")
    policy = WeightGradients(main_grad=True)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    owners = {name: Owner(parameter) for name, parameter in module.named_parameters()}

    def call(**options: Any) -> Tensor:
        return experts(tokens(), make_routing(), module.weights, backend="reference", **options)

    call(weight_gradients=policy.of(owners)).square().sum().backward()
    call().square().sum().backward()

    for name, grad in _grads(module).items():
        assert_bitwise_equal(_main_grads(module)[name], grad + 0.0, name)
    with pytest.raises(ValueError, match=r"owners must hold gate_up, got \['down'\]"):
        call(weight_gradients=policy.of({"down": Owner(module.down)}))
    with pytest.raises(ValueError, match=r"owners must be named as gate_up, .*, got \['gate'\]"):
        call(weight_gradients=policy.of(owners | {"gate": owners["down"]}))
    with pytest.raises(TypeError, match=r"owners\['down'\] must be an Owner, got Parameter"):
        policy.of({"down": module.down})
    with pytest.raises(TypeError, match="weight_gradients must be a Destination, got"):
        call(weight_gradients=policy)


@pytest.mark.parametrize(
    ("value", "actual"),
    [
        (None, "got None"),
        (torch.zeros(EXPERTS, HIDDEN, COLUMNS + 1), "got torch.float32 (5, 48, 81) on cpu"),
        (torch.zeros(EXPERTS, HIDDEN, COLUMNS, dtype=torch.bfloat16), "got torch.bfloat16 (5, 48"),
        (torch.zeros(EXPERTS, HIDDEN, COLUMNS, device="meta"), "(5, 48, 80) on meta"),
        (torch.zeros(EXPERTS, HIDDEN, COLUMNS, requires_grad=True), "requires no gradient, got"),
        (torch.zeros(COLUMNS).expand(EXPERTS, HIDDEN, COLUMNS), "on cpu, strides (0, 0, 1)"),
    ],
)
def test_a_buffer_that_cannot_hold_the_gradient_is_refused_before_anything_runs(
    value: Any, actual: str
) -> None:
    module = _with_main_grads(_module("plain"))
    module.down.main_grad = value

    with pytest.raises(ValueError, match=r"down\.main_grad must be a tensor") as error:
        module(tokens(), make_routing())
    assert actual in str(error.value)
    with torch.no_grad():
        module(tokens(), make_routing())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="main_grad and delayed must not both be False"):
        WeightGradients()
    with pytest.raises(TypeError, match="delayed must be a bool, got 1"):
        WeightGradients(delayed=1)
    with pytest.raises(TypeError, match="weight_gradients must be a WeightGradients, got str"):
        make_experts(weight_gradients="main_grad")


def test_compiled_code_refuses_or_falls_back_to_eager() -> None:
    torch._dynamo.reset()
    plain = _module("plain")
    module = _with_main_grads(plain)
    whole = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="weight_gradients is not for compiled code"):
        whole(tokens(), make_routing())

    torch._dynamo.reset()
    _step(torch.compile(module, backend="eager"))
    _step(plain)

    for name, grad in _grads(plain).items():
        assert_bitwise_equal(_main_grads(module)[name], grad + 0.0, name)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_the_policy_and_nothing_that_waits(copier: Any) -> None:
    module = _module(weight_gradients=WeightGradients(delayed=True))
    _step(module)

    twin = copier(module)

    assert repr(twin) == repr(module)
    assert re.search(
        r"weight_gradients=WeightGradients\(main_grad=False, delayed=True\)", repr(twin)
    )
    assert (twin.weight_gradients.pending, module.weight_gradients.pending) == (0, 1)
    assert twin.weight_gradients is not module.weight_gradients
