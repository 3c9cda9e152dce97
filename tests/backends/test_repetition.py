"""Recorded calls: what their kind is made of, and on which addresses they are repeated."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits import Activation, ExpertWeights, Layout, ProbPlacement, Routing
from samebits.backends import repetition
from samebits.backends.plan import plan_of
from samebits.formats import MXFP4, MXFP8, NVFP4, WeightFormat, quantize
from samebits.formats.weights import QuantizedWeights
from samebits.ops._triton import launch
from samebits.ops._triton.launch import Launch

pytestmark = pytest.mark.interpret


@pytest.fixture
def request_(monkeypatch: pytest.MonkeyPatch) -> repetition.Request:
    """A request that looks as if it lay on a GPU."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    weights = ExpertWeights(gate_up=torch.zeros(4, 64, 16), down=torch.zeros(4, 16, 32))
    routing = Routing(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))
    return repetition.Request(
        torch.zeros(2, 16), routing, weights, Activation(), ProbPlacement.FC2_OUTPUT,
        "auto", 0, None, None, None,
    )  # fmt: skip


def test_what_decides_is_in_the_key(request_: repetition.Request) -> None:
    wide = torch.zeros(2, 17)
    ids, probs = request_.routing.topk_ids, request_.routing.topk_probs
    others = [
        request_._replace(x=torch.zeros(3, 16)),
        request_._replace(x=wide[:, :16]),
        request_._replace(x=torch.zeros(33)[1:].view(2, 16)),
        request_._replace(x=torch.zeros(2, 16, dtype=torch.float16)),
        request_._replace(routing=Routing(ids.int(), probs)),
        request_._replace(routing=Routing(ids, probs, 5)),
        request_._replace(activation=Activation(limit=7.0)),
        request_._replace(placement=ProbPlacement.FC2_INPUT),
        request_._replace(backend="fused"),
        request_._replace(expert_start=1),
        request_._replace(out_dtype=torch.float32),
        request_._replace(num_valid_tokens=torch.zeros(1, dtype=torch.int32)),
        request_._replace(out=torch.zeros(2, 16)),
    ]
    same = request_._replace(x=torch.ones(2, 16), routing=Routing(ids + 1, probs + 1))

    kinds = [repetition.kind_of(request) for request in (request_, *others)]

    keys = [kind.key for kind in kinds if kind is not None]
    assert len(set(keys)) == len(keys) == len(others) + 1
    kind = repetition.kind_of(same)
    assert kind is not None
    assert kind.key == keys[0]
    assert kind.addresses == [0 if t is None else t.data_ptr() for t in same.tensors]


def _quantized(held: WeightFormat = MXFP4, hidden: int = 16, width: int = 32) -> QuantizedWeights:
    dense = ExpertWeights(
        gate_up=torch.ones(4, 2 * width, hidden), down=torch.ones(4, hidden, width)
    )
    return quantize(dense, held)


def test_what_decides_about_quantized_weights_is_in_the_key(request_: repetition.Request) -> None:
    first = _quantized()
    scales = first.gate_up.scales
    apart = torch.zeros(*scales.shape[:2], 3, dtype=torch.uint8)[..., :1]
    others = [
        _quantized(hidden=15),
        _quantized(width=31),
        _quantized(MXFP8),
        _quantized(NVFP4),
        first.to(torch.bfloat16),
        replace(first, gate_up=replace(first.gate_up, scales=apart)),
        replace(first, layout=Layout(interleave=1)),
    ]
    same = first.map(torch.clone)

    kinds = [repetition.kind_of(request_._replace(weights=w)) for w in (first, *others)]

    keys = [kind.key for kind in kinds if kind is not None]
    assert len(set(keys)) == len(keys) == len(others) + 1
    kind = repetition.kind_of(request_._replace(weights=same))
    assert kind is not None
    assert kind.key == keys[0]
    places = [t.data_ptr() for t in same.named_tensors().values()]
    assert [address for address in kind.addresses if address in places] == places
    scaled = _quantized(WeightFormat(name="fp8", block=(16, 16)))
    scaled.down.scales.requires_grad_()
    assert repetition.kind_of(request_._replace(weights=scaled)) is None
    given = first.down.values.view(-1)[:64].view(torch.float32).view(1, 16)
    request = request_._replace(x=request_.x[:1], weights=first, out=given)
    assert repetition.kind_of(request) is None


def test_a_call_that_makes_large_buffers_is_not_kept(
    request_: repetition.Request, no_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repetition, "MOST_BYTES", 100)

    for size, kept in ((25, True), (26, False)):
        repetition.forget()
        repetition.record(("key",), request_, lambda size=size: torch.empty(size))
        assert (repetition.plans()[0] is not None) == kept
    repetition.forget()


