"""The kernels of the gradients as cubins for every architecture, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import (
    SHARED,
    SHARED_SM_90,
    TARGETS,
    Table,
    assert_as_recorded,
    compile_table,
    recorded,
)

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_gradients.py")
# Compiled anew each time; ``python tests/ops/cubins_gradients.py --record`` makes the rest.
AGAIN = ("hidden-32x128x64-4w-4s", "weight-128x128x32-4w")


@pytest.fixture(scope="module")
def table() -> Table:
    return recorded(SCRIPT) | compile_table(SCRIPT, *AGAIN)


def test_what_is_compiled_again_is_as_recorded(table: Table) -> None:
    assert_as_recorded(SCRIPT, table, AGAIN)


def test_nothing_spills_and_shared_memory_fits(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, vector, _) in targets.items():
            assert stack == 0, (case, target)
            assert shared <= (SHARED_SM_90 if target == "sm_90" else SHARED), (case, target)
            assert vector == 16, (case, target)


def test_no_asynchronous_product_has_an_operand_in_registers(table: Table) -> None:
    assert {
        (case, target): found
        for case, targets in table.items()
        for target, (*_, found) in targets.items()
        if found
    } == {}


def test_tiles_without_evidence_compile_for_every_target() -> None:
    for case, targets in recorded(SCRIPT).items():
        if "unmeasured" in case:
            assert sorted(targets) == sorted(TARGETS), case
