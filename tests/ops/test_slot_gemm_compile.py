"""The launches of single slots as cubins for sm_90, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import SHARED_SM_90, Table, assert_as_recorded, known_and_compiled
from cubins_slot_gemm import CASES

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_slot_gemm.py")
# Compiled each time, with what the tables hold and the record does not; the rest stands there.
AGAIN = ["hidden"]


@pytest.fixture(scope="module")
def table() -> Table:
    return known_and_compiled(SCRIPT, CASES, AGAIN)


def test_what_is_compiled_again_is_as_recorded(table: Table) -> None:
    assert_as_recorded(SCRIPT, table, AGAIN)


def test_nothing_spills_and_shared_memory_fits(table: Table) -> None:
    for case, targets in table.items():
        _, stack, shared, _, _ = targets["sm_90"]
        assert stack == 0, case
        assert shared <= SHARED_SM_90, case


def test_every_operand_is_read_in_one_order(table: Table) -> None:
    # mma.sync with two neighbours a thread, as in every other tile of 16 rows.
    assert {targets["sm_90"][-1] for targets in table.values()} == {2}
