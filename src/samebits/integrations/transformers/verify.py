"""Translate one experts module, and prove the translation against the class's own code.

A small double of the module is made on CPU in fp64: same class, same scalars, other sizes, random
parameters. The class's own forward runs on it through a reader that records every attribute it
reads: those values are all that the translation depends on. Then the library runs on the same
parameters, and the output and every gradient must agree. Casts in the class's code become fp64, so
that the comparison is as sharp as fp64 allows.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.errors import UnsupportedError
from samebits.experts import experts
from samebits.integrations.transformers import fp8, gate
from samebits.integrations.transformers.double import COLUMNS, double_of, inputs_of
from samebits.integrations.transformers.interface import own_forward
from samebits.integrations.transformers.oracle import Float64Casts
from samebits.integrations.transformers.reading import Reader, Record
from samebits.integrations.transformers.translation import (
    PACKED,
    Fact,
    Translation,
    is_current,
    read,
    weights_of,
)
from samebits.routing import Routing
from samebits.weights import Layout, PostExpertNorm

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
# transformers 5.17 has no post-expert norm.
_ABSENT_FLAGS = {"has_post_expert_norm": False}

# What code of a class can raise when it meets a double it was not written for.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _Known(NamedTuple):
    """A verified translation, and the functions of the class that it was verified against."""

    functions: tuple[Any, Any]
    translation: Translation


_VERIFIED: "WeakKeyDictionary[type, list[_Known]]" = WeakKeyDictionary()


def translate(module: nn.Module) -> Translation:
    """Return the verified translation of a decorated experts module.

    Verification runs once per class and set of scalars; later modules of the class reuse it.

    Raises:
        UnsupportedError: The module computes something that the library does not, or something
            that cannot be verified; the message says what.

    Determinism: the verdict depends on the class and its scalars only.
    """
    flags = _flags(module)
    flags["quantized"] = fp8.is_quantized(module)
    if flags["quantized"]:
        fp8.check(module)
    _check_tensors(module, flags)
    functions = (own_forward(module), getattr(type(module), "_apply_gate", None))
    if "_apply_gate" in vars(module):
        raise UnsupportedError("its _apply_gate was replaced on the instance")
    known = _VERIFIED.setdefault(type(module), [])
    for entry in known:
        if entry.functions == functions and is_current(module, entry.translation):
            return entry.translation
    # Verification must not see what the caller happens to run under.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        translation = _verify(module, flags)
    known.append(_Known(functions, translation))
    return translation


def _flags(module: nn.Module) -> dict[str, bool]:
    flags = {}
    for name in FLAGS:
        value = getattr(module, name, _ABSENT_FLAGS.get(name))
        if not isinstance(value, bool):
            raise UnsupportedError(f"its flag {name} is {value!r}, not a bool")
        flags[name] = value
    return flags


def _tensor_names(flags: dict[str, bool]) -> set[str]:
    first = "gate_up_proj" if flags["has_gate"] else "up_proj"
    names = {first, "down_proj"}
    if flags["has_bias"]:
        names |= {first + "_bias", "down_proj_bias"}
    if flags["has_post_expert_norm"]:
        names.add("post_expert_norm.weight")
    if flags["quantized"]:
        names |= {first + fp8.SCALE, "down_proj" + fp8.SCALE}
    return names


def _check_tensors(module: nn.Module, flags: dict[str, bool]) -> None:
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    expected = _tensor_names(flags)
    if getattr(module, PACKED, None) is not None:
        held = {name for name in held if not name.startswith(PACKED + ".")}
        expected -= {"gate_up_proj", "up_proj", "down_proj"}
    if held - expected:
        names = ", ".join(sorted(held - expected))
        raise UnsupportedError(f"it holds tensors that its flags do not announce: {names}")
    if expected - held:
        raise UnsupportedError(f"it lacks {', '.join(sorted(expected - held))}")
    for name, tensor in module.named_parameters():
        if not flags["quantized"] and tensor.dtype not in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            raise UnsupportedError(f"its {name} is {tensor.dtype}, not bf16, fp16, fp32 or fp64")


def _verify(module: nn.Module, flags: dict[str, bool]) -> Translation:
    generator = torch.Generator().manual_seed(0)
    double = double_of(module, flags, generator)
    gated, normed = flags["has_gate"], flags["has_post_expert_norm"]
    record = Record()
    reader = Reader(double, record)
    inputs = inputs_of(generator, 1.0)
    try:
        with Float64Casts():
            own_forward(module)(reader, inputs.x, inputs.topk_ids, inputs.topk_probs)
            function = reader._apply_gate if gated else reader.act_fn
            function(inputs.x[:, : 2 * COLUMNS if gated else COLUMNS])
    except _FAILURES as error:
        raise UnsupportedError(f"its own forward fails on a small copy of it: {error}") from error
    record.refuse_strange(_tensor_names(flags))
    layout = Layout() if flags["is_concatenated"] or not gated else Layout(interleave=1)
    activation, gate_error = gate.identify(
        function,
        record.numbers(but=("post_expert_norm",)),
        layout,
        gated=gated,
        name=_gate_name(module, gated=gated),
    )
    facts = (*_flag_facts(module), *_code_facts(module, gated=gated), *record.facts(module))
    norm = _norm(module) if normed else None
    errors = {}
    for centered in (False, True) if normed else (False,):
        translation = Translation(
            activation=activation,
            layout=layout,
            transposed=flags["is_transposed"],
            biased=flags["has_bias"],
            norm=norm,
            norm_centered=centered,
            facts=facts,
            verified="",
        )
        errors[_compare(double, translation)] = translation
    distance = min(errors)
    if not distance <= gate.TOLERANCE:
        raise UnsupportedError(
            f"its own forward is not what its flags and its gate, {activation.key}, say: "
            f"the outputs or gradients differ by {distance:.1e}"
        )
    return replace(errors[distance], verified=f"own forward {distance:.1e}, gate {gate_error:.1e}")


def _gate_name(module: nn.Module, *, gated: bool) -> str:
    act = getattr(module, "act_fn", None)
    kind = "" if act is None else f" ({getattr(act, '__name__', type(act).__name__)})"
    return f"its _apply_gate{kind}" if gated else f"its act_fn{kind}"


def _flag_facts(module: nn.Module) -> list[Fact]:
    return [
        Fact((name,), "plain", getattr(module, name)) for name in FLAGS if hasattr(module, name)
    ]


def _code_facts(module: nn.Module, *, gated: bool) -> list[Fact]:
    """Return the gate's code as a fact: it may be replaced after attach()."""
    cls: Any = type(module)
    return [Fact(("_apply_gate",), "code", cls._apply_gate)] if gated else []


