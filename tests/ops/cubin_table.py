"""The table that a script ``cubins_<op>.py`` prints, and the one that is recorded beside it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Shared memory that a block may use on every target (sm_86, sm_89 and sm_120 have least).
SHARED = 99 * 1024
SHARED_SM_90 = 227 * 1024

# Case -> target -> [registers, stack, shared, vector].
Table = dict[str, dict[str, list[int]]]


def compile_table(script: Path, *cases: str) -> Table:
    """Compile cases (all) in a process that has not imported the kernels for the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # noqa: TID251
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script), *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled: Table = json.loads(done.stdout)
    return compiled


def recorded(script: Path) -> Table:
    """Return the record of this Triton version; empty where there is none."""
    triton = pytest.importorskip("triton")
    tables: dict[str, Table] = json.loads(script.with_suffix(".json").read_text())
    return tables.get(triton.__version__, {})


def known_and_compiled(script: Path, cases: Iterable[str], again: Iterable[str]) -> Table:
    """Return the table of ``cases``: ``again`` and what the record lacks compiled, the rest as it
    stands in the record, which ``python <script> --record`` makes.
    """
    known, cases = recorded(script), list(cases)
    missing = [case for case in cases if case not in known]
    found = known | compile_table(script, *{*again, *missing})
    return {case: found[case] for case in cases}


def assert_as_recorded(script: Path, table: Table, again: Iterable[str]) -> None:
    """Compare what was compiled anew with the record, where it has the case."""
    known = recorded(script)
    compiled = {case: table[case] for case in again}
    assert {case: known.get(case, found) for case, found in compiled.items()} == compiled
