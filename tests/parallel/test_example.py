import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

EXAMPLE = Path(__file__).parents[2] / "examples/ep_train.py"


def test_the_example_proves_its_claim() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "2"], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "outputs and gradients have the bits of one rank"
