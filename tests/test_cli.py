"""The command line: what it prints where, its exit codes, and what a command imports."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from samebits import cli, env
from samebits._version import __version__
from samebits.checks import CHECKS

pytestmark = pytest.mark.reference


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert "the following arguments are required: COMMAND" in err


def test_an_unknown_check_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "speed"]) == 2

    err = capsys.readouterr().err
    assert all(name in err for name in CHECKS)


@pytest.mark.parametrize("words", [[], ["check"], ["explain"], ["env"], ["check", "parity"]])
def test_help_starts_with_the_question_and_exits_0(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--help"]) == 0

    out = capsys.readouterr().out
    assert out.startswith(f"usage: {' '.join(['samebits', *words])}")
    assert "?" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", name, "--help"]) == 0
    assert "exit codes: 0 all passed" in capsys.readouterr().out


def test_a_command_imports_neither_frameworks_nor_other_checks() -> None:
    program = (
        "import sys; from samebits.cli import main; main(['env', '--bits-key']);"
        "main(['check', 'parity', '--help']);"
        "print([m for m in sys.modules if m in ('transformers', 'rich', 'triton')"
        " or m.startswith(('samebits.checks.models', 'samebits.checks.compile'))])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env.for_child(PYTHONPATH=":".join(filter(None, sys.path))),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "unbuffered", "code"),
    [
        # All was written to the buffer: the verdict is known.
        (["env", "--json"], "", 0),
        # Python wrote at once: the command stopped before it came to a verdict.
        (["env", "--json"], "1", 141),
    ],
)
def test_a_reader_that_closes_the_pipe_gets_no_noise(
    words: list[str], unbuffered: str, code: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [sys.executable, "-m", "samebits", *words],
        env=env.for_child(PYTHONPATH=":".join(filter(None, sys.path)), PYTHONUNBUFFERED=unbuffered),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)

    assert (done.returncode, done.stderr) == (code, "")


def test_foreign_code_that_exits_passes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(arguments: argparse.Namespace) -> int:
        raise SystemExit(0)

    monkeypatch.setattr(cli, "_env", leave)

    assert cli.main(["env"]) == 2
    assert "sys.exit(0) ended the command" in capsys.readouterr().err


def test_env_prints_the_bits_key_and_the_variables_in_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")

    assert cli.main(["env"]) == 0
    listing = capsys.readouterr().out
    assert cli.main(["env", "--bits-key"]) == 0
    key = capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)

    assert key == f"{env.bits_key()}\n"
    assert key in listing
    assert "TRITON_CACHE_DIR=/somewhere" in listing
    assert described["bits_key"] == env.bits_key()
    assert described["variables"]["TRITON_CACHE_DIR"] == "/somewhere"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m samebits check parity --help | head -1; echo ${{PIPESTATUS[0]}}"

    done = subprocess.run(
        ["bash", "-c", command],
        env=env.for_child(PYTHONPATH=":".join(filter(None, sys.path))),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""
