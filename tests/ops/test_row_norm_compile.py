"""The norm of rows as cubins for sm_90, built without a GPU."""

from pathlib import Path

import pytest

from cubin_table import compile_table

pytestmark = pytest.mark.compile

SCRIPT = Path(__file__).with_name("cubins_row_norm.py")


def test_rows_of_one_element_compile_too() -> None:
    assert compile_table(SCRIPT).keys() == {"1", "40"}
