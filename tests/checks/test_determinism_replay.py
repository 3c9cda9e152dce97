"""Replays without a GPU: bytes are compared, faults seen, launches are those that are listed."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samebits import env
from samebits.backends import operator
from samebits.checks.determinism import layers
from samebits.checks.determinism.command import OURS
from samebits.checks.determinism.launches import mismatch, observed
from samebits.checks.determinism.memory import digest, filled, first_difference, same
from samebits.checks.determinism.planted import planted
from samebits.checks.determinism.replay import replay, run
from samebits.checks.determinism.variant import Variant, load
from samebits.cli import main

pytestmark = pytest.mark.interpret

KERNELS = """
import torch
import triton
import triton.language as tl

@triton.jit
def _double_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, 2.0 * tl.load(x_ptr + place))

@triton.jit
def _half_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, 0.5 * tl.load(x_ptr + place), mask=place < 100)

def launch(kernel, x, block):
    y = torch.empty_like(x)
    kernel[(x.numel() // block,)](x, y, BLOCK=block, num_warps=4)
    return y
"""
REGISTRY = """
from functools import partial
from samebits.checks.determinism import Variant

FILE = "kernels_of_a_test.py:"

def prepare(name, block, device):
    import torch
    import kernels_of_a_test as kernels
    x = torch.randn(256, device=device)
    return lambda: kernels.launch(getattr(kernels, name), x, block)

def variant(name, kernel="_double_kernel", launched="_double_kernel", block=64, **config):
    call = partial(prepare, launched, block)
    return Variant(name=name, kernels=[FILE + kernel], config=config, prepare=call)

def variants():
    yield variant("good", BLOCK=64, num_warps=4)
    yield variant("unwritten", "_half_kernel", "_half_kernel")
    yield variant("other kernel", "_half_kernel")
    yield variant("other tile", block=128, block_=1, Block=64)
    yield variant("broken", launched="_gone_kernel")
"""
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels_of_a_test", raising=False)
    (tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    (tmp_path / "registry.py").write_text(REGISTRY)
    return tmp_path


@pytest.fixture
def replayed(folder: Path) -> Callable:
    registry = load(folder / "registry.py", planted())
    variants = {variant.name: variant for variant in registry.variants}
    return lambda name: replay(variants[name], CPU, registry.root, replays=3)


def test_a_call_that_repeats(replayed):
    record = replayed("good")

    assert record.same
    assert record.replays == {"repeat": 3, "memory": 8}
    assert record.launched == {"_double_kernel": {"BLOCK": 64, "num_warps": 4}}


def test_memory_that_nobody_wrote_is_seen(replayed):
    record = replayed("unwritten")

    assert record.different == {"repeat": 0, "memory": 8}
    assert record.note.startswith(
        "memory 1: result 0: 156 of 256 elements, first 100: 0.0 (0x00000000)"
    )


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("other kernel", "it did not launch kernels_of_a_test.py:_half_kernel"),
        ("other tile", "_double_kernel was launched with Block=128, not 64"),
        ("broken", "AttributeError: module 'kernels_of_a_test' has no attribute '_gone_kernel'"),
    ],
)
def test_a_call_that_is_not_what_the_registry_says(replayed, name, note):
    record = replayed(name)

    assert (record.replays, record.note) == ({}, note)


def test_a_kernel_that_is_not_listed():
    variant = Variant(name="v", kernels=["k.py:a"], config={}, prepare=lambda device: lambda: None)

    said = mismatch(variant, {"k.py:a": [{}], "k.py:b": [{}]})

    assert said == "it launched k.py:b, which its variant does not list"


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(
    ("make", "family"),
    [
        (layers._forward, "odd"),
        (layers._backward, "fc1_input"),
        (layers._backward, "gpt-oss"),
        (layers._grouped, "plain"),
    ],
)
def test_our_layers_launch_what_the_registry_says(make, family, monkeypatch):
    monkeypatch.setattr(operator, "_device_name", lambda device: "sm_90")
    problem = layers._in(layers.FAMILIES[family], "fp16")
    hidden, columns = (50, 22) if family == "odd" else (64, 32)
    problem = replace(problem, H=hidden, F=columns, E=4, K=min(problem.K, 2))
    variant = make(family, problem, 1.0)
    root = load(OURS).root

    with observed(root) as seen:
        outcome = run(variant.prepare(CPU))

    assert mismatch(variant, seen) == ""
    assert all(bool(result.isfinite().any()) for result in outcome.results)


def test_our_operations_launch_what_the_registry_says():
    script = Path(__file__).with_name("determinism_operations.py")
    source = Path(__file__).parents[2] / "src"
    command = [sys.executable, "-W", "ignore", str(script), str(load(OURS).root)]
    environment = env.for_child(PYTHONPATH=str(source), TRITON_INTERPRET="1")

    said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 5


def test_the_planted_fault_that_a_cpu_can_see(replayed):
    assert replayed("planted old_memory").different["memory"] == 8


def test_a_whole_run_with_another_process(folder, capsys):
    out = folder / "evidence" / "cpu.json"
    command = ["check", "determinism", "--registry", str(folder / "registry.py"), "--replay"]
    command += ["--out", str(out), "--tree", "1a2b3c", "--only", "good", "--processes", "1"]

    code = main([*command, "--replays", "2"])

    said = {
        name: record["different"]
        for name, record in json.loads(out.read_text())["variants"].items()
    }
    assert said["good"] == {"repeat": 0, "memory": 0, "process": 0}
    assert said["planted old_memory"]["memory"] == 8
    # One program after the other has no races: such a run proves nothing.
    assert code == 1
    assert "a planted fault, not seen by load" in capsys.readouterr().out


def test_bytes_are_compared_not_values():
    zeros = torch.zeros(8)
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    nan = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)

    assert not same([zeros], [-zeros])
    assert not same([payload], [nan])
    assert same([nan], [nan.clone()])
    assert not same([zeros], [zeros.double()])
    assert digest([zeros]) != digest([-zeros])
    assert digest([payload]) != digest([nan])
    place = first_difference([zeros], [torch.tensor([0.0] * 5 + [-0.0] * 3)], "result")
    assert place == "result 0: 3 of 8 elements, first 5: 0.0 (0x00000000) and -0.0 (0x80000000)"


def test_a_digest_depends_on_every_byte_and_its_place():
    words = torch.arange(24, dtype=torch.uint8)
    found = {digest([words])}
    for place in range(24):
        changed = words.clone()
        changed[place] ^= 1
        found.add(digest([changed]))
    found.add(digest([words.flip(0)]))
    found.add(digest([words[:23]]))

    assert len(found) == 27


def test_memory_is_filled_and_listed():
    with filled(0xFF) as memory:
        taken = torch.empty(3), torch.ones(2).new_empty(4, dtype=torch.int32)

    assert bool(taken[0].isnan().all())
    assert taken[1].tolist() == [-1] * 4
    assert [t.data_ptr() for t in memory] == [t.data_ptr() for t in taken]
    with filled(0x3C):
        assert torch.empty(2, dtype=torch.uint8).tolist() == [0x3C] * 2


def test_memory_that_a_call_gave_back_is_not_read() -> None:
    def call() -> torch.Tensor:
        kept, spent = torch.empty(8), torch.empty(8)
        result = kept.fill_(1.0) + 1.0
        spent.untyped_storage().resize_(0)
        return result

    outcome = run(call)

    assert [t.numel() for t in outcome.memory] == [8]
    assert outcome.same(outcome.kept())
