"""The metadata of rows that are sorted by expert already: every row is its own slot.

With ``n = offsets[E]`` rows that an expert has::

    slots[r] = inverse[r] = r  (r < n), R  (r >= n)
"""
