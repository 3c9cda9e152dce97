"""The page: what is on it, that nothing on it is markup, bad input, whole files."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.results import AUDIT, ENVIRONMENT, EVERYTHING, EVIL, finding, lines, result

from samebits import cli
from samebits.checks.report.load import Machine, add
from samebits.checks.report.markdown import markdown
from samebits.checks.report.page import html
from samebits.checks.report.summary import Summary, cell, summarise

pytestmark = pytest.mark.reference


class Page(HTMLParser):
    """Tags, attributes and text of a page; every tag that is opened is closed."""

    EMPTY = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _summary(*values: dict[str, object], source: str = "results.jsonl") -> Summary:
    machine = Machine(source=source)
    add(machine, lines(list(values)).splitlines())
    return summarise([machine])


SUMMARY = _summary(*EVERYTHING)


def test_the_page_loads_and_runs_nothing() -> None:
    page = Page(html(SUMMARY))

    assert not {"script", "img", "link", "iframe", "object", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    targets = [value for name, value in page.attributes if name == "href"]
    assert targets
    assert all((value or "").startswith("#") for value in targets)
    assert not re.search(r"url\(|@import|https?:", html(SUMMARY))


def test_names_are_text() -> None:
    text = Page(html(SUMMARY)).text

    assert EVIL in text
    assert f"evil.{EVIL}" in text
    assert any("line break\ufffd[31m" in part for part in text)


def test_markdown_has_no_markup_of_names() -> None:
    page = markdown(SUMMARY)

    assert "<script" not in page
    assert "&lt;script&gt;alert" in page
    for line in page.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)
            assert len(cells) in {5 + 2, 7 + 2, 2 + 2, 3 + 2}, line
    evil = result(case="[a](javascript:b) `c` **d** @all https://e.f www.e.f", backend="x")
    named = markdown(_summary(evil))
    assert not re.search(r"(?<!\\)\]\(", named)
    assert "https://" not in named
    assert "www." not in named
    assert "@all" not in named


@pytest.mark.parametrize("form", [html, markdown])
def test_everything_is_on_the_page(form: object) -> None:
    page = form(SUMMARY)  # type: ignore[operator]
    text = " ".join(Page(page).text) if form is html else unescape(page.replace("\\", ""))

    for wanted in (
        "Something failed: 3 pass, 3 fail, 1 unsupported, 2 not_run.",
        "WRONG ×50",
        "ok 98%",
        "refused",
        "not run",
        "gpt_oss.GptOssExperts",
        "it needs an NVIDIA GPU",
        "stale",
        "samebits check parity --json",
        "torch 2.13.0",
        "transformers 5.24.0",
        "Linux x86_64",
        "AVX2",
    ):
        assert wanted in text


def test_failures_come_first_and_the_largest_leads() -> None:
    worst = [found.record for found in SUMMARY.worst]

    assert [record.verdict for record in worst] == ["fail"] * 3 + ["pass"] * 3
    # A failure without a figure has no size that could be smaller than another's.
    assert worst[0].measured is None
    assert worst[1].column == "pkg:clamped"
    assert worst[3].row == "gpt-oss"


def test_a_cell_says_the_worst_of_its_results() -> None:
    def of(*values: dict[str, object]) -> tuple[str, str, int | None]:
        machine = Machine(source="x")
        add(machine, lines(list(values)).splitlines())
        found = cell(machine.records)
        return found.verdict, found.text, found.heat

    refused = result(verdict="unsupported", measured=None, allowed=None)
    absent = result(verdict="not_run", measured=None, allowed=None)
    assert of(result(), refused) == ("pass", "ok 25%", 1)
    assert of(result(measured=0.0)) == ("pass", "ok 0%", 0)
    assert of(result(measured=None, allowed=None)) == ("pass", "ok", None)
    assert of(result(verdict="fail", measured=0.04)) == ("fail", "WRONG ×10", 6)
    assert of(result(verdict="fail", measured=0.041), result()) == (
        "fail",
        "WRONG ×10.2 (1 of 2)",
        7,
    )
    assert of(result(verdict="fail", measured=None)) == ("fail", "WRONG", 7)
    assert of(result(verdict="fail", measured=1e-9, allowed=0)) == ("fail", "WRONG", 7)
    assert of(result(measured=1e-9, allowed=0)) == ("pass", "ok", 4)
    assert of(result(measured=10**400)) == ("pass", "ok", 4)
    assert of(refused, absent) == ("not_run", "not run", None)
    assert of(refused) == ("unsupported", "refused", None)


def test_nothing_passed_is_no_success() -> None:
    absent = result(verdict="not_run", measured=None, allowed=None)

    assert "Nothing was proved: 1 not_run." in html(_summary(absent))
    assert "Nothing failed: 1 pass." in html(_summary(result()))


def test_the_support_matrix_has_a_machine_in_each_place(tmp_path: Path) -> None:
    versions = [("2.9.1", "5.17.0"), ("2.13.0", "5.17.0"), ("2.13.0", "5.24.0")]
    paths = []
    for index, (torch, transformers) in enumerate(versions):
        path = tmp_path / f"{index}.jsonl"
        known = {"versions": {"torch": torch, "transformers": transformers}}
        verdict = "fail" if index == 2 else "pass"
        path.write_text(lines([ENVIRONMENT | known, result(verdict=verdict)]))
        paths.append(str(path))
    mac = tmp_path / "mac.jsonl"
    mac.write_text(lines([ENVIRONMENT | {"system": "Darwin arm64"}, result()]))
    out = tmp_path / "out.md"

    assert cli.main(["report", str(out), *paths, str(mac)]) == 1

    page = out.read_text().replace("\\", "").partition("## Support matrix")[2]
    assert "|  | transformers 5.17.0 | transformers 5.24.0 |" in page
    assert "| torch 2.9.1 | 1 pass |  |" in page
    assert "| torch 2.13.0 | 1 pass | 1 fail |" in page
    assert page.index("Linux x86_64") < page.index("Darwin arm64")
    assert page.index("torch 2.9.1") < page.index("torch 2.13.0")


def test_exit_codes(tmp_path: Path) -> None:
    for verdict, expected in (("pass", 0), ("fail", 1), ("not_run", 3)):
        path = tmp_path / "r.jsonl"
        path.write_text(lines([result(verdict=verdict)]))
        assert cli.main(["report", str(tmp_path / "out.html"), str(path)]) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must hold at least one result, got none"),
        (json.dumps(ENVIRONMENT), "must hold at least one result, got none"),
        ("{", "r.jsonl:1 must be one JSON object"),
        ("[]", "r.jsonl:1 must be one JSON object, got list"),
        ('{"a": 1}', "must be what samebits check … --json"),
        (json.dumps(result(verdict="good")), "must be what samebits check … --json"),
        (json.dumps(result(measured="much")), "must measure in numbers, got 'much'"),
        (json.dumps(AUDIT | {"results": [3]}), "got int"),
        (json.dumps(AUDIT | {"results": [{"case": "x"}]}), "must have a verdict of pass"),
        ("[" * 100_000, "must be one JSON object"),
        ("\udcff", "must be UTF-8 text"),
    ],
)
def test_bad_results_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "out.html"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))

    assert cli.main(["report", str(out), str(path)]) == 2

    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out.txt", "r.jsonl"], "OUT must end in .html or .md"),
        (["out.html"], "give RESULTS, or --run to make them"),
        (["out.html", "absent.jsonl"], "absent.jsonl"),
        (["nowhere/out.html", "r.jsonl"], "must name a file in a folder that exists"),
        (["out.html", "r.jsonl", "--save", "x.jsonl"], "--save has no effect without --run"),
        (["out.html", "--run", "nothing"], "unknown check 'nothing'; expected one of"),
        (["out.html", "--run", "parity", "--save", "no/x.jsonl"], "a folder that exists"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text(lines())

    assert cli.main(["report", *words]) == 2

    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_an_old_page_survives_what_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "out.html"
    path.write_text(lines())
    out.write_text("old")

    def broken(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", broken)

    assert cli.main(["report", str(out), str(path)]) == 2
    assert out.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.html", "r.jsonl"]


def test_names_that_cannot_be_encoded(tmp_path: Path) -> None:
    path, out = tmp_path / "r.jsonl", tmp_path / "out.html"
    path.write_text(json.dumps(result(case="\ud800x")) + "\n")

    assert cli.main(["report", str(out), str(path)]) == 0
    assert "x</th>" in out.read_text()


def test_checks_are_run_and_what_they_print_is_kept(tmp_path: Path) -> None:
    out, save = tmp_path / "out.html", tmp_path / "kept.jsonl"
    check = "parity --case swiglu --forward"

    assert cli.main(["report", str(out), "--run", check, "--save", str(save)]) == 0
    assert "samebits check parity --case swiglu --forward --json" in out.read_text()
    again = tmp_path / "again.md"
    assert cli.main(["report", str(again), str(save)]) == 0
    kept = [json.loads(line) for line in save.read_text().splitlines()]
    assert kept[0]["system"]
    assert kept[2]["case"] == "swiglu"


def test_a_check_that_is_called_wrongly_stops_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, save = tmp_path / "out.html", tmp_path / "kept.jsonl"
    runs = ["invariance reference --tokens 1,2", "parity --case nonsense"]

    assert cli.main(["report", str(out), "--run", *runs, "--save", str(save)]) == 2
    assert "ended with exit code 2" in capsys.readouterr().err
    assert not out.exists()
    # What the checks before it said is not lost.
    kept = [json.loads(line) for line in save.read_text().splitlines()]
    assert [line["case"] for line in kept[2:]] == ["repeat", "T", "position", "neighbours"]


def test_many_failures_are_counted() -> None:
    many = [finding(model=f"m.{i}", measured=float(i + 1)) for i in range(50)]

    page = html(_summary(*many))

    assert "10 more rows with failures are not shown." in page
    assert page.count('<td class="cell fail h7">fail</td>') == 40


def test_failures_of_one_pair_share_a_line() -> None:
    three = [finding(quantity=f"d_{i}", measured=float(i + 1)) for i in range(3)]

    worst = _summary(*three).worst

    assert [(found.record.measured, found.more) for found in worst] == [(3.0, 2)]
    assert worst[0].where == "default · bf16 · d_2 — and 2 more"
