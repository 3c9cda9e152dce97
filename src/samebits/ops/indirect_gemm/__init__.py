"""Projections whose rows are found through the routing, with the activation in the epilogue.

With ``t = slots[r] // K`` the token of row r and e the expert of the row::

    first    z[r, :] = D(Σ_i x[t, i] · gate_up[e, :, i] + gate_up_bias[e, :])
             h[r, j] = D(glu(z[r])[j] [· p])
    second   y[r, :] = D(Σ_j h[r, j] · down[e, :, j] + down_bias[e, :] [· p])
"""
