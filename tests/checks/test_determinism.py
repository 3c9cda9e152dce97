"""Evidence of determinism, by syntax: what makes it old, what has none, what a debt excuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samebits import env
from samebits.checks.determinism.coverage import coverage, fingerprint
from samebits.checks.determinism.evidence import joined, read
from samebits.checks.determinism.planted import planted
from samebits.checks.determinism.source import Sources
from samebits.checks.determinism.variant import RegistryError, load
from samebits.cli import main

pytestmark = pytest.mark.reference

SOURCE = Path(__file__).parents[2] / "src"

KERNELS = '''
import triton
import triton.language as tl
from triton import jit
from shapes import STRIP

FACTOR = tl.constexpr(2.0)


@triton.jit
def twice(x):
    """Double."""
    return FACTOR * x


@jit
def _double_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, twice(tl.load(x_ptr + place)))


@triton.jit(do_not_specialize=["n"])
def _copy_kernel(x_ptr, y_ptr, n):
    for i in range(0, n, STRIP):
        tl.store(y_ptr + i, tl.load(x_ptr + i))


def double(x, y, block):
    _double_kernel[(x.numel() // block,)](x, y, BLOCK=block, num_warps=4)
'''
REGISTRY = """
from samebits.checks.determinism import Variant

def variants():
    for block in (64, 128):
        yield Variant(
            name=f"double {block}", kernels=["kernels.py:_double_kernel"], config={"block": block},
            prepare=lambda device: None,
        )
    yield Variant(
        name="planted", kernels=["kernels.py:_copy_kernel"], config={}, prepare=lambda device: None,
        expected="different", seen_by=["memory"],
    )
"""
COPY = "kernels.py:_copy_kernel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "shapes.py").write_text("STRIP = 64\n")
    (tmp_path / "registry.py").write_text(REGISTRY)
    return tmp_path


def record(hash_: str, **changes):
    plain = {
        "hash": hash_,
        "digest": "d",
        "replays": {"load": 48, "memory": 4},
        "different": {"load": 0, "memory": 0},
        "note": "",
        "launched": {},
    }
    return plain | changes


def write_evidence(
    folder: Path, *, tree: str = "1a2b3c", name: str = "gpu.json", **changes
) -> None:
    """Write what a run of the replays would say of the registry as it is."""
    registry, sources = load(folder / "registry.py", planted()), Sources(folder)
    variants = {}
    for variant in registry.variants:
        seen = (
            {} if variant.expected == "same" else {"different": dict.fromkeys(variant.seen_by, 4)}
        )
        variants[variant.name] = record(fingerprint(sources, variant), **seen)
    for variant, change in changes.items():
        variants[variant.replace("_", " ")] |= change
    (folder / "evidence").mkdir(exist_ok=True)
    content = {
        "check": "determinism", "format": 1, "machine": {"gpu": "G"}, "tree": tree, "seconds": 1.0,
        "variants": variants,
    }  # fmt: skip
    (folder / "evidence" / name).write_text(json.dumps(content))


def owe(folder: Path, reason: str) -> None:
    command = ["check", "determinism", "--registry", str(folder / "registry.py")]
    assert main([*command, "--owe", reason]) == 0


def judged(folder: Path) -> dict[str, tuple[str, str]]:
    results = coverage(load(folder / "registry.py", planted())).results
    return {result.case or result.backend: (result.verdict, result.note) for result in results}


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_evidence_at_the_current_hash_passes(folder):
    write_evidence(folder)

    found = judged(folder)

    assert found == {
        "double 64": ("pass", "52 replays on gpu G"),
        "double 128": ("pass", "52 replays on gpu G"),
    }


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels.py", "tl.program_id(0)", "tl.program_id(1)"),
        ("kernels.py", "FACTOR * x", "x * FACTOR"),
        ("kernels.py", "tl.constexpr(2.0)", "tl.constexpr(4.0)"),
        ("kernels.py", "num_warps=4", "num_warps=8"),
        ("registry.py", '"block": block', '"block": 2 * block'),
    ],
    ids=["kernel", "device function", "constant", "launch", "config"],
)
def test_what_decides_bits_makes_evidence_old(folder, file, old, new):
    write_evidence(folder)

    replaced(folder / file, old, new)

    assert judged(folder)["double 64"] == ("fail", "changed since its evidence (gpu.json)")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Double."""', '"""Return twice x."""'),
        ("    place = ", "    # A comment.\n\n    place = "),
        ("return FACTOR * x", "return (FACTOR *\n            x)"),
        ("tl.store(y_ptr + i, tl.load(x_ptr + i))", "tl.store(y_ptr + i, 0.0)"),
    ],
    ids=["docstring", "comment", "format", "another kernel"],
)
def test_what_decides_no_bits_keeps_evidence(folder, old, new):
    write_evidence(folder)

    replaced(folder / "kernels.py", old, new)

    assert judged(folder)["double 64"][0] == "pass"


