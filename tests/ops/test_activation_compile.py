"""The activation kernels as cubins for every architecture, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import SHARED, TARGETS, Table, compile_table, recorded

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_activation.py")

# Bytes of stack that are accepted: two registers over, with Triton 3.6.0 alone, in a tile that was
# chosen for speed on sm_90 and where the arithmetic of situ is most of the time.
ACCEPTED_STACK = {("backward-situ", "sm_120"): 8}


@pytest.fixture(scope="module")
def table() -> Table:
    return compile_table(SCRIPT)


def test_every_case_compiles_for_every_target(table: Table) -> None:
    assert all(tuple(targets) == TARGETS for targets in table.values())


def test_nothing_spills_and_shared_memory_fits_everywhere(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, vector) in targets.items():
            assert stack <= ACCEPTED_STACK.get((case, target), 0), (case, target)
            assert shared <= SHARED, (case, target)
            assert vector == 16, (case, target)


def test_resources_are_the_recorded_ones(table: Table) -> None:
    # A Triton version without a record has nothing to compare: --record adds it.
    known = recorded(SCRIPT)

    assert {case: known.get(case, targets) for case, targets in table.items()} == table
