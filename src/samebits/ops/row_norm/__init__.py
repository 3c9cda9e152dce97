"""The root-mean-square norm of each row of an expert's output, before it is rounded.

::

    v[r, :] = y[r, :] · scale        out[r, :] = D(n[r, :])        n[r, :] = v[r, :] · i[r]
    i[r] = 1 / sqrt(mean(v[r, :]²) + eps)

Backward, with dn the gradient of n (that of the output, times a probability that follows)::

    dv = i · (dn − n · mean(dn · n))        dy = D(dv · scale)        dscale = Σ_r dv · y
    dp = Σ dout · out                                                 of a probability behind
    dp = Σ dn · n · eps · i² / p   if eps · i² ≤ 1/2                  of one before, by which y is
         Σ_F dh · a + Σ_H dv · scale · bias   otherwise               linear: a · p = h
"""
