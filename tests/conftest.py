"""What holds for every test: one tier, one seed, poisoned memory, no network, counted skips."""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

TIERS = frozenset({"reference", "interpret", "compile", "gpu", "distributed"})
HAS_GPU = torch.cuda.is_available()
WITHOUT_GPU = pytest.mark.skip(reason="needs a CUDA device")
WITHOUT_TRITON = pytest.mark.skip(reason="needs Triton")
NOT_INTERPRETED = pytest.mark.skip(reason="kernels are compiled here: TRITON_INTERPRET is not 1")

# Both are read when a library is imported, so before any test module.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # noqa: TID251
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # noqa: TID251
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # noqa: TID251

# The products of tests are small: more threads make them slower.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what cannot run here; refuse a test without exactly one tier."""
    strays = []
    for item in items:
        tiers = TIERS & {marker.name for marker in item.iter_markers()}
        if len(tiers) != 1:
            strays.append(f"  {item.nodeid}: {', '.join(sorted(tiers)) or 'none'}")
        if "gpu" in tiers and not HAS_GPU:
            item.add_marker(WITHOUT_GPU)
        if tiers & {"interpret", "compile"} and find_spec("triton") is None:
            item.add_marker(WITHOUT_TRITON)
        elif "interpret" in tiers and not INTERPRETED:
            item.add_marker(NOT_INTERPRETED)
    if strays:
        expected = ", ".join(sorted(TIERS))
        raise pytest.UsageError("\n".join([f"a test needs one tier of {expected}:", *strays]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count skips by reason, so that a tier that did not run cannot go unseen."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skips by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed every generator, and return the seed."""
    random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def compiler_stance() -> Iterator[None]:
    """Fail the test that leaves torch's compiler turned off: later ones would compile nothing."""
    yield
    frames = sys.modules.get("torch._dynamo.eval_frame")
    assert frames is None or frames._stance.stance == "default"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the test's tier."""
    return torch.device("cuda" if request.node.get_closest_marker("gpu") else "cpu")


_TAKERS = (
    (torch, ("empty", "empty_like", "empty_strided")),
    (torch.Tensor, ("new_empty", "new_empty_strided")),
)


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill memory that the package takes uninitialised with NaN: a forgotten write shows."""
    # ``with torch.device(…)`` knows the functions that take memory by identity, once looked up.
    _device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in _TAKERS:
            for name in names:
                patch.setattr(owner, name, _poisoning(getattr(owner, name)))
        yield


@pytest.fixture
def unpoisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave memory as it is taken: filling it is an operation that nothing can repeat."""
    for owner, names in _TAKERS:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


def _poisoning(take: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(take)
    def taken(*arguments: Any, **options: Any) -> torch.Tensor:
        memory = take(*arguments, **options)
        if torch.compiler.is_compiling() or memory.device.type == "meta":
            return memory
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "samebits" and memory.is_floating_point():
            with torch.no_grad():
                memory.fill_(float("nan"))
        return memory

    return taken
