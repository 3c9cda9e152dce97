"""The root-mean-square norm of each row of an expert's output, before it is rounded.

::

    v[r, :] = y[r, :] · scale        out[r, :] = D(v[r, :] · (1 / sqrt(mean(v[r, :]²) + eps)))
"""