def test_a_constant_of_another_file_belongs_to_a_kernel(folder):
    before = Sources(folder).fingerprint((COPY,), {})

    (folder / "shapes.py").write_text("STRIP = 128\n")

    assert Sources(folder).fingerprint((COPY,), {}) != before


def test_a_kernel_in_no_variant_fails_until_it_is_owed(folder):
    replaced(
        folder / "kernels.py",
        "def double(",
        "@triton.jit\ndef _new_kernel(x):\n    pass\n\n\ndef double(",
    )
    write_evidence(folder)

    assert judged(folder)["kernels.py:_new_kernel"] == (
        "fail",
        "a @triton.jit function in no variant",
    )

    owe(folder, "written today")
    assert judged(folder)["kernels.py:_new_kernel"] == (
        "not_run",
        "a @triton.jit function in no variant; owed: written today",
    )


def test_only_decorators_of_triton_make_a_kernel(folder):
    (folder / "other.py").write_text("import numba\n\n@numba.jit\ndef f(x):\n    return x\n")

    assert not any(kernel.startswith("other.py") for kernel in Sources(folder).kernels)


def test_a_debt_that_is_paid_or_names_nothing_fails(folder):
    write_evidence(folder)
    debts = {"later": {"double 64": "1234", "kernels.py:_gone_kernel": "1234"}}
    (folder / "evidence" / "debts.json").write_text(json.dumps(debts))

    found = judged(folder)

    what = "listed as debt, but it"
    assert found["double 64"] == ("fail", f"{what} does not lack evidence: --owe drops it")
    assert found["kernels.py:_gone_kernel"][1] == f"{what} does not exist: --owe drops it"


def test_a_debt_is_of_a_variant_as_it_was(folder):
    owe(folder, "no GPU")
    assert judged(folder)["double 64"] == ("not_run", "no evidence; owed: no GPU")

    replaced(folder / "kernels.py", "FACTOR * x", "x * FACTOR")

    note = "no evidence; changed since it was listed as debt (no GPU): list it again with --owe"
    assert judged(folder)["double 64"] == ("fail", note)
    owe(folder, "no GPU yet")
    assert judged(folder)["double 64"] == ("not_run", "no evidence; owed: no GPU yet")


def test_a_race_is_not_excused_by_a_debt(folder):
    owe(folder, "later")
    write_evidence(folder, double_64={"different": {"load": 3}, "note": "result 0, byte 4"})
    results = coverage(load(folder / "registry.py", planted())).results

    race = "raced on gpu G: 3 of 48 load replays differ; result 0, byte 4"
    assert ("fail", race) in [(r.verdict, r.note) for r in results if r.case == "double 64"]
    owe(folder, "later")
    assert not (folder / "evidence" / "debts.json").exists()


def test_a_variant_that_did_not_run_has_no_evidence(folder):
    write_evidence(folder, double_64={"replays": {}, "different": {}, "note": "RuntimeError: no"})

    assert judged(folder)["double 64"] == ("fail", "not replayed on gpu G: RuntimeError: no")


@pytest.mark.parametrize("tree", ["1a2b3c-dirty", ""])
def test_evidence_of_a_dirty_tree_fails(folder, tree):
    write_evidence(folder, tree=tree)

    found = judged(folder)

    assert found["gpu.json"][0] == "fail"
    assert "dirty tree" in found["gpu.json"][1]
    assert found["double 64"] == ("fail", "no evidence but that of gpu.json")


def test_a_later_run_stands_in_for_replays_that_broke(folder):
    broken = {"replays": {"load": 48}, "different": {"load": 0}, "note": "graph: RuntimeError: no"}
    write_evidence(folder, name="a.json", double_64=broken)

    assert judged(folder)["double 64"] == (
        "fail",
        "only 48 load replays on gpu G: graph: RuntimeError: no",
    )

    write_evidence(folder, name="b.json")

    assert judged(folder)["double 64"][0] == "pass"


def test_a_later_run_does_not_stand_in_for_a_race(folder):
    write_evidence(folder, name="a.json", double_64={"different": {"load": 3}, "note": "result 0"})
    write_evidence(folder, name="b.json")

    assert judged(folder)["double 64"][1].startswith("raced on gpu G: 3 of 48 load replays differ")


