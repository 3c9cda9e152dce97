"""Both projections of very few tokens in two launches: nothing is sorted, every slot is its own.

With ``t = s // K`` the token of slot s and e its expert::

    hidden  z[s, :] = D(Σ_i x[t, i] · gate_up[e, :, i] + gate_up_bias[e, :])     x[t] [· p, rounded]
            h[s, j] = D(glu(z[s])[j] [· p])
    output  y[s, :] = D(Σ_j h[s, j] · down[e, :, j] + down_bias[e, :] [· p])
            out[t, :] = D(0 + Σ_s y[s, :] [· p])     over the slots of t, by expert, then slot

Slots that share an expert read its weights each on their own: this is for the few tokens of which
hardly any do. The bits are those of the sorted path.
"""