def _norm(module: nn.Module) -> PostExpertNorm:
    eps = read(module, ("post_expert_norm", "eps"))
    if eps is None:
        raise UnsupportedError("its post_expert_norm has no eps")
    return PostExpertNorm(eps=eps)


def _spread(activation: Activation) -> float:
    """Return an rms of the first projection at which every bound is passed on both sides."""
    bounds = (activation.limit, activation.gate_softcap, activation.up_softcap)
    return 2.0 * max((b for b in bounds if b is not None), default=1.5)


def _compare(double: nn.Module, translation: Translation) -> float:
    """Return the largest error of the library against the class, over output and gradients."""
    generator = torch.Generator().manual_seed(1)
    inputs = inputs_of(generator, _spread(translation.activation))
    parameters = [p for p in double.parameters() if p.requires_grad]
    leaves = [inputs.x.requires_grad_(), inputs.topk_probs.requires_grad_(), *parameters]
    try:
        with Float64Casts():
            theirs = own_forward(double)(double, inputs.x, inputs.topk_ids, inputs.topk_probs)
        expected = torch.autograd.grad(theirs, leaves, inputs.dout.to(theirs.dtype))
    except _FAILURES as error:
        raise UnsupportedError(
            f"its own forward or backward fails on a small copy: {error}"
        ) from error
    routing = Routing(inputs.topk_ids, inputs.topk_probs)
    ours = experts(
        inputs.x,
        routing,
        weights_of(double, translation),
        translation.activation,
        backend="reference",
    )
    actual = torch.autograd.grad(ours, leaves, inputs.dout)
    pairs = zip((ours, *actual), (theirs, *expected), strict=True)
    return max(_distance(a.detach(), e.detach()) for a, e in pairs)


def _distance(actual: Tensor, expected: Tensor) -> float:
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error