def test_what_must_take_the_long_way_has_no_key(request_: repetition.Request) -> None:
    leaf = torch.zeros(2, 16, requires_grad=True)
    frozen = replace(request_.weights, down=torch.nn.Parameter(request_.weights.down))
    requests = [
        request_._replace(x=leaf),
        request_._replace(weights=frozen),
        request_._replace(x=torch.zeros(0, 16)),
        request_._replace(x=torch.zeros(repetition.MOST_TOKENS + 1, 16)),
        request_._replace(x=torch.zeros(16, 2).T),
        request_._replace(x=torch.zeros(16)),
        request_._replace(x=torch.zeros(())),
        request_._replace(x=[1.0]),
        request_._replace(expert_start=True),
        request_._replace(backend=None),
        request_._replace(placement=[1]),
        request_._replace(out_dtype="fp32"),
        request_._replace(out=request_.x),
        request_._replace(out=request_.weights.gate_up.view(-1)[256:288].view(2, 16)),
        request_._replace(out=[1.0]),
        request_._replace(out=torch.zeros(2, 16), num_valid_tokens=1),
    ]

    assert [repetition.kind_of(request) for request in requests] == [None] * len(requests)
    with torch.no_grad():
        assert repetition.kind_of(requests[1]) is not None
    torch.set_autocast_enabled("cuda", True)
    try:
        assert repetition.kind_of(request_) is None
    finally:
        torch.set_autocast_enabled("cuda", False)
    with FlopCounterMode(display=False):
        assert repetition.kind_of(request_) is None


class _Kernel:
    """A compiled kernel that notes how it is run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", "metadata"

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda _: 7, get_current_device=lambda: -1)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))


def test_a_plan_moves_every_pointer(no_device: None) -> None:
    x, weights = torch.zeros(2, 16), torch.zeros(4, 64, 16)
    buffer, out = torch.zeros(100), torch.zeros(2, 16)
    described = TensorDescriptor(weights, [4, 64, 16], [1024, 16, 1], [1, 16, 16])
    kernel = _Kernel()
    launches = [
        Launch(kernel, (3,), (x, 16, described, None, buffer[10:], 1.5)),
        Launch(kernel, (2, 5), (buffer, weights[1:], out)),
    ]

    plan = plan_of((x, weights, None), None, launches[:1], out)
    moved_x, moved_weights = torch.ones(2, 16), torch.ones(4, 64, 16)
    assert plan is not None
    result = plan.play(moved_x, [moved_x.data_ptr(), moved_weights.data_ptr(), 0], None)

    assert plan_of((x, weights), None, launches, out) is None  # weights[1:] starts at no input
    # The first call's tensors must not live on in what is kept of it.
    assert not any(isinstance(a, Tensor) for step in plan.steps for a in step.arguments)
    assert result.shape == out.shape
    assert result.data_ptr() != out.data_ptr()
    assert plan.workspace == 512
    (called,) = kernel.calls
    assert called[:9] == (3, 1, 1, 7, "function", "metadata", None, None, None)
    first, width, descriptor, nothing, inside, scalar = called[9:]
    assert (first, width, nothing, scalar) == (moved_x.data_ptr(), 16, None, 1.5)
    assert inside > 40
    assert descriptor.base.data_ptr() == moved_weights.data_ptr()
    assert (descriptor.shape, descriptor.strides) == ([4, 64, 16], [1024, 16, 1])


def test_two_inputs_at_one_address_have_no_plan(no_device: None) -> None:
    x, out = torch.zeros(2, 16), torch.zeros(2, 16)

    assert plan_of((x, x.view(16, 2)), None, [Launch(_Kernel(), (1,), (x, out))], out) is None


def test_a_given_output_is_the_result(no_device: None) -> None:
    x, given = torch.zeros(2, 16), torch.zeros(2, 16)
    kernel = _Kernel()
    plan = plan_of((x, None), given, [Launch(kernel, (1,), (x, given))], given)
    other = torch.zeros(2, 16)

    assert plan is not None
    assert plan.play(x, [x.data_ptr(), 0], other) is other
    assert kernel.calls[0][9:] == (x.data_ptr(), other.data_ptr())
    assert plan_of((x, None), given, [Launch(kernel, (1,), (x, given))], x) is None


def test_input_and_output_of_one_storage_move_apart(no_device: None) -> None:
    x, given = torch.zeros(4, 16).split(2)
    kernel = _Kernel()
    plan = plan_of((x,), given, [Launch(kernel, (1,), (x, given))], given)
    moved_given, _, moved_x = torch.zeros(6, 16).split(2)

    assert plan is not None
    plan.play(moved_x, [moved_x.data_ptr()], moved_given)
    assert kernel.calls[0][9:] == (moved_x.data_ptr(), moved_given.data_ptr())


def test_autograd_hears_of_a_repeated_write(
    no_device: None, request_: repetition.Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_._replace(out=torch.zeros(2, 16))
    plan = plan_of(request.tensors, request.out, [], request.out)
    assert plan is not None
    # On a CPU, get_device() is -1 for both.
    monkeypatch.setitem(repetition._PLANS, ("key",), plan)
    before = request.out._version

    kind = repetition.Kind(("key",), [])
    assert repetition.repeat(kind, request) is request.out
    assert request.out._version > before


@pytest.mark.parametrize(
    "op",
    [
        "permute", "indirect_gemm", "slot_gemm", "row_norm", "dequantize", "hidden_gradient",
        "weight_gradient", "sorted_rows",
    ],
)  # fmt: skip
def test_every_kernel_of_a_layer_is_recordable(op: str) -> None:
    module = import_module(f"samebits.ops.{op}.kernel")
    kernels = {name: value for name, value in vars(module).items() if name.endswith("_kernel")}

    assert kernels
    assert all(isinstance(kernel, launch.Recordable) for kernel in kernels.values()), kernels


def test_the_kernel_between_grouped_products_is_recordable() -> None:
    module = import_module("samebits.ops.activation.kernel")

    assert isinstance(module._activation_forward_kernel, launch.Recordable)
