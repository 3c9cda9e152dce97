"""The rows of docs/refused.md."""

import re
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).parents[3] / "docs" / "refused.md"


class Refusal(NamedTuple):
    """One class or option that attach() refuses, and words of the reason."""

    cls: str
    option: str
    reason: str


def documented() -> list[Refusal]:
    """Return a row for each class that the first column names."""
    rows = []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].startswith("`"):
            rows += [
                Refusal(cls, cells[2].strip("`"), cells[3])
                for cls in re.findall(r"`(\w+)`", cells[1])
            ]
    return rows
