"""The permute kernels as cubins for every architecture, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import SHARED, TARGETS, Table, compile_table, recorded

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_permute.py")


@pytest.fixture(scope="module")
def table() -> Table:
    return compile_table(SCRIPT)


def test_every_case_compiles_for_every_target(table: Table) -> None:
    assert all(tuple(targets) == TARGETS for targets in table.values())


def test_nothing_spills_and_shared_memory_fits_everywhere(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, _) in targets.items():
            assert stack == 0, (case, target)
            assert shared <= SHARED, (case, target)


def test_rows_move_in_16_bytes(table: Table) -> None:
    for case in (
        "gather",
        "gather-one",
        "gather-dp",
        "sum",
        "sum-plain",
        "sum-fp32",
        "sum-dp",
        "sum-dp-many",
    ):
        assert all(vector == 16 for *_, vector in table[case].values()), case


def test_resources_are_the_recorded_ones(table: Table) -> None:
    # A Triton version without a record has nothing to compare: --record adds it.
    known = recorded(SCRIPT)

    assert {case: known.get(case, targets) for case, targets in table.items()} == table
