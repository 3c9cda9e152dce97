"""Every module of benchmarks imports without a GPU, and every script says how it is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from samebits import env

# They hold Triton's kernels.
pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "benchmarks"
_PROGRAM = """
import importlib, runpy, sys
from pathlib import Path

for path in map(Path, sys.argv[1:]):
    if "__main__" not in path.read_text():
        importlib.import_module(path.stem)
        continue
    sys.argv = [path.name, "--help"]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        assert not end.code, path.name
        print("called", path.name)
"""


def test_scripts_say_how_they_are_called() -> None:
    paths = sorted(BENCH.glob("*.py"))
    scripts = [path.name for path in paths if "__main__" in path.read_text()]

    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        env=env.for_child(PYTHONPATH=f"{ROOT / 'src'}:{BENCH}", TRITON_INTERPRET="0"),
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("called ")] == scripts
    assert sum(line.startswith("usage: ") for line in lines) == len(scripts)
