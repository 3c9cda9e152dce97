"""Quantised matrices of experts to dense ones, by the rule of ``samebits.formats``.

With e, n, k expert, row and column, and ``s`` the fp32 scale of the block::

    w[e, n, k] = D(fp32(values[e, n, k] * s))

Only experts that have rows are written: the rest of the result is whatever the memory held.
"""
