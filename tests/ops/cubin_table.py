"""The table that a script ``cubins_<op>.py`` prints, and the one that is recorded beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Shared memory that a block may use on every target (sm_86, sm_89 and sm_120 have least).
SHARED = 99 * 1024

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
