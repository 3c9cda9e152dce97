"""The page of backends is what the backends answer."""

from dataclasses import replace

import pytest

import backends_table
from samebits.backends import BACKENDS

pytestmark = pytest.mark.reference


def test_the_page_is_up_to_date() -> None:
    assert backends_table.PAGE.read_text(encoding="utf-8") == backends_table.page(), (
        "docs/backends.md is out of date; run python scripts/backends_table.py"
    )


def test_a_change_of_a_backend_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = backends_table.page()

    monkeypatch.setattr(BACKENDS["grouped"], "why_not", lambda _: "it is a planted refusal")

    assert "1. it is a planted refusal" in backends_table.page()
    assert backends_table.page() != before


def test_the_reference_runs_everything_that_is_asked_about() -> None:
    for problem in backends_table.problems().values():
        for device in backends_table.DEVICES:
            # Activations in 8 bits have no gradient anywhere.
            asked = replace(problem, device=device, grad=problem.row_format is None)
            assert BACKENDS["reference"].why_not(asked) is None
