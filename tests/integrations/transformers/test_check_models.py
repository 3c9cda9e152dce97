"""`samebits check models` on the installed transformers, through the command line."""

import json

import pytest
from models_schema import SCHEMA, breaches

from samebits import cli
from samebits.integrations.transformers import zoo
from samebits.integrations.transformers.interface import load

pytestmark = pytest.mark.reference

COMMAND = ["check", "models"]


def test_gpt_oss_by_sonicmoe_and_by_ours(capsys):
    chosen = ["--model", "gpt_oss", "--implementation", "sonicmoe", "--implementation", "samebits"]
    assert cli.main([*COMMAND, "--json", *chosen]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [b for f in found for b in breaches(f, SCHEMA)] == []
    failed = {(f["implementation"], f["evidence"]) for f in found if f["verdict"] == "fail"}
    assert failed == {("sonicmoe", "arguments")}
    cases = {f["case"] for f in found if f["implementation"] == "samebits"}
    assert cases == {
        "default", "odd", "dropped", "sensitivity:alpha", "sensitivity:limit",
        "language_model", "control",
    }  # fmt: skip
    (whole,) = [
        f
        for f in found
        if (f["case"], f["implementation"], f["dtype"]) == ("language_model", "sonicmoe", "bf16")
    ]
    assert whole["figures"]["mean"] > 0.5


def test_ours_alone_counts_where_asked(capsys):
    chosen = ["--model", "gpt_oss.GptOssExperts", "--fail-on", "samebits"]
    assert cli.main([*COMMAND, *chosen]) == 0
    assert "WRONG" in capsys.readouterr().out


@pytest.fixture
def drifted(monkeypatch):
    """A transformers whose decorator has another name."""
    monkeypatch.delattr(load().moe, "use_experts_implementation")
    zoo.decorated_code.cache_clear()
    yield
    zoo.decorated_code.cache_clear()


def test_another_interface_is_not_run_with_the_reason(drifted, capsys):
    assert cli.main(COMMAND) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "use_experts_implementation" in err
