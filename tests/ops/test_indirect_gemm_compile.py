"""The projections as cubins for every architecture, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import SHARED, SHARED_SM_90, TARGETS, Table, assert_as_recorded, known_and_compiled
from cubins_indirect_gemm import CASES

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_indirect_gemm.py")

# Compiled each time, with what the tables hold and the record does not; the rest stands there.
# ``python tests/ops/cubins_indirect_gemm.py --record`` makes it.
AGAIN = ["second-unmeasured"]


@pytest.fixture(scope="module")
def table() -> Table:
    return known_and_compiled(SCRIPT, CASES, AGAIN)


def test_what_is_compiled_again_is_as_recorded(table: Table) -> None:
    assert_as_recorded(SCRIPT, table, AGAIN)


def test_the_tile_without_evidence_compiles_for_every_target(table: Table) -> None:
    assert tuple(table["second-unmeasured"]) == TARGETS


def test_nothing_spills_and_shared_memory_fits(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, vector, _) in targets.items():
            assert stack == 0, (case, target)
            assert shared <= (SHARED_SM_90 if target == "sm_90" else SHARED), (case, target)
            assert vector == 16, (case, target)


def test_one_kwidth_over_each_table(table: Table) -> None:
    widths: dict[str, set[int]] = {}
    for case, targets in table.items():
        dtype = next((name for name in ("fp16", "fp32") if case.endswith(name)), "bf16")
        for target, (*_, kwidth) in targets.items():
            assert kwidth >= 0, (case, target)
            widths.setdefault(f"{target} {dtype}", set()).add(kwidth)

    # 0: every operand of the tile comes from shared memory.
    assert all(len(found - {0}) <= 1 for found in widths.values()), widths


def test_no_swapped_tile_has_an_operand_in_registers(table: Table) -> None:
    # Asynchronous products of such operands were wrong (docs/projections.md).
    swapped = {case: targets["sm_90"] for case, targets in table.items() if "-swap" in case}

    assert len(swapped) >= 5
    assert {case: kwidth for case, (*_, kwidth) in swapped.items() if kwidth} == {}
