"""`samebits explain`: reasons, and what to do instead."""

import sys
from pathlib import Path

import pytest

from samebits import cli
from samebits.backends import BACKENDS
from samebits.checks.explain import alternatives
from samebits.testing.cases import CASES, MODELS, QUANTIZED

pytestmark = pytest.mark.reference


def test_one_case_has_the_reason_and_the_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--case", "fp64", "--device", "sm_90"]) == 0

    out = capsys.readouterr().out
    assert "its kernels compute bf16, fp16 and fp32" in out
    assert "fused instead: in bf16" in out
    assert 'backend="auto" takes reference' in out


def test_an_alternative_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [
        (name, backend)
        for name, problem in CASES.items()
        for backend, module in BACKENDS.items()
        if module.why_not(problem) is not None
    ]
    assert refused

    for name, backend in refused:
        proposed = list(alternatives(CASES[name], backend))
        assert not any(
            longer.startswith(f"{shorter} ") for shorter in proposed for longer in proposed
        )


def test_every_case_has_a_line_and_every_refusal_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["explain", "--device", "cpu"]) == 0

    out, err = capsys.readouterr()
    lines = out.splitlines()
    names = [*CASES, *QUANTIZED, *MODELS]
    assert [line.split()[0] for line in lines[1 : 1 + len(names)]] == names
    assert "(1) it needs an NVIDIA GPU, not cpu" in lines
    assert err.startswith("hint: ")


def test_a_problem_is_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "H=64 F=96 E=8 K=2 dtype=bf16 activation=silu(limit=7.0)"

    assert cli.main(["explain", "--problem", text]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--problem", "H=64 Q=1"], "unknown problem field 'Q'"),
        (["--problem", "H=0 F=1 E=1 K=1 dtype=bf16"], "H must be >= 1, got 0"),
        (["--model", "no/such/folder"], "the folder must hold a config.json, got no/such/folder"),
        (["--case", "bogus"], "invalid choice: 'bogus'"),
        (["--device", "zzz"], "device must be 'cpu', the architecture of an NVIDIA GPU, such as"),
        (["--case", "swiglu", "--device", "cuda"], "or a device type of torch, got 'cuda'"),
        (["--problem", "H=64"], "the problem must state F, E, K, dtype, got 'H=64'"),
    ],
)
def test_usage_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *words]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_model_without_transformers_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert cli.main(["explain", "--model", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("not_run: ")
