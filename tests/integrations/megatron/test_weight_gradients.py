"""Megatron-LM's conventions for weight gradients: fused accumulation, delay, buffers, hooks."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_megatron import EXPERTS, HIDDEN, SIZES, Grouped, with_megatron
from torch import Tensor, nn
from torch.nn.functional import silu

from samebits.integrations.megatron import adapt
from samebits.integrations.megatron.parameters import held_by, owners_of
from samebits.integrations.megatron.stacking import in_memory_order, stacked_view
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

COUNTS = [4, 0, 9]
FUSED = {"gradient_accumulation_fusion": True}
DELAYED = {"delay_wgrad_compute": True}


def _grouped(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Grouped:
    torch.manual_seed(3)
    config = SimpleNamespace(**(SIZES | {"activation_func": silu, "recompute_modules": None}))
    vars(config).update(options)
    return Grouped(config, bias=True, dtype=dtype)


class DataParallel:
    """One buffer of gradients, and of parameters if asked, that begins with the last one; hooks."""

    def __init__(self, module: nn.Module, *, parameters_too: bool = False) -> None:
        self.module, self.ready, self._nodes = module, [], []
        parameters = list(module.named_parameters())
        size = sum(parameter.numel() for _, parameter in parameters)
        self.grads = torch.zeros(size, dtype=torch.float32)
        values = torch.zeros(size, dtype=parameters[0][1].dtype)
        position = 0
        for name, parameter in reversed(parameters):
            place = slice(position, position + parameter.numel())
            parameter.main_grad = self.grads[place].view(parameter.shape)
            parameter.grad_added_to_main_grad = False
            if parameters_too:
                parameter.data = values[place].view(parameter.shape).copy_(parameter.data)
            position += parameter.numel()
            self._register(name, parameter)

    def _register(self, name: str, parameter: Any) -> None:
        def hook(*_: Any) -> None:
            assert parameter.grad is not None, name
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self.ready.append(name)

        if getattr(parameter, "skip_backward_post_hook", False):
            linear = self.module.get_submodule(name.partition(".")[0])
            hooks = vars(linear).setdefault("hooks", [])
            hooks.append(hook)
            vars(linear)["_trigger_wgrad_accumulation_and_reduce_hooks"] = lambda: [
                h() for h in hooks
            ]
        else:
            self._nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
            self._nodes[-1].register_hook(hook)


def _step(module: nn.Module, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    x = torch.randn(sum(COUNTS), HIDDEN, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(COUNTS), generator=generator) + 0.1
    out, _ = module(x, torch.tensor(COUNTS), probs)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parameters_too", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_fused_accumulation_is_that_of_autograd_without_its_rounding(
    delayed: bool, parameters_too: bool, dtype: torch.dtype
) -> None:
    plain, module = _grouped(dtype), _grouped(dtype, **FUSED, **(DELAYED if delayed else {}))
    adapt(plain, backend="reference")
    adapt(module, backend="reference")
    wrapper = DataParallel(module, parameters_too=parameters_too)
    alone = []

    for seed in range(2):
        expected, actual = _step(plain, seed), _step(module, seed)
        assert_bitwise_equal(actual[0], expected[0])
        assert_bitwise_equal(actual[1], expected[1])
        if delayed:
            assert wrapper.ready == []
            module.backward_dw()
        alone.append({name: p.grad.clone() for name, p in plain.named_parameters()})
        if seed == 0:
            for name, parameter in module.named_parameters():
                rounded = parameter.main_grad.to(dtype) + 0.0
                assert_bitwise_equal(rounded, alone[0][name] + 0.0, name)
        assert sorted(wrapper.ready) == sorted(name for name, _ in module.named_parameters())
        wrapper.ready.clear()
    assert all(parameter.grad is None for parameter in module.parameters())
    used = [p for name, p in module.named_parameters() if not name.endswith("1")]
    assert all((p.main_grad != p.main_grad.bfloat16()).any() for p in used)


def test_without_fusion_hooks_add_rounded_gradients() -> None:
    plain, module = _grouped(), _grouped()
    adapt(plain)
    adapt(module)
    wrapper = DataParallel(module)

    _step(plain)
    _step(module)

    assert len(wrapper.ready) == len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        expected = plain.get_parameter(name).grad.float()
        assert_bitwise_equal(parameter.main_grad, expected + 0.0, name)


@pytest.mark.parametrize("parameters_too", [False, True])
def test_buffers_that_begin_with_the_last_parameter_are_written_in_place(
    parameters_too: bool,
) -> None:
    module = _grouped(**FUSED)
    adapt(module)
    wrapper = DataParallel(module, parameters_too=parameters_too)

    held = {name: in_memory_order(found) for name, found in held_by(module).items()}

    for name, owner in owners_of(held).items():
        assert stacked_view(held[name]) is not None, name
        storage = owner.open(name).tensor.untyped_storage().data_ptr()
        assert storage == wrapper.grads.untyped_storage().data_ptr(), name


@pytest.mark.parametrize("overwrite", [False, True])
def test_buffers_far_apart_get_the_same_bits(overwrite: bool) -> None:
    together, apart = _grouped(**FUSED), _grouped(**FUSED)
    adapt(together)
    adapt(apart)
    DataParallel(together)
    for parameter in apart.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    for parameter in (*together.parameters(), *apart.parameters()):
        parameter.main_grad.fill_(0.25)
        if overwrite:
            parameter.overwrite_main_grad = True

    for seed in range(2):
        _step(together, seed)
        _step(apart, seed)

    for name, parameter in apart.named_parameters():
        assert_bitwise_equal(parameter.main_grad, together.get_parameter(name).main_grad, name)


def test_delay_alone_fills_the_gradients_of_each_parameter() -> None:
    plain, module = _grouped(), _grouped(**DELAYED)
    adapt(plain)
    handle = adapt(module)

    _step(plain)
    _step(module)
    assert all(parameter.grad is None for parameter in module.parameters())
    module.backward_dw()
    module.backward_dw()

    for name, parameter in module.named_parameters():
        assert_bitwise_equal(parameter.grad, plain.get_parameter(name).grad, name)
    handle.remove()
    assert "backward_dw" not in vars(module)


def test_a_deep_copy_has_its_own_queue() -> None:
    module = _grouped(**DELAYED)
    adapt(module)
    copied = deepcopy(module)

    _step(copied)
    module.backward_dw()
    assert all(parameter.grad is None for parameter in (*module.parameters(), *copied.parameters()))
    copied.backward_dw()

    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_fusion_without_buffers_is_an_error_that_names_the_parameter() -> None:
    module = _grouped(**FUSED)
    adapt(module)

    with pytest.raises(ValueError, match=r"gate_up\.main_grad must be a tensor .*, got None"):
        _step(module)
    assert len(list(module.parameters())) == 4 * EXPERTS


@with_megatron
def test_the_real_wrapper_gets_every_gradient_once(tmp_path: Path) -> None:
    program = Path(__file__).parent / "real_data_parallel.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}  # noqa: TID251

    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )

    assert done.returncode == 0, done.stderr
    assert "mistake: " not in done.stderr


def test_what_was_marked_is_unmarked_again() -> None:
    module = _grouped(**DELAYED)
    marked = next(module.parameters())
    marked.skip_backward_post_hook = True  # type: ignore[attr-defined]

    adapt(module).remove()

    left = [p for p in module.parameters() if hasattr(p, "skip_backward_post_hook")]
    assert len(left) == 1
    assert left[0] is marked
    assert not hasattr(module, "backward_dw")


def test_a_configuration_of_fields_is_read_as_an_object_is() -> None:
    module = _grouped()
    adapt(module, vars(module.config) | FUSED)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]

    _step(module)

    assert any(p.main_grad.any() for p in module.parameters())  # type: ignore[attr-defined]
