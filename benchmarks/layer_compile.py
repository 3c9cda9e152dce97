"""Compile in processes what a run of the layer benchmark launches, before and while it times."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from layer_cases import sets_of, variants_of, weights_of
from layer_peers import peers_of
from timing import compile_in_processes

from samebits import warmup
from samebits.testing.cases import MODELS

SCRIPT = Path(__file__).with_name("layer.py")


def compile_share(jobs, backends, options, index, count):
    """Compile every ``count``-th of what the plain jobs launch, or those with ``options``."""
    work = [
        (shape, variant, tokens, backend)
        for shape, variant, cells in jobs
        if (variant != "plain") == options
        for tokens in dict.fromkeys(t for _, t in cells)
        for backend in backends
    ]
    for shape, variant, tokens, backend in dict.fromkeys(work[index::count]):
        warmup(variants_of(shape)[variant], [tokens], backend=backend)


def compile_ahead(argv, options):
    """Compile the plain jobs, and with ``options`` begin the others.

    Returns what waits for those. The peers' activation is compiled here, meanwhile.
    """
    pool = ThreadPoolExecutor(1)
    plain = pool.submit(compile_in_processes, str(SCRIPT), *argv)
    small = replace(MODELS["qwen3-30b"], H=256, F=128, E=16)
    with torch.no_grad():
        for function, _ in peers_of(small, 16, weights_of(small), ["torch"]).values():
            function(*sets_of(small, 16, "uniform")[0])
    plain.result()
    if not options:
        return lambda: None
    return pool.submit(compile_in_processes, str(SCRIPT), *argv, "--compile-options").result
