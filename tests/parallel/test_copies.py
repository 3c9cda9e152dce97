"""What a layer over ranks does around its experts is made of launches alone, and so repeated."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.backends import passes
from samebits.backends.recorder import Pass
from samebits.ops._triton import launch
from samebits.ops.permute import kernel
from samebits.parallel import copies

pytestmark = pytest.mark.interpret

KERNELS = (
    "_few_metadata_kernel", "_histogram_kernel", "_place_kernel", "_gather_kernel", "_sum_kernel",
)  # fmt: skip


class _Kernel:
    """A kernel that is recorded, and does nothing."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.played = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **_: Any) -> None:
            record = launch._RECORD.get()
            if record is not None:
                record.count(None)
                record.launches.append(record.keep(launch.Launch(self, grid, arguments)))

        return start

    def run(self, *_: Any) -> None:
        self.played += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, unpoisoned_memory: None) -> dict[str, _Kernel]:
    active = SimpleNamespace(get_current_stream=lambda _: 7, get_current_device=lambda: -1)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    found = {name: _Kernel() for name in KERNELS}
    for name, made in found.items():
        monkeypatch.setattr(kernel, name, made)
    passes.forget()
    return found


@pytest.mark.parametrize("tokens", [6, 5000])
def test_the_third_call_is_launches_alone(kernels: dict[str, _Kernel], tokens: int) -> None:
    x, probs = torch.zeros(tokens, 8), torch.zeros(tokens, 2)
    ids, count = torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    for _ in range(3):
        for given in (None, count):
            inverse = copies.sort(ids, 4, given).inverse
        for factors in (None, probs):
            rows = copies.permute(x, inverse, 2, factors)
            out = copies.combine(rows, inverse, 2, factors, torch.float32)

    assert rows.shape == (2 * tokens, 8)
    assert out.shape == (tokens, 8)
    assert all(isinstance(found, Pass) for found in passes.passes())
    assert len(passes.passes()) == 6
    sorts = [2, 0, 0] if tokens == 6 else [0, 2, 2]
    assert [made.played for made in kernels.values()] == [*sorts, 2, 2]


def test_tokens_whose_columns_are_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_launched", lambda _: True)
    tokens = torch.randn(8, 6).T
    inverse = copies.sort(torch.tensor([[1, 0]] * 6), 2, None).inverse

    rows = copies.permute(tokens, inverse, 2)

    assert torch.equal(rows, copies.permute(tokens.contiguous(), inverse, 2))
    assert torch.equal(rows, torch.cat([tokens, tokens]))
