"""The tables of docs/differences.md say what was measured, row by row."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parents[1]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "differences-cpu.json").read_text())


def _figure(value: float) -> str:
    """Return a figure as the tables spell it: two digits."""
    if value == 0:
        return "0"
    if value >= 1:
        return f"{value:.1f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _layer(row: dict) -> list[str]:
    return [_figure(row["distance"]), f"{100 * row['other_bits']:.2f} %"]


def _model(row: dict) -> list[str]:
    figures = [_figure(row[name]) for name in ("mean", "p99", "max")]
    return [*figures, f"{100 * row['outside_share']:.0f} %", _figure(row["k3"])]


def _tables() -> dict[int, list[list[str]]]:
    """Return the cells of every measured row, by how many figures it has."""
    found: dict[int, list[list[str]]] = {}
    section = (ROOT / "docs" / "differences.md").read_text().partition("## How large each is")[2]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("| ") and cells[0] in ("order", "rounding", "placement", "dropped"):
            found.setdefault(len(cells) - 2, []).append(cells)
    return found


@pytest.mark.parametrize(("name", "spelled"), [("layer", _layer), ("model", _model)])
def test_every_row_was_measured(name: str, spelled) -> None:
    measured = [(row["cause"], spelled(row)) for row in MEASURED[name] if row["cause"] != "floor"]
    rows = _tables()[len(measured[0][1])]

    assert len(rows) == len(measured)
    for cause, _, *figures in rows:
        assert (cause, figures) in measured
