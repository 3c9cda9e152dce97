"""Which graph a forgotten guard belongs to."""

import pytest

from samebits.checks.compile import detectors
from samebits.checks.compile.detectors import Detectors

pytestmark = pytest.mark.reference


def test_a_guard_belongs_to_the_graph_with_its_symbols(monkeypatch):
    # With a gradient, the entry of the first graph is saved after the second one has begun.
    found = Detectors()
    found.begin()
    for symbols, key in [("first", "a"), ("second", "b"), ("static", None)]:
        monkeypatch.setattr(detectors, "_environment", lambda symbols=symbols: symbols)
        found._next(key)

    found._forgets("first", "Eq(s, 0.25)")
    found._forgets("static", "Eq(s, 0.5)")
    assert found.keys == {"a": ["Eq(s, 0.25)"], "b": []}

    found.begin()
    assert found.keys == {}


def test_a_guard_of_unknown_symbols_belongs_to_the_latest_graph(monkeypatch):
    found = Detectors()
    found.begin()
    monkeypatch.setattr(detectors, "_environment", lambda: None)
    found._next("a")

    found._forgets("other", "Eq(s, 0.25)")

    assert found.keys == {"a": ["Eq(s, 0.25)"]}
