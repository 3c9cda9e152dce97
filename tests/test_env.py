"""The environment as the package sees it."""

import pytest
import torch

from samebits import env
from samebits._version import __version__

pytestmark = pytest.mark.reference


def test_variables_are_the_known_ones_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)

    found = env.variables()

    assert found["NVIDIA_TF32_OVERRIDE"] == "0"
    assert found.keys() <= env.VARIABLES.keys()
    assert "NO_COLOR" not in found


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("", False)])
def test_no_color_is_set_by_any_text(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", value)

    assert env.no_color() is expected


def test_for_child_changes_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOES", "1")
    monkeypatch.setenv("STAYS", "1")

    child = env.for_child(GOES=None, COMES="2")

    assert child["STAYS"] == "1"
    assert child["COMES"] == "2"
    assert "GOES" not in child


def test_versions_tell_what_is_absent() -> None:
    versions = env.versions()

    assert versions["samebits"] == __version__
    assert versions["torch"] == torch.__version__
    assert env.version_of("no-such-package") is None


def test_bits_key_holds_all_that_bits_are_promised_for() -> None:
    fields = dict(part.split("=") for part in env.bits_key().split(" "))

    assert list(fields) == ["samebits", "torch", "triton", "device"]
    assert all(fields.values())


def test_bits_key_on_cpu_depends_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = env.bits_key()

    monkeypatch.setattr(torch, "get_num_threads", lambda: 777)

    assert env.bits_key() == before.replace(
        f"{before.rpartition('-')[0].rpartition('-')[2]}-threads", "777-threads"
    )
    assert "777-threads" in env.bits_key()


def test_architecture_names_devices_as_problems_do() -> None:
    assert env.architecture(torch.device("cpu")) == "cpu"
    assert env.architecture(torch.device("meta")) == "meta"
