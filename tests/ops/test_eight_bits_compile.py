"""What quantises rows, and the scaled product, as cubins, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import SHARED, SHARED_SM_90, Table, assert_as_recorded, known_and_compiled
from cubins_eight_bits import CASES

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_eight_bits.py")

# Compiled each time, with what the tables hold and the record does not; the rest stands there.
# ``python tests/ops/cubins_eight_bits.py --record`` makes it.
AGAIN = ["product-16x128-4w-4s", "product-128x256-4w-4s", "permute-mxfp8-numbers"]


@pytest.fixture(scope="module")
def table() -> Table:
    return known_and_compiled(SCRIPT, CASES, AGAIN)


def test_what_is_compiled_again_is_as_recorded(table: Table) -> None:
    assert_as_recorded(SCRIPT, table, AGAIN)


def test_every_target_has_its_binary(table: Table) -> None:
    for case, (_, _, targets) in CASES.items():
        assert set(table[case]) == {f"sm_{sm}" for sm in targets}


def test_nothing_spills_and_shared_memory_fits(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, *_) in targets.items():
            # Single bytes take registers of their own.
            assert stack == 0 or "odd" in case, (case, target)
            assert shared <= (SHARED_SM_90 if target == "sm_90" else SHARED), (case, target)


def test_memory_is_read_sixteen_bytes_at_a_time(table: Table) -> None:
    for case, targets in table.items():
        if "odd" in case:
            continue
        assert {vector for _, _, _, vector, *_ in targets.values()} == {16}, case


def test_hardware_converts_where_it_rounds_once(table: Table) -> None:
    for case, targets in table.items():
        if "product" not in case:
            for target, (*_, converts, _, _, _) in targets.items():
                # On sm_89 Triton rounds to fp16 first.
                assert bool(converts) == (target not in ("sm_80", "sm_86", "sm_89")), (case, target)


def test_products_are_asynchronous_and_read_shared_memory(table: Table) -> None:
    # Tiles that are ``mma.sync`` have other bits; operands in registers may be overwritten
    # (docs/projections.md).
    tiles = {case: targets for case, targets in table.items() if "sm_90" in targets}

    for case, targets in tiles.items():
        *_, asynchronous, in_registers, _ = targets["sm_90"]
        assert bool(asynchronous) == ("product" in case), case
        assert in_registers == 0, case


def test_conversions_merge_nothing_into_their_result(table: Table) -> None:
    """What the assembler makes of a conversion of constants: rows of no slot were garbage."""
    for case, targets in table.items():
        assert {merges for *_, merges in targets.values()} == {0}, case
