"""The safety nets of the suite catch what they are for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.reference

TAKEN = [
    "torch.empty(3)",
    "torch.empty_like(x)",
    "x.new_empty(3)",
    "torch.empty_strided((3,), (1,))",
]


@pytest.mark.parametrize("take", TAKEN)
def test_memory_that_the_package_takes_is_nan(take: str) -> None:
    package = {"__name__": "samebits.somewhere", "torch": torch, "x": torch.ones(3)}

    memory = eval(take, package)

    assert memory.isnan().all()


def test_a_default_device_is_still_seen() -> None:
    with torch.device("meta"):
        assert torch.empty(3).device.type == "meta"


def test_integers_and_memory_of_others_are_left_alone() -> None:
    package = {"__name__": "samebits.somewhere", "torch": torch}

    assert eval("torch.empty(3, dtype=torch.int32)", package).dtype == torch.int32
    assert not torch.empty(3, out=torch.ones(3)).isnan().any()


def test_a_test_without_exactly_one_tier_is_refused(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_tiers.py").write_text(
        "import pytest\n"
        "def test_none(): pass\n"
        "@pytest.mark.gpu\n@pytest.mark.reference\ndef test_two(): pass\n"
        "@pytest.mark.reference\ndef test_one(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_tiers.py::test_none: none" in done.stderr
    assert "test_tiers.py::test_two: gpu, reference" in done.stderr
    assert "test_one" not in done.stderr


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_skips.py").write_text(
        "import pytest\npytestmark = pytest.mark.reference\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "@pytest.mark.skip(reason='no such device')\ndef test_skipped(n): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "    3 no such device" in done.stdout.splitlines()
