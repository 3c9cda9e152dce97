"""The norm of rows as cubins for sm_90, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import compile_table

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_row_norm.py")


def test_rows_of_one_element_compile_too() -> None:
    assert compile_table(SCRIPT, "1", "40").keys() == {"1", "40"}


def test_the_backward_of_a_wide_row_keeps_to_its_registers() -> None:
    table = compile_table(SCRIPT, "backward-40", "backward-7168")

    for case in table.values():
        registers, stack, _, _ = case["sm_90"]
        assert stack == 0
        assert registers <= 128
    assert table["backward-7168"]["sm_90"][3] == 16
