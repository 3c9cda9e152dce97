"""Repeated passes of a training step: which buffers they take, and when they give them back."""

import weakref
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.backends import passes, recorder, repetition
from samebits.ops._triton import launch
from samebits.ops._triton.launch import Launch

pytestmark = pytest.mark.interpret


class _Kernel:
    """A compiled kernel that notes how it is run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", "metadata"

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments[9:])


def _launch(kernel: _Kernel, *arguments: Any) -> None:
    record = launch._RECORD.get()
    if record is not None:
        record.count(None)
        record.launches.append(record.keep(Launch(kernel, (1,), arguments)))


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda _: 7, get_current_device=lambda: -1)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    passes.forget()


class _Backward:
    """x, z -> (a gradient, None, an empty one) by three kernels and two buffers of its own."""

    def __init__(self, *, spend: bool = False) -> None:
        self.kernels = [_Kernel() for _ in range(3)]
        self.spend, self.runs = spend, 0

    def __call__(self, x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
        self.runs += 1
        first, second, third = self.kernels
        dz = torch.empty_like(z)
        described = TensorDescriptor(z, [4, 8], [8, 1], [2, 8])
        _launch(first, x, described, dz, 1.5)
        if self.spend:
            recorder.spend(z)
        rows = x.new_empty(16)
        _launch(second, dz, rows[4:])
        del dz
        grad = torch.empty_like(x)
        _launch(third, rows, grad)
        return grad, None, x.new_empty(0)

    def step(self, x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
        spent = 1 if self.spend else None
        return passes.repeated(("backward",), (x, z), lambda: self(x, z), spent=spent)


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8), torch.zeros(4, 8)


def test_the_third_of_a_kind_is_launches_alone() -> None:
    backward = _Backward()
    kept = [_inputs() for _ in range(3)]
    results = [backward.step(*tensors) for tensors in kept]

    assert backward.runs == 2
    (known,) = passes.passes()
    assert isinstance(known, recorder.Pass)
    assert [len(kernel.calls) for kernel in backward.kernels] == [1, 1, 1]
    x, described, dz, scalar = backward.kernels[0].calls[0]
    assert (x, scalar) == (kept[2][0].data_ptr(), 1.5)
    assert described.base.data_ptr() == kept[2][1].data_ptr()
    read, inside = backward.kernels[1].calls[0]
    rows, written = backward.kernels[2].calls[0]
    assert (read, inside) == (dz, rows + 16)
    grad, nothing, empty = results[2]
    assert grad is not None
    assert empty is not None
    assert written == grad.data_ptr()
    assert (grad.shape, nothing, empty.shape) == ((4, 8), None, (0,))


def test_a_buffer_lives_from_its_first_launch_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_SMALL", 0)
    backward = _Backward()
    for _ in range(2):
        backward.step(*_inputs())
    (known,) = passes.passes()

    assert isinstance(known, recorder.Pass)
    assert [([b for b, *_ in taken], dropped) for _, taken, dropped in known.steps] == [
        ([0], ()), ([1], (0,)), ([2], (1,)),
    ]  # fmt: skip
    # Nothing of the recorded pass lives on.
    assert not any(isinstance(a, Tensor) for step, *_ in known.steps for a in step.arguments)


def test_small_buffers_are_taken_together() -> None:
    backward = _Backward()
    for _ in range(3):
        backward.step(*_inputs())
    (known,) = passes.passes()

    assert isinstance(known, recorder.Pass)
    assert (sorted(known.small), known.room) == ([(0, 0), (1, 512)], 1024)
    assert [([b for b, *_ in taken], dropped) for _, taken, dropped in known.steps] == [
        ([], ()), ([], ()), ([2], ()),
    ]  # fmt: skip
    (_, _, dz, _), (read, inside) = (kernel.calls[0] for kernel in backward.kernels[:2])
    assert read == dz
    assert inside == dz + 512 + 16


def test_what_is_spent_is_given_back_after_its_last_use() -> None:
    backward = _Backward(spend=True)
    kept = [_inputs() for _ in range(3)]
    for tensors in kept:
        backward.step(*tensors)

    assert backward.runs == 2
    assert [z.untyped_storage().nbytes() for _, z in kept] == [0, 0, 0]
    (known,) = passes.passes()
    assert isinstance(known, recorder.Pass)
    assert known.last == (0, 0)


def test_memory_that_was_given_back_and_taken_again_is_no_input() -> None:
    x, z = _inputs()
    found = recorder.Recorder((x, z))
    # What an allocator does once z was spent.
    found.allocated(z.view(32))

    found.launched(Launch(_Kernel(), (1,), (x, z)))

    assert found.find(x) == (0, 0)
    assert found.find(z) == (2, 0)


def test_what_cannot_be_repeated_takes_the_long_way() -> None:
    x, z = _inputs()
    runs: list[int] = []

    def computes() -> tuple[Tensor, ...]:
        runs.append(1)
        return (x.neg(),)

    def returns_an_input() -> tuple[Tensor, ...]:
        runs.append(2)
        return (z,)

    for _ in range(4):
        passes.repeated(("computes",), (x, z), computes)
        passes.repeated(("input",), (x, z), returns_an_input)

    assert runs == [1, 2] * 4
    assert passes.passes() == [
        "it did more than to launch: neg", "result 0 is no buffer of its own",
    ]  # fmt: skip
    assert passes.key_of((), (x[:0],)) is None
    assert passes.key_of((), (torch.nn.Buffer(x),)) is not None


def test_copies_are_made_again() -> None:
    kernels = [_Kernel() for _ in range(2)]
    runs: list[int] = []

    def function(x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
        runs.append(1)
        narrow, rows = x.half(), z.T.contiguous()
        sums = torch.empty(4)
        _launch(kernels[0], narrow, rows, sums)
        del narrow, rows
        grad = torch.empty_like(x)
        _launch(kernels[1], sums, grad)
        # Of a buffer, as of an input.
        return grad, sums.half()

    def step(x: Tensor, z: Tensor) -> tuple[Tensor | None, ...]:
        return passes.repeated(("copies",), (x, z.T), lambda: function(x, z.T))

    results = [step(*_inputs()) for _ in range(3)]

    (known,) = passes.passes()
    assert isinstance(known, recorder.Pass), known
    assert len(runs) == 2
    narrow, rows, sums = kernels[0].calls[0]
    assert len({narrow, rows, sums, kernels[1].calls[0][1]}) == 4
    assert kernels[1].calls[0][0] == sums
    shapes = [[(r.shape, r.dtype) for r in result if r is not None] for result in results]
    assert shapes[2] == shapes[0] == [((4, 8), torch.float32), ((4,), torch.float16)]


def test_what_is_copied_is_read_anew() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x.half(),)

    for value in range(4):
        x = torch.full((4, 8), float(value))
        (narrow,) = passes.repeated(("narrow",), (x,), lambda x=x: function(x))
        assert narrow.dtype == torch.float16
        assert narrow.eq(value).all()
    assert isinstance(passes.passes()[0], recorder.Pass)


def test_a_copy_of_a_part_takes_the_long_way() -> None:
    x, _ = _inputs()
    for _ in range(3):
        passes.repeated(("part",), (x,), lambda: (x[1:].half(),))
        passes.repeated(("other shape",), (x,), lambda: (x.view(32).half(),))

    assert passes.passes() == ["it did more than to launch: _to_copy"] * 2


def test_launches_of_other_threads_are_not_its_own() -> None:
    kernel = _Kernel()

    def function() -> tuple[Tensor]:
        record = launch._RECORD.get()
        if record is not None:
            other = Thread(target=record.count, args=(None,))
            other.start()
            other.join()
        out = torch.empty_like(x)
        _launch(kernel, x, out)
        return (out,)

    x, _ = _inputs()
    for _ in range(2):
        passes.repeated((), (x,), function)

    (known,) = passes.passes()
    assert isinstance(known, recorder.Pass)


def test_without_triton_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes.key_of((), _inputs()) is not None

    monkeypatch.setattr(repetition, "find_spec", lambda _: None)
    monkeypatch.setattr(passes, "has_launches", repetition.has_launches.__wrapped__)

    assert passes.key_of((), _inputs()) is None


def test_what_decides_is_in_the_key() -> None:
    x, z = _inputs()
    wide = torch.zeros(4, 9)
    keys = [
        passes.key_of(("a",), (x, z)),
        passes.key_of(("b",), (x, z)),
        passes.key_of(("a",), (x, None)),
        passes.key_of(("a",), (x, wide[:, :8])),
        passes.key_of(("a",), (x, z.double())),
        passes.key_of(("a",), (x, torch.zeros(33)[1:].view(4, 8))),
    ]

    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert passes.key_of(("a",), _inputs()) == keys[0]


def test_a_dropped_buffer_is_held_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_SMALL", 0)
    kernel = _Kernel()
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []
    take = Tensor.new_empty_strided

    def noted(*arguments: Any, **options: Any) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        tensor = take(*arguments, **options)
        made.append(weakref.ref(tensor))
        return tensor

    def function() -> tuple[Tensor]:
        buffer = x.new_empty(16)
        _launch(kernel, x, buffer)
        _launch(kernel, buffer)
        del buffer
        out = torch.empty_like(x)
        _launch(kernel, out)
        return (out,)

    x, _ = _inputs()
    monkeypatch.setattr(Tensor, "new_empty_strided", noted)
    for _ in range(3):
        passes.repeated((), (x,), function)

    assert alive == [0, 0]
