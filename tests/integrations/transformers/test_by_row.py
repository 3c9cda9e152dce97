"""`check invariance transformers/NAME`: an implementation as a function of rows."""

import json

import pytest

from samebits.cli import main

pytestmark = pytest.mark.reference

SMALL = ["--problem", "H=16 F=24 E=4 K=2 dtype=fp32", "--tokens", "1,2,9"]


@pytest.mark.parametrize("words", [[], ["--model", "gpt_oss.GptOssExperts"]])
def test_an_implementation_is_judged(words, capsys):
    assert main(["check", "invariance", "transformers/eager", *SMALL, *words, "--json"]) in (0, 1)

    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["case"] for result in found] == ["repeat", "T", "position", "neighbours"]
    assert found[0]["verdict"] == "pass"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("nobody", [], "unknown implementation 'nobody'"),
        ("eager", ["--model", "nobody"], "--model must name a model"),
        ("eager", ["--model", "gemma2"], "name an experts class (none)"),
        ("eager", ["--model", "mixtral.Nobody"], "name an experts class (mixtral.MixtralExperts)"),
        ("eager", ["--problem", "H=8 F=8 E=2 K=1 dtype=bf16 N=4"], "sizes and dtype alone"),
    ],
)
def test_bad_input_is_refused(name, words, message, capsys):
    assert main(["check", "invariance", f"transformers/{name}", *words]) == 2
    assert message in capsys.readouterr().err
