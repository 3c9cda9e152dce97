"""Replays without a GPU: bytes are compared, faults seen, launches are those that are listed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from samebits import env
from samebits.checks.determinism import processes
from samebits.checks.determinism.command import OURS
from samebits.checks.determinism.launches import mismatch
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
import os
from functools import partial
from samebits.checks.determinism import Variant

FILE = "kernels_of_a_test.py:"

def prepare(name, block, device):
    import torch
    import kernels_of_a_test as kernels
    x = torch.randn(256, device=device)
    return lambda: kernels.launch(getattr(kernels, name), x, block)

def crash(device):
    os._exit(9)

def variant(name, kernel="_double_kernel", launched="_double_kernel", block=64, **config):
    call = partial(prepare, launched, block)
    return Variant(name=name, kernels=[FILE + kernel], config=config, prepare=call)

def variants():
    yield variant("good", BLOCK=64, num_warps=4)
    yield variant("unwritten", "_half_kernel", "_half_kernel")
    yield variant("other kernel", "_half_kernel")
    yield variant("other tile", block=128, block_=1, Block=64)
    yield variant("broken", launched="_gone_kernel")
    yield Variant(name="crash", kernels=[FILE + "_double_kernel"], config={}, prepare=crash)
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
    return lambda name: replay(variants[name], CPU, registry.root, replays=3).record


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
        (
            "broken",
            (
                "AttributeError: module 'kernels_of_a_test' has no attribute '_gone_kernel' "
                "(registry.py:12)"
            ),
        ),
    ],
)
def test_a_call_that_is_not_what_the_registry_says(replayed, name, note):
    record = replayed(name)

    assert (record.replays, record.note) == ({}, note)


def test_a_kernel_that_is_not_listed():
    variant = Variant(name="v", kernels=["k.py:a"], config={}, prepare=lambda device: lambda: None)

    said = mismatch(variant, {"k.py:a": [{}], "k.py:b": [{}]})

    assert said == "it launched k.py:b, which its variant does not list"


def test_our_operations_launch_what_the_registry_says():
    script = Path(__file__).with_name("determinism_operations.py")
    source = Path(__file__).parents[2] / "src"
    command = [sys.executable, "-W", "ignore", str(script), str(load(OURS).root)]
    environment = env.for_child(PYTHONPATH=str(source), TRITON_INTERPRET="1")

    said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    # As listed, and nothing is asked of the host.
    assert found == {name: [""] for name in found}
    assert len(found) == 5


def test_the_planted_fault_that_a_cpu_can_see(replayed):
    assert replayed("planted old_memory").different["memory"] == 8


def _run(folder: Path, *words: str, out: str = "evidence/cpu.json", tree: str = "1a2b3c") -> int:
    command = ["check", "determinism", "--registry", str(folder / "registry.py"), "--replay"]
    command += ["--out", str(folder / out), "--tree", tree, "--processes", "1", "--replays", "2"]
    return main([*command, *words])


def _variants(folder: Path) -> dict:
    return json.loads((folder / "evidence" / "cpu.json").read_text())["variants"]


@pytest.mark.parametrize(("patience", "rest"), [(0.2, 60.0), (60.0, -60.0)])
def test_a_process_that_has_stopped_is_ended(tmp_path, monkeypatch, patience, rest):
    # As a kernel that never ends stops it: silent for long, or at work long after the time is over.
    monkeypatch.setattr(processes, "_PATIENCE", patience)
    out = tmp_path / "out"
    out.touch()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    assert processes._ended(worker, out, time.monotonic() + rest) == -signal.SIGKILL


def test_a_whole_run_with_other_processes(folder, capsys):
    code = _run(folder, *(word for name in ("good", "crash", "b*") for word in ("--only", name)))

    said = {name: (r["different"], r["note"]) for name, r in _variants(folder).items()}
    assert said["good"] == ({"repeat": 0, "memory": 0, "process": 0}, "")
    # It ended its process; what came after was replayed in another.
    assert said["crash"] == ({}, "its process ended with 9")
    assert said["broken"][1].startswith("AttributeError: module 'kernels_of_a_test'")
    assert said["planted old_memory"][0]["memory"] == 8
    # One program after the other has no races: such a run proves nothing.
    assert code == 1
    printed = capsys.readouterr()
    assert "a planted fault, not seen by load" in printed.out
    assert "its process ended with 9" in printed.out
    assert "crash: another process ended with 9" in printed.err


def _as_if_faults_were_seen(file: Path, variants: tuple[Variant, ...]) -> None:
    content = json.loads(file.read_text())
    for variant in variants:
        if variant.expected == "different":
            content["variants"][variant.name]["different"] = dict.fromkeys(variant.seen_by, 1)
    file.write_text(json.dumps(content))


def test_a_later_run_adds_what_lacks_evidence(folder, capsys):
    registry = folder / "registry.py"
    head = REGISTRY.partition("def variants():")[0]
    names = ("good", "second", "after")
    calls = "".join(f"    yield variant({name!r}, BLOCK=64)\n" for name in names)
    registry.write_text(f"{head}def variants():\n{calls}")
    file = folder / "evidence" / "cpu.json"
    _run(folder, "--only", "good")
    _as_if_faults_were_seen(file, load(registry, planted()).variants)
    before = _variants(folder)

    _run(folder, "--owed")

    after = _variants(folder)
    assert after.keys() - before.keys() == {"second", "after"}
    assert after["good"] == before["good"]
    capsys.readouterr()
    _as_if_faults_were_seen(file, load(registry, planted()).variants)
    assert _run(folder, "--owed") == 0
    assert "every variant has evidence" in capsys.readouterr().err
    # What is not of this tree, or no evidence, is not written over.
    assert _run(folder, "--only", "good", tree="4d5e6f") == 2
    assert _run(folder, "--only", "good", out="registry.py") == 2
    assert "be evidence of this machine and tree" in capsys.readouterr().err
    assert _variants(folder).keys() == after.keys()


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


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x).copy_(2.0 * x)

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * grad


def test_an_outcome_keeps_no_node_that_adds_gradients() -> None:
    """A node has the stream of its first call: a later call on another could not be captured."""
    x = torch.ones(8, requires_grad=True)

    def call() -> tuple[torch.Tensor, ...]:
        out = _Doubled.apply(x)
        return out, *torch.autograd.grad(out, [x], torch.ones(8))

    def adding() -> dict:
        return x.view_as(x).grad_fn.next_functions[0][0].metadata

    holder = x.view_as(x)
    holder.grad_fn.next_functions[0][0].metadata["of"] = "the first call"

    outcome = run(call)

    del holder
    assert len(outcome.memory) == 1
    assert adding() == {}


def test_calls_are_made_twice_before_they_are_replayed() -> None:
    made = []

    def call() -> torch.Tensor:
        # Who takes memory while it is watched does not know that it will be repeated.
        made.append(torch.empty is not original)
        return torch.zeros(4)

    original = torch.empty
    variant = Variant(name="v", kernels=["k.py:a"], config={}, prepare=lambda device: call)

    replay(variant, CPU, Path(), replays=1)

    assert made[:3] == [False, False, True]


def test_memory_that_a_call_gave_back_is_not_read() -> None:
    def call() -> torch.Tensor:
        kept, spent = torch.empty(8), torch.empty(8)
        result = kept.fill_(1.0) + 1.0
        spent.untyped_storage().resize_(0)
        return result

    outcome = run(call)

    assert [t.numel() for t in outcome.memory] == [8]
    assert outcome.same(outcome.kept())
