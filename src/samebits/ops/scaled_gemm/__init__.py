"""One product for each expert of rows in FP8 with weights in FP8, both scaled in blocks (W8A8).

With e the expert of row r, b the blocks of 128 columns in ascending order, every step rounded to
fp32 (CONTRACT section 5)::

    t[b]    = Σ_{k in b} rows[r, k] · w[e, n, k]
    sum    += (t[b] · row_scale[r, b]) · w_scale[e, n, b]
    y[r, n] = D(sum + bias[e, n] [· p])

The matrix unit multiplies the 8-bit numbers as they are.
"""
