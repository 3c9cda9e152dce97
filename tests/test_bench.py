"""The bench runs on a CPU, its rows are complete, and its targets are ones it can measure."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from samebits import env
from samebits.testing.cases import MODELS

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "benchmarks"

pytestmark = pytest.mark.reference


@pytest.fixture
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "run.py"), *arguments]
    environment = env.for_child(PYTHONPATH=str(ROOT / "src"))
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_smoke_run_has_a_right_row_for_everything(tmp_path: Path) -> None:
    done = run_bench(
        "--device",
        "cpu",
        "--tiny",
        "--rounds",
        "1",
        "--shapes",
        "qwen3-30b",
        "--out",
        str(tmp_path),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["op"] for row in rows} == {p.stem for p in (BENCH / "ops").glob("[a-z]*.py")}
    assert {row["candidate"] for row in rows} == {
        "samebits", "eager", "compile", "megatron-style", "memcpy",
    }  # fmt: skip
    wrong = [row for row in rows if "ms" not in row]
    assert not wrong
    for key in (
        "config",
        "moved",
        "fraction",
        "torch",
        "gpu",
        "command",
        "source_hash",
        "problem",
        "kernels",
    ):
        assert all(key in row for row in rows), key


TARGET = {"name": "t", "op": "o", "where": {"T": [1, 2]}, "fraction_at_least": 0.5}
ROW = {"op": "o", "candidate": "samebits", "moved": 10_000_000, "ms": 1.0, "fraction": 0.6}


@pytest.mark.usefixtures("bench_path")
@pytest.mark.parametrize(
    ("target", "rows", "expected"),
    [
        ({}, [{"T": 1}, {"T": 2}], []),
        ({}, [{"T": 1}], ["t: o 2: no row"]),
        ({}, [{"T": 1, "candidate": "eager"}, {"T": 2}], ["t: o 1: no row"]),
        ({}, [{"T": 1}, {"T": 2, "fraction": 0.4}], ["t: o 2: 0.400 of the floor, 0.5 asked"]),
        ({"above_mb": 64}, [{"T": 1, "fraction": 0.1}, {"T": 2}], []),
        ({"up_to_mb": 10}, [{"T": 1, "fraction": 0.1}, {"T": 2}], ["t: o 1: 0.100"]),
        ({"ms_at_most": 0.9}, [{"T": 1}, {"T": 2, "ms": 0.8}], ["t: o 1: 1.0000 ms, 0.9 allowed"]),
        (
            {"speedup_at_least": 2.0, "peer": "p"},
            [
                {"T": 1}, {"T": 1, "candidate": "p", "ms": 2.5},
                {"T": 2}, {"T": 2, "candidate": "p", "ms": 1.5},
            ],
            ["t: o 2: 1.50x p, 2.0x asked"],
        ),
        (
            {"speedup_at_least": 2.0, "peer": "p"},
            [{"T": 1}, {"T": 2}],
            ["t: o 1: no row of p", "t: o 2: no row of p"],
        ),
        (
            {"speedup_at_least": 2.0, "peer": "p", "or_fraction": 0.6},
            [{"T": 1}, {"T": 2, "fraction": 0.5}, {"T": 2, "candidate": "p", "ms": 1.5}],
            ["t: o 2: 1.50x p"],
        ),
        (
            {"column": "c", "at_most": 2},
            [{"T": 1, "c": 2.5}, {"T": 2}],
            ["t: o 1: c 2.500", "t: o 2: no c"],
        ),
        (
            {"mean_fraction_at_least": 0.5},
            [{"T": 1, "fraction": 0.9}, {"T": 2, "fraction": 0.2}],
            ["t: 0.424 of the floor on average"],
        ),
        ({"mean_fraction_at_least": 0.4}, [{"T": 1, "fraction": 0.9}], ["t: o 2: no row"]),
    ],
)  # fmt: skip
def test_misses(target: dict[str, Any], rows: list[dict[str, Any]], expected: list[str]) -> None:
    import targets

    whole = TARGET | target
    if whole.keys() & {"ms_at_most", "speedup_at_least", "at_most", "mean_fraction_at_least"}:
        del whole["fraction_at_least"]

    found = targets.misses([whole], [ROW | row for row in rows])

    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


@pytest.mark.usefixtures("bench_path")
def test_a_wrong_result_is_a_miss() -> None:
    import targets

    rows = [{k: v for k, v in ROW.items() if k != "ms"} | {"T": t} for t in (1, 2)]

    assert targets.misses([TARGET], rows) == ["t: o 1: wrong result", "t: o 2: wrong result"]


@pytest.mark.usefixtures("bench_path")
@pytest.mark.parametrize(
    "text",
    [
        'name = "t"\nop = "o"\nfraction_at_least = 0.5\nspeed = 3',
        'name = "t"\nop = "o"',
        'name = "t"\nop = "o"\nfraction_at_least = 0.5\nms_at_most = 1.0',
        'name = "t"\nop = "o"\nspeedup_at_least = 2.0',
        'name = "t"\nop = "o"\nat_most = 2.0',
    ],
)
def test_targets_that_say_nothing_are_errors(tmp_path: Path, text: str) -> None:
    import targets

    path = tmp_path / "targets.toml"
    path.write_text(f"[[target]]\n{text}\n[target.where]\nT = [1]\n")

    with pytest.raises(ValueError, match="target 't'"):
        targets.read(path)


@pytest.mark.usefixtures("bench_path")
def test_every_target_has_its_cases() -> None:
    import importlib

    import targets
    from case import Options

    timed = {path.stem for path in (BENCH / "ops").glob("[a-z]*.py")}
    asked = [t for t in targets.read(BENCH / "targets.toml") if t["op"] in timed]
    peers = {target["peer"] for target in asked if "peer" in target}
    columns = ("op", "variant", "direction", "shape", "T", "moved")
    # Rows that meet everything: what is missed is missing.
    best = [{"candidate": "samebits", "ms": 1e-9, "fraction": 1.0}]
    best += [{"candidate": name, "ms": 1.0} for name in peers]
    rows = [
        {column: getattr(case, column) for column in columns} | row
        for op in {target["op"] for target in asked}
        for case in importlib.import_module(f"ops.{op}").cases(
            MODELS, Options((4096, 16384), "cpu", peers=False)
        )
        for row in best
    ]

    assert targets.misses(asked, rows) == []


def test_rows_can_be_held_to_targets_without_a_run(tmp_path: Path) -> None:
    rows, file = tmp_path / "rows.jsonl", tmp_path / "targets.toml"
    rows.write_text(
        json.dumps(ROW | {"T": 1, "variant": "v", "direction": "d", "shape": "s"}) + "\n"
    )
    text = '[[target]]\nname = "t"\nop = "o"\nfraction_at_least = {}\n[target.where]\nT = [1]\n'

    file.write_text(text.format(0.6))
    assert run_bench("--rows", str(rows), "--assert", str(file)).returncode == 0
    file.write_text(text.format(0.61))
    done = run_bench("--rows", str(rows), "--assert", str(file))

    assert done.returncode == 1
    assert "MISS t: o 1" in done.stdout


@pytest.mark.usefixtures("bench_path")
def test_files_of_the_layer_are_rows_too(tmp_path: Path) -> None:
    import stored_rows
    import targets

    cell = {"floor_ms": 1.0, "ms": {"fused": 1.25, "grouped": 2.0, "other": 1.5}}
    layer, training = tmp_path / "layer.json", tmp_path / "training.json"
    shapes = [(shape, tokens) for shape in MODELS for tokens in (1, 16, 64, 256, 1024, 4096, 16384)]
    cells = [{"shape": s, "T": t, "staged_ms": 1.25} | cell for s, t in shapes]
    own = {"gpt-oss-120b": "gpt-oss", "llama4-scout": "fc1_input"}
    cells += [c | {"variant": own[c["shape"]]} for c in cells if c["shape"] in own]
    layer.write_text(json.dumps({"kernels": "k", "speed": None, "rows": cells}))
    spent = {"memory": {"fused": 1, "transformers x": 4}, "host_ms": {"fused": 0.5}}
    cells = [{"shape": s, "T": t} | cell | spent for s, t in shapes if t >= 256]
    others = [("zipf", "plain"), ("half", "plain"), ("uniform", "gpt-oss")]
    for shape, (routing, variant) in product(MODELS, others):
        about = {"shape": shape, "T": 4096, "routing": routing, "variant": variant}
        cells.append(about | cell | spent | {"over_plain": 1.0})
    training.write_text(json.dumps({"rows": cells}))

    rows = stored_rows.read([layer, training])

    ours = [row for row in rows if row["candidate"] == "samebits"]
    assert {row["op"] for row in ours} == {"layer", "training"}
    assert all(row["config"] == "fused" and row["fraction"] == 0.8 for row in ours)
    assert {row.get("staged") for row in ours} == {1.0, None}
    assert {(row.get("host"), row.get("memory")) for row in ours} == {(None, None), (0.4, 0.25)}
    # Nothing that is asked of them lacks a row or a column.
    asked = [t for t in targets.read(BENCH / "targets.toml") if t["op"] in ("layer", "training")]
    assert len(asked) >= 15
    assert not [line for line in targets.misses(asked, rows) if ": no " in line]


def test_an_op_that_is_timed_elsewhere_is_named() -> None:
    done = run_bench("--device", "cpu", "--tiny", "--op", "layer")

    assert done.returncode == 1
    assert "./run bench --layer" in done.stderr


@pytest.mark.usefixtures("bench_path")
def test_a_later_file_replaces_cells_of_an_earlier_one(tmp_path: Path) -> None:
    import stored_rows

    files = [tmp_path / f"{name}.json" for name in ("first", "second")]
    for ms, path, counts in zip((2.0, 1.0), files, ((1, 16), (16,)), strict=True):
        cell = {"shape": "mixtral", "floor_ms": 1.0, "staged_ms": 1.0, "ms": {"fused": ms}}
        path.write_text(json.dumps({"rows": [cell | {"T": tokens} for tokens in counts]}))

    rows = [row for row in stored_rows.read(files) if row["candidate"] == "samebits"]

    assert [(row["T"], row["ms"]) for row in rows] == [(1, 2.0), (16, 1.0)]


@pytest.mark.usefixtures("bench_path")
def test_tables_of_figures_are_those_of_the_rows() -> None:
    import doc_tables

    made, used = doc_tables.tables(), set()
    for page in doc_tables.PAGES:
        text = (doc_tables.ROOT / page).read_text()
        used |= {name for _, name, _ in doc_tables.MARKED.findall(text)}
        assert doc_tables.filled(text, made) == text, page
    assert used == made.keys()
