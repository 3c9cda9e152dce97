"""One matrix product for each expert over contiguous rows that are sorted by expert.

With e the expert of row r, i ascending in one fp32 accumulator::

    y[r, :] = D(Σ_i rows[r, i] · w[e, :, i] + bias[e, :] [· p])
"""
