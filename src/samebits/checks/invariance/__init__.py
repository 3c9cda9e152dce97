"""`samebits check invariance`: Do the bits of a row depend on the other rows of its batch?

TARGET is one of our backends, ``transformers/NAME`` (an experts implementation of transformers), or
``package.module:function``: any function of rows. Each probed row is computed alone, in batches of
other sizes, at other places and beside other rows (its own copies, zeros, huge values, NaN), and
its bytes are compared; see docs/invariance.md.
"""

from samebits.checks.invariance.audit import Difference, audit, results
from samebits.checks.invariance.command import add_arguments, main
from samebits.checks.invariance.rows import Rows

__all__ = ["Difference", "Rows", "add_arguments", "audit", "main", "results"]
