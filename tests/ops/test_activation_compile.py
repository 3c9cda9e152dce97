"""The activation kernels as cubins for every architecture, built without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_activation.py")
RECORD = SCRIPT.with_suffix(".json")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Shared memory that a block may use on every target (sm_86, sm_89 and sm_120 have least).
SHARED = 99 * 1024

# Bytes of stack that are accepted, with the reason: a few registers over, in tiles chosen for
# speed on sm_90, where the same cubin has none.
ACCEPTED_STACK = {
    ("backward-clamped", "sm_100"): 8,
    ("backward-gpt-oss", "sm_100"): 16,
    ("backward-gpt-oss", "sm_120"): 8,
}

Table = dict[str, dict[str, list[int]]]


@pytest.fixture(scope="module")
def table() -> Table:
    """Compile everything in a process that has not imported the kernels for the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # noqa: TID251
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled: Table = json.loads(done.stdout)
    return compiled


def recorded() -> Table:
    triton = pytest.importorskip("triton")
    tables = json.loads(RECORD.read_text())
    known: Table = tables.get(triton.__version__, {})
    return known


def test_every_case_compiles_for_every_target(table: Table) -> None:
    assert all(tuple(targets) == TARGETS for targets in table.values())


def test_nothing_spills_and_shared_memory_fits_everywhere(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, vector) in targets.items():
            assert stack <= ACCEPTED_STACK.get((case, target), 0), (case, target)
            assert shared <= SHARED, (case, target)
            assert vector == 16, (case, target)


def test_resources_are_the_recorded_ones(table: Table) -> None:
    # A Triton version without a record has nothing to compare: --record adds it.
    known = recorded()

    assert {case: known.get(case, targets) for case, targets in table.items()} == table