def test_runs_of_one_file_are_joined(folder):
    write_evidence(folder, double_64={"different": {"load": 3}, "note": "result 0"})
    known = read(folder / "evidence" / "gpu.json")
    write_evidence(folder, planted={"different": {"load": 5, "memory": 1}})
    made = read(folder / "evidence" / "gpu.json")
    del made.variants["double 128"]

    found = joined(known, made, ["planted"])

    assert found.variants["double 64"].raced
    assert found.variants["double 128"] == known.variants["double 128"]
    assert found.variants["planted"].different == {"load": 5, "memory": 1}
    assert found.seconds == known.seconds + made.seconds


def test_evidence_that_saw_no_planted_fault_fails(folder):
    write_evidence(folder, planted={"different": {"load": 5, "memory": 0}})

    assert judged(folder)["gpu.json"] == ("fail", "its replays (memory) did not see planted")


def test_other_evidence_stands_in(folder):
    write_evidence(folder, name="a.json")
    write_evidence(folder, name="b.json", tree="x-dirty")

    assert judged(folder)["double 64"][0] == "pass"


def test_owe_lists_what_lacks_evidence_and_drops_what_is_paid(folder, capsys):
    command = ["check", "determinism", "--registry", str(folder / "registry.py")]

    assert main(command) == 1
    assert main([*command, "--owe", "no GPU yet"]) == 0
    debts = json.loads((folder / "evidence" / "debts.json").read_text())
    assert {reason: list(names) for reason, names in debts.items()} == {
        "no GPU yet": ["double 128", "double 64"]
    }
    assert main(command) == 3
    write_evidence(folder)
    assert main(command) == 1
    assert main([*command, "--owe", "nothing"]) == 0
    assert not (folder / "evidence" / "debts.json").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "owed: double 64" in said
    assert "paid: double 64" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "have a function variants()"),
        ("def variants(): return []", "yield at least one"),
        ("def variants(): return [1]", "yield Variants"),
        ("def variants(): return 1 / 0", "ZeroDivisionError"),
        ("def variants(:", "does not load: SyntaxError"),
        (REGISTRY.replace("_double_kernel", "_gone_kernel"), "no @triton.jit function"),
        (REGISTRY.replace('seen_by=["memory"],', ""), "seen_by"),
        (REGISTRY.replace('f"double {block}"', '"double"'), "be unique"),
        (REGISTRY.replace('{"block": block}', '{"block": {block}}'), "is not JSON"),
    ],
)
def test_registries_that_cannot_be_used_are_refused(folder, capsys, text, message):
    (folder / "registry.py").write_text(text)

    code = main(["check", "determinism", "--registry", str(folder / "registry.py")])

    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--registry", "nowhere.py"], "--registry must be a Python file"),
        (["--out", "x.json"], "--out must come with --replay"),
        (["--owed"], "--owed must come with --replay"),
        (["--replay"], "--replay must come with --out"),
        (["--owe", " "], "--owe must give the reason"),
        (["--replays", "0"], "--replays must be >= 1"),
        (["--replay", "--out", "x", "--only", "nothing"], "--only must name a variant"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(capsys, words, message):
    assert main(["check", "determinism", *words]) == 2
    assert message in capsys.readouterr().err


def test_every_kernel_of_ours_has_evidence_or_is_owed():
    """In a process of its own, without Triton, git or much time."""
    script = (
        "import sys, time, torch; sys.modules['triton'] = None; start = time.process_time();"
        "from samebits.cli import main; code = main(['check', 'determinism', '--json']);"
        "spent = time.process_time() - start;"
        "sys.exit(f'{spent} s of a core' if spent > 5 else code)"
    )
    environment = env.for_child(PYTHONPATH=str(SOURCE), PATH="")
    command = [sys.executable, "-c", script]

    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    found = [json.loads(line) for line in run.stdout.splitlines()]
    failed = [r for r in found if r["verdict"] == "fail"]
    assert [f"{r['backend']} {r['case']}: {r['note']}" for r in failed] == []
    assert run.returncode in (0, 3), run.stderr
    assert any(r["case"].startswith("fused bf16 plain") for r in found)


@pytest.mark.parametrize("text", ["[", "{}", '{"check": "parity", "format": 1}'])
def test_files_that_are_no_evidence_are_refused(folder, text):
    (folder / "evidence").mkdir()
    (folder / "evidence" / "gpu.json").write_text(text)

    with pytest.raises(RegistryError, match=r"gpu\.json"):
        coverage(load(folder / "registry.py", planted()))


@pytest.mark.parametrize("text", ["[]", '{"kernels.py:_double_kernel": "later"}', '{" ": {}}', "{"])
def test_files_that_are_no_debts_are_refused(folder, capsys, text):
    (folder / "evidence").mkdir()
    (folder / "evidence" / "debts.json").write_text(text)

    code = main(["check", "determinism", "--registry", str(folder / "registry.py")])

    assert code == 2
    assert "debts.json" in capsys.readouterr().err
