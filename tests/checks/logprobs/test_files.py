"""Recordings in files: every form, every kind of bad input, exit codes, the picture."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from samebits import cli
from samebits.checks.logprobs import read

pytestmark = pytest.mark.reference

GOOD = [[-0.5, -1.25, -0.125], [-2.0, -0.25]]


def _write(path: Path, log_probs: object = GOOD, **columns: list[object]) -> Path:
    assert isinstance(log_probs, list)
    rows = [
        {"log_probs": values, **{name: column[i] for name, column in columns.items()}}
        for i, values in enumerate(log_probs)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _check(*words: object) -> int:
    return cli.main(["check", "logprobs", *map(str, words)])


def test_two_files_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _write(tmp_path / "a.jsonl"), _write(tmp_path / "b.jsonl")

    assert _check(a, b, "--control", a, "--json") == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["gap", "control", "masking", "shift", "temperature"]
    assert rows[0]["verdict"] == "pass"
    assert rows[0]["problem"] == "a.jsonl"


def test_sequences_are_matched_by_id(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.jsonl", id=["x", "y"])
    b = _write(tmp_path / "b.jsonl", GOOD[::-1], id=["y", "x"])

    assert _check(a, b, "--allow", 0) == 0


def test_a_gap_fails(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.jsonl")
    b = _write(tmp_path / "b.jsonl", [[-0.75, -1.25, -0.125], [-2.0, -0.25]])

    assert _check(a, b) == 1
    assert _check(a, b, "--allow", 0.05) == 0


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    values = torch.tensor([[-0.5, -1.0, 0.0], [-2.0, -0.25, -3.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.uint8)
    path = tmp_path / "a.safetensors"
    safetensors.save_file({"log_probs": values, "mask": mask}, path)

    found = read(path)

    assert [v.tolist() for v in found.log_probs] == values.tolist()
    assert found.mask(0).tolist() == [True, True, False]
    assert _check(path, path) == 0


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".parquet"])
def test_arrow(tmp_path: Path, suffix: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import feather, parquet

    table = pa.table({"logprobs": GOOD, "id": ["x", "y"]})
    path = tmp_path / f"a{suffix}"
    (parquet.write_table if suffix == ".parquet" else feather.write_feather)(table, path)

    found = read(path)

    assert [v.tolist() for v in found.log_probs] == GOOD
    assert found.ids == ["x", "y"]


def test_another_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = tmp_path / "a.jsonl"
    a.write_text('{"scores": [-1.0, -2.0]}\n')

    assert _check(a, a, "--key", "scores") == 0
    assert _check(a, a) == 2
    assert "must hold log_probs or logprobs (--key names another), got scores" in _error(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold at least one line, got none"),
        ("\n\n", "must hold at least one line, got none"),
        ("{", "must be one JSON object"),
        ("[1]\n", "must be one JSON object, got list"),
        ("[" * 100_000, "must be one JSON object"),
        ("{}\n", "must hold log_probs or logprobs"),
        ('{"log_probs": 3}\n', "must be one sequence of numbers, got ()"),
        ('{"log_probs": ["x"]}\n', "must be a list of numbers"),
        ('{"log_probs": [[-1.0]]}\n', "must be one sequence of numbers, got (1, 1)"),
        ('{"log_probs": [-1.0, NaN]}\n', "sequence 0, token 1 must be finite"),
        ('{"log_probs": [null, -1.0]}\n', "sequence 0, token 0 must be finite"),
        ('{"log_probs": [-Infinity]}\n', "sequence 0, token 0 must be finite"),
        ('{"log_probs": [0.25, 0.5]}\n', "must be at most 0 (are these probabilities?), got 0.25"),
        ('{"log_probs": [-1.0], "mask": [1, 1]}\n', "must have as many masks as log-probs (1)"),
        ('{"log_probs": [-1.0], "mask": [0]}\n', "no token counts in both"),
        ('{"log_probs": [-1.0], "id": "q"}\n{"log_probs": [-1.0], "id": "q"}\n', "'q' twice"),
        ('{"log_probs": []}\n', "no token counts in both"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)

    assert _check(path, path) == 2
    assert message in _error(capsys)


def test_files_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = _write(tmp_path / "a.jsonl")
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")

    for path in (tmp_path / "absent.jsonl", tmp_path, tmp_path / "a.txt", binary):
        assert _check(good, path) == 2
        assert "samebits check logprobs: " in _error(capsys)


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet", ".arrow"])
def test_binary_files_of_another_form_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    package = "safetensors" if suffix == ".safetensors" else "pyarrow"
    path = tmp_path / f"a{suffix}"
    path.write_text("no such form")

    expected = 2 if find_spec(package) else 3
    assert _check(path, path) == expected
    assert "must be a" in _error(capsys) if expected == 2 else True
    assert _check(tmp_path / f"absent{suffix}", path) == expected


@pytest.mark.parametrize(
    ("log_probs", "columns", "message"),
    [
        ([GOOD[0]], {}, "must hold as many sequences as a.jsonl (2), got 1"),
        ([GOOD[0], [-2.0]], {}, "got 1; one of them may lack the first or the last token"),
        (GOOD, {"tokens": [[5, 6, 7], [8, 9]]}, "must have the tokens of a.jsonl (1 at 0), got 5"),
        (GOOD, {"tokens": [[2, 3, 9], [4, 5]]}, "they are the same one position apart"),
        (GOOD, {"id": ["p", "z"]}, "must hold the sequences of a.jsonl, got none named 'q'"),
    ],
)
def test_recordings_of_other_tokens_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    log_probs: list[object],
    columns: dict[str, list[object]],
    message: str,
) -> None:
    a = _write(tmp_path / "a.jsonl", tokens=[[1, 2, 3], [4, 5]], id=["p", "q"])
    b = _write(tmp_path / "b.jsonl", log_probs, **columns)

    assert _check(a, b) == 2
    assert message in _error(capsys)


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _write(tmp_path / "a.jsonl")
    picture = tmp_path / "gap.svg"

    if find_spec("matplotlib") is None:
        assert _check(a, a, "--plot", picture) == 3
        assert "samebits[check]" in _error(capsys)
        return
    assert _check(a, a, "--plot", picture) == 0
    assert "<svg" in picture.read_text()
    assert _check(a, a, "--plot", tmp_path / "gap.xyz") == 2
    assert _check(a, a, "--plot", tmp_path / "no folder" / "gap.svg") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "gap.svg"]


def test_a_process_that_only_reads_text_needs_no_other_package(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.jsonl")
    code = (
        "import sys; from samebits import cli; "
        f"code = cli.main(['check', 'logprobs', {str(a)!r}, {str(a)!r}]); "
        "sys.exit(code or len({'numpy', 'matplotlib', 'safetensors', 'transformers'} "
        "& set(sys.modules) - LOADED))"
    )
    code = "import sys, torch; LOADED = set(sys.modules)\n" + code

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_mark_of_the_encoding_is_no_content(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.jsonl")
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + a.read_bytes())

    assert _check(a, marked) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"mask": [[1, 2, 0], [1, 1]]}, "mask[0] must hold 0 and 1 alone, got 2.0"),
        ({"mask": [[1, 0.5, 0], [1, 1]]}, "mask[0] must hold 0 and 1 alone, got 0.5"),
        ({"tokens": [[1, 2, 3], [1.5, 1]]}, "tokens[1] must hold whole numbers, got 1.5"),
    ],
)
def test_what_is_no_mask_and_no_token_is_refused(tmp_path: Path, capsys, columns, message) -> None:
    a = _write(tmp_path / "a.jsonl", **columns)

    assert _check(a, a) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws")
@pytest.mark.parametrize("name", ["picture", "gap.xyz", "gap.html"])
def test_a_picture_says_its_form(tmp_path: Path, capsys, name) -> None:
    a = _write(tmp_path / "a.jsonl")

    assert _check(a, a, "--plot", tmp_path / name) == 2
    assert f"--plot must end in .svg, .png, .pdf, got {name!r}" in capsys.readouterr().err
