"""Every option of a layer is a training step that can be repeated: kernels are counted, not run."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import Activation, ExpertWeights, Layout, PostExpertNorm, Routing, experts
from samebits.backends import operator, passes
from samebits.backends.recorder import Pass
from samebits.ops._triton import launch
from samebits.ops._triton.launch import Launch, Recordable
from samebits.problem import ProbPlacement
from samebits.weight_gradients import Owner, WeightGradients

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("unpoisoned_memory")]

TOKENS, HIDDEN, COLUMNS, EXPERTS, TOPK = 300, 64, 32, 4, 2


class _Compiled:
    """A compiled kernel that counts its launches."""

    def __init__(self) -> None:
        self.function, self.packed_metadata, self.launches = "function", "metadata", 0

    def run(self, *_: Any) -> None:
        self.launches += 1


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Compiled]:
    """Every kernel, on a machine that looks like one with an H200."""
    compiled = _Compiled()

    def noted(self: Recordable, grid: Any, *arguments: Any, **constants: Any) -> None:
        record = launch._RECORD.get()
        if record is not None:
            rest = (constants[name] for name in self.fn.arg_names[len(arguments) :])
            record.count(None)
            record.launches.append(record.keep(Launch(compiled, grid, (*arguments, *rest))))

    active = SimpleNamespace(get_current_stream=lambda _: 7, get_current_device=lambda: -1)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(Recordable, "_launch", noted)
    monkeypatch.setattr(operator, "_device_name", lambda _: "sm_90")
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    passes.forget()
    yield compiled
    passes.forget()


def _weights(*, biases: bool, norm: bool, interleave: int | None) -> ExpertWeights:
    def leaf(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    return ExpertWeights(
        gate_up=leaf(EXPERTS, 2 * COLUMNS, HIDDEN),
        down=leaf(EXPERTS, HIDDEN, COLUMNS),
        gate_up_bias=leaf(EXPERTS, 2 * COLUMNS) if biases else None,
        down_bias=leaf(EXPERTS, HIDDEN) if biases else None,
        layout=Layout(interleave=interleave),
        norm=PostExpertNorm(eps=1e-5) if norm else None,
        norm_scale=leaf(HIDDEN) if norm else None,
    )


def _step(weights: ExpertWeights, options: dict[str, Any], probs_dtype: torch.dtype) -> None:
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.zeros(TOKENS, TOPK, dtype=probs_dtype, requires_grad=True)
    routing = Routing(torch.zeros(TOKENS, TOPK, dtype=torch.int64), probs, EXPERTS)
    out = experts(x, routing, weights, backend="fused", **options)
    out.backward(torch.zeros_like(out))
    grads = [x.grad, probs.grad]
    assert [None if g is None else g.dtype for g in grads] == [torch.bfloat16, probs_dtype]


PLAIN = {"biases": False, "norm": False, "interleave": None}
GPT_OSS = {"biases": True, "norm": False, "interleave": 1}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "gpt-oss": (
        GPT_OSS,
        {"activation": Activation(alpha=1.702, limit=7.0, linear_offset=1.0)},
    ),
    "norm": (PLAIN | {"norm": True}, {}),
    "fp32 output": (GPT_OSS, {"out_dtype": torch.float32}),
    "recompute": (PLAIN, {"recompute": True}),
    "counted": (PLAIN, {"num_valid_tokens": torch.tensor([7], dtype=torch.int32)}),
}


@pytest.mark.parametrize("placement", ProbPlacement)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_both_passes_are_launches_alone_from_the_third_on(
    name: str, probs_dtype: torch.dtype, placement: ProbPlacement, kernel: _Compiled
) -> None:
    kinds, options = OPTIONS[name]
    weights = _weights(**kinds)

    for _ in range(3):
        _step(weights, options | {"placement": placement}, probs_dtype)

    known = passes.passes()
    assert [why for why in known if not isinstance(why, Pass)] == []
    assert len(known) == 2
    assert kernel.launches >= 12


@pytest.mark.parametrize("delayed", [False, True])
def test_so_are_those_that_add_to_main_grad(delayed: bool, kernel: _Compiled) -> None:
    weights = _weights(**GPT_OSS)
    owners = {}
    for name, parameter in weights.named_tensors().items():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32).detach()  # type: ignore[attr-defined]
        owners[name] = Owner(parameter)
    policy = WeightGradients(main_grad=True, delayed=delayed)

    for _ in range(3):
        _step(weights, {"weight_gradients": policy.of(owners)}, torch.float32)
        policy.backward_dw()

    known = passes.passes()
    assert [why for why in known if not isinstance(why, Pass)] == []
    assert len(known) == (3 if delayed else 2)
    assert kernel.launches >= 12
