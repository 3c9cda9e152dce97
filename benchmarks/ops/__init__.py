"""One module per benchmarked op; see ``benchmarks/case.py``."""
