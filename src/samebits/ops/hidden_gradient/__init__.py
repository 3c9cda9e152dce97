"""From the gradient of a layer's output to that of its first projection, and of probabilities.

With ``t`` the token and ``e`` the expert of row r, ``p`` its probability where that comes after the
activation (1 where it does not), ``a`` the activation of ``z[r]``::

    dh[r, j] = Σ_i dy[t, i] · down[e, i, j]                      i ascending, fp32
    dz[r, :] = D(glu'(z[r], dh[r] · p))       h[r, j] = D(a[j] · p)
    dp[s]    = Σ_j dh[r, j] · a[j] + Σ_i dy[t, i] · down_bias[e, i]       sums of 64, ascending

``dh`` is never stored: everything that needs it happens behind its product.
"""
