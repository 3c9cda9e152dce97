"""A layer under FSDP2 on two processes: the gradients of data-parallel training, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).parent / "fully_sharded.py"


def test_gradients_are_the_mean_of_both_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}  # noqa: TID251
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]

    for rank in ranks:
        out, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
        assert out == ""
