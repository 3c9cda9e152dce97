"""What reads quantised weights as cubins, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import SHARED, SHARED_SM_90, Table, assert_as_recorded, known_and_compiled
from cubins_quantized import CASES

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_quantized.py")

# Compiled each time, with what the tables hold and the record does not; the rest stands there.
# ``python tests/ops/cubins_quantized.py --record`` makes it.
AGAIN = ["dequantize-mxfp4"]


@pytest.fixture(scope="module")
def table() -> Table:
    return known_and_compiled(SCRIPT, CASES, AGAIN)


def test_what_is_compiled_again_is_as_recorded(table: Table) -> None:
    assert_as_recorded(SCRIPT, table, AGAIN)


def test_every_format_is_made_dense_on_every_target_that_converts_it(table: Table) -> None:
    for case, (kernel, _, _, _, targets) in CASES.items():
        if kernel == "dequantize":
            assert set(table[case]) == {f"sm_{sm}" for sm in targets}


def test_nothing_spills_and_shared_memory_fits(table: Table) -> None:
    for case, targets in table.items():
        for target, (_, stack, shared, *_) in targets.items():
            assert stack == 0, (case, target)
            assert shared <= (SHARED_SM_90 if target == "sm_90" else SHARED), (case, target)


def test_dense_matrices_are_written_in_wide_pieces(table: Table) -> None:
    for case, targets in table.items():
        if case.startswith("dequantize"):
            # A thread has four neighbours of shuffled words, eight of others.
            wide = 8 if "shuffled" in case else 16
            assert {vector for _, _, _, vector, _, _ in targets.values()} == {wide}, case


def test_upcast_operands_have_the_order_that_is_dealt_to_them(table: Table) -> None:
    # samebits.ops._triton.quantized orders the contraction for four neighbours a thread; products
    # that are asynchronous may not have operands in registers (docs/projections.md).
    tiles = {case: targets["sm_90"] for case, targets in table.items() if "dequantize" not in case}

    assert len(tiles) >= 8
    for case, (*_, kwidth, asynchronous) in tiles.items():
        if case.endswith(("-swap", "gpt-oss")):
            assert (kwidth, asynchronous) == (4, 0), case
        else:
            # Many rows: both operands lie in shared memory.
            assert kwidth == 0, case
            assert asynchronous > 0, case
