"""Gradients of parameters: products and sums over the rows of each expert, in row order.

    dw[e, m, n] = D(Σ_r a[r, m] · b[r, n])        dbias[e, n] = D(Σ_r rows[r, n] [· p[r]])

over the rows r of expert e, ascending: one fp32 accumulator for the product; sums of 64 rows, then
those sums, for a bias. An expert without rows gets exact zeros.
"""
