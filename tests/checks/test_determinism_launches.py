"""Our layers launch what the registry says: every variant, by launches that compute nothing.

Sizes are small where tiles do not depend on them; kernels, tiles, flags are those of an H200.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest
import torch
from host_reads import HostReads
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from samebits.backends import operator, passes, repetition
from samebits.checks.determinism import calls, eight_bits, layers, operations, options
from samebits.checks.determinism.command import OURS
from samebits.checks.determinism.launches import mismatch, observed
from samebits.checks.determinism.memory import filled
from samebits.checks.determinism.replay import run
from samebits.checks.determinism.variant import Variant, load
from samebits.problem import Problem

pytestmark = pytest.mark.interpret

CPU = torch.device("cpu")


def small(problem: Problem) -> Problem:
    """Return a problem with fewer columns and experts; odd ones stay odd."""
    return replace(
        problem,
        H=66 if problem.H % 16 else 64,
        F=34 if problem.F % 16 else 64,
        E=16,
        K=min(problem.K, 2),
        N=None if problem.N is None else 64,
        expert_start=16 if problem.expert_start else 0,
    )


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "run", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(operator, "_device_name", lambda device: "sm_90")
    narrowed = layers._in
    monkeypatch.setattr(layers, "_in", lambda problem, dtype: small(narrowed(problem, dtype)))
    for module, names in ((layers, ("FEW", "WHOLE")), (options, ("FEW", "WHOLE", "HELD"))):
        for name in names:
            monkeypatch.setattr(module, name, small(getattr(module, name)))
    for families in (layers.FAMILIES, eight_bits.FAMILIES):
        for family, problem in families.items():
            monkeypatch.setitem(families, family, small(problem))
    monkeypatch.setattr(eight_bits, "FEW", small(eight_bits.FEW))
    for family, (problem, dtypes) in options.FORMATS.items():
        monkeypatch.setitem(options.FORMATS, family, (small(problem), dtypes))


def of_layers() -> Iterator[Variant]:
    formats = map(operations.dequantize, options.FORMATS)
    found = chain(layers.layers(), options.options(), eight_bits.eight_bits(), formats)
    return (v for v in found if v.expected == "same")


@pytest.mark.usefixtures("on_an_h200")
def test_our_layers_launch_what_the_registry_says() -> None:
    root = load(OURS).root
    wrong = {}
    for variant in of_layers():
        with observed(root) as seen:
            # Zeros: nothing is computed, but slots are looked up.
            run(variant.prepare(CPU), 0)
        said = mismatch(variant, seen)
        if said:
            wrong[variant.name] = said

    assert wrong == {}


@pytest.mark.usefixtures("on_an_h200")
def test_our_layers_ask_nothing_of_the_host() -> None:
    # A capture allows none of it. Twice before: what is kept from first calls is what is captured.
    asked = {}
    for variant in of_layers():
        call = variant.prepare(CPU)
        with filled(0):
            call()
            call()
            with HostReads() as reads:
                call()
        if reads.found:
            asked[variant.name] = reads.found

    assert asked == {}


def test_a_variant_does_not_repeat_what_another_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is repeated by its launches alone is not seen to be launched.
    monkeypatch.setattr(passes, "_PASSES", {("of another",): "a pass"})
    monkeypatch.setattr(repetition, "_PLANS", {("of another",): None})

    calls.layer(small(layers.FEW), 4, "fused", CPU)

    assert passes.passes() == repetition.plans() == []


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x[[0, 1]], "lift_fresh"),
        (lambda x: torch.tensor([1.0], device=x.device), "lift_fresh"),
        (lambda x: torch.arange(3), "arange"),
        (lambda x: int(x.sum()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.tolist(), "tolist"),
    ],
)
def test_what_is_asked_of_the_host_is_seen(call, name) -> None:
    with HostReads() as reads:
        call(torch.ones(3, 2))

    assert name in reads.found


def test_every_table_has_its_variants() -> None:
    names = {variant.name for variant in load(OURS).variants}

    assert {"fused bf16 mxfp4 T=1", "grouped bf16 fp8_128x128 T=160"} <= names
    assert "fused gradients bf16 main_grad T=40" in names
    assert len(names) > 250
