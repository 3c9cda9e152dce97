"""The examples that judge themselves, in a short form."""

import subprocess
import sys
from pathlib import Path

import pytest

from samebits import env

pytestmark = pytest.mark.reference

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_fine_tuning_has_the_loss_curve_of_eager() -> None:
    script = str(EXAMPLES / "finetune.py")
    words = [sys.executable, script, "--steps", "4", "--seeds", "2", "--pretrain", "60"]

    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=env.for_child(OMP_NUM_THREADS="1")
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert float(rows["samebits"][3]) < 1e-4 < 1e-1 < float(rows["control"][3])
    assert rows["samebits"][-1] == "MiB"
    assert "the loss curve is eager's" in done.stdout


def test_a_spread_needs_two_seeds() -> None:
    words = [sys.executable, str(EXAMPLES / "finetune.py"), "--seeds", "1"]

    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env.for_child())

    assert done.returncode == 2
    assert "a spread needs at least 2 seeds" in done.stderr
