"""./run makes its environment once, says what it needs, and passes arguments on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from samebits import env

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
# Stands for a Python: notes its arguments, fails where $FAILING occurs in them, makes environments
# that hold itself.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" | tr '\\n' ' ' >>"$NOTES"; echo >>"$NOTES"
[ -z "$FAILING" ] || case $* in *"$FAILING"*) exit 1 ;; esac
case $* in
  --version) echo Python 3.9.1 ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"getsitepackages()[0]"*) pwd ;;
esac
"""


class Checkout:
    """A copy of ./run in an empty folder, with a Python that only notes what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        for name in ("run", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(self, *words: str, failing: str = "", **variables: str) -> tuple[int, str, list[str]]:
        """Return the exit code, stderr, and what the Python was asked."""
        self.notes.write_text("")
        chosen = {"TORCH": None, "TRITON": None, "TRANSFORMERS": None, "PYTHON": str(self.python)}
        environment = env.for_child(
            **{**chosen, "NOTES": str(self.notes), "FAILING": failing, **variables}
        )
        command = ["bash", str(self.folder / "run"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        asked = [line.rstrip() for line in self.notes.read_text().splitlines()]
        return done.returncode, done.stderr, asked


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def _installs(asked: list[str]) -> list[str]:
    return [line for line in asked if "pip install" in line]


@pytest.mark.parametrize("words", [[], ["--system"]])
def test_no_command_is_a_usage_error(checkout: Checkout, words: list[str]) -> None:
    code, _, asked = checkout.run(*words)

    assert (code, asked) == (2, [])


def test_a_python_that_is_not_there_is_one_line(checkout: Checkout) -> None:
    code, err, _ = checkout.run("test", PYTHON="python0")

    assert code == 2
    assert err == "run: no python0 here; set PYTHON to a Python >= 3.11\n"


def test_a_python_that_does_not_start_is_one_line(checkout: Checkout) -> None:
    code, err, _ = checkout.run("test", failing="-c pass")

    assert code == 2
    assert err == f"run: {checkout.python} does not start; set PYTHON to a Python >= 3.11\n"


@pytest.mark.parametrize("options", [[], ["--system"]])
def test_an_old_python_is_one_line(checkout: Checkout, options: list[str]) -> None:
    code, err, _ = checkout.run("test", *options, failing="version_info")

    assert code == 2
    assert err.startswith("run: Python 3.9.1 is too old; set PYTHON to a Python >= 3.11")
    assert err.count("\n") == 1


def test_a_missing_venv_module_is_one_line(checkout: Checkout) -> None:
    code, err, _ = checkout.run("test", failing="import venv")

    assert code == 2
    assert "has no venv module; install it" in err
    assert err.count("\n") == 1


def test_an_environment_without_torch_says_the_size_first(checkout: Checkout) -> None:
    _, err, asked = checkout.run("env", failing="import sys, torch")

    assert "torch==2.13.0 is a download of 0.2 GB" in err
    assert "-m venv .venv" in asked
    (install,) = _installs(asked)
    assert "torch==2.13.0" in install
    assert "triton==3.7.1" in install


def test_a_torch_that_is_there_is_used(checkout: Checkout) -> None:
    _, err, asked = checkout.run("env")

    assert "making .venv around the torch" in err
    assert "-m venv --system-site-packages .venv" in asked
    (install,) = _installs(asked)
    assert "torch" not in install
    assert "triton" not in install


def test_the_environment_is_made_once_and_anew_for_other_versions(checkout: Checkout) -> None:
    _, _, first = checkout.run("env")
    _, _, again = checkout.run("env")
    _, _, other = checkout.run("env", TRANSFORMERS="transformers==5.17.0")

    assert [len(_installs(asked)) for asked in (first, again, other)] == [1, 0, 1]
    assert "transformers==5.17.0" in _installs(other)[0]


def test_an_environment_that_failed_is_made_anew(checkout: Checkout) -> None:
    code, _, _ = checkout.run("env", failing="pip install")
    _, _, again = checkout.run("env")

    assert code != 0
    assert len(_installs(again)) == 1


@pytest.mark.parametrize("place", [0, 2, 4])
def test_system_asks_the_current_python_alone(checkout: Checkout, place: int) -> None:
    words = ["check", "parity", "--case", "swiglu"]

    code, _, asked = checkout.run(*words[:place], "--system", *words[place:])

    assert code == 0
    assert asked[-1] == "-m samebits check parity --case swiglu"
    assert all(line.startswith("-c ") for line in asked[:-1])
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["test", "-k", "a b"], "-m pytest -m not gpu and not slow -k a b"),
        (["gpu-test"], "-m pytest -m gpu"),
        (["bench", "--op", "permute"], "benchmarks/run.py --op permute"),
        (["demo"], "-m samebits demo"),
    ],
)
def test_commands(checkout: Checkout, words: list[str], expected: str) -> None:
    _, _, asked = checkout.run(*words, "--system")

    assert asked[-1] == expected


def test_lint_runs_every_rule_and_names_those_that_failed(checkout: Checkout) -> None:
    code, err, asked = checkout.run("lint", "--system", failing="-m mypy")

    assert code == 2
    assert "lint failed: types" in err
    assert asked[-1] == "scripts/lint_house.py"
