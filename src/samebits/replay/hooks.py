"""Note what the routers of a model choose, and give it to them again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samebits.errors import must, unknown
from samebits.nn.router import Router, RouterOutput
from samebits.replay.record import LayerRecord, RecordError, RoutingRecord, compact_dtype
from samebits.routing import Routing
from samebits.testing.numerics import bitwise_equal

Probs = Literal["computed", "recorded", "same"]
PROBS: tuple[Probs, ...] = ("computed", "recorded", "same")


class Recorder:
    """Collect the routings of a model's routers; see ``recording``."""

    def __init__(self, names: Mapping[str, int]) -> None:
        self.num_experts = names
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}

    def note(self, name: str, routing: Routing) -> None:
        """Append the tokens of one call to those of a layer; a recomputed call is no new one."""
        # Activations are recomputed while a backward runs, and nothing else calls a router then.
        if torch._C._current_graph_task_id() != -1:
            return
        number = self.num_experts[name]
        ids = torch.where(routing.topk_ids < 0, number, routing.topk_ids)
        compact = ids.detach().to(compact_dtype(number))
        self._calls[name].append((compact, routing.topk_probs.detach().float().clone()))

    def record(self) -> RoutingRecord:
        """Return what was collected so far, the calls of a layer one behind the other, on the CPU.

        Raises:
            RecordError: A router was not called, as in a model that was compiled before.

        Determinism: exact.
        """
        silent = [name for name, calls in self._calls.items() if not calls]
        if silent:
            raise RecordError(not_called(silent))
        layers = {}
        for name, calls in self._calls.items():
            ids, probs = (torch.cat([call[i] for call in calls]).cpu() for i in (0, 1))
            layers[name] = LayerRecord(ids, probs, self.num_experts[name])
        return RoutingRecord(layers)


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Note the routing of every ``samebits.nn.Router`` of ``model`` until the block ends.

    Yields:
        The recorder, whose ``record()`` is the result.

    Raises:
        ValueError: The model has no router.

    Determinism: no arithmetic; the model computes what it computes without.
    """
    routers = _routers(model)
    recorder = Recorder({name: router.num_experts for name, router in routers.items()})

    def note(name: str, _module: nn.Module, _arguments: Any, out: RouterOutput) -> None:
        recorder.note(name, out.routing)

    handles = [
        router.register_forward_hook(partial(note, name)) for name, router in routers.items()
    ]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaying(model: nn.Module, record: RoutingRecord, probs: Probs = "computed") -> Iterator[None]:
    """Give every ``samebits.nn.Router`` of ``model`` the recorded choice until the block ends.

    Each call of a router must be of the record's T tokens, in its order (``RoutingRecord.select``),
    and gets them all. Run the backward inside the block where activations are recomputed. A
    compiled model takes no hooks: there, give ``Router`` or ``MoE`` the ``topk_ids`` of
    ``LayerRecord.routing``.

    Args:
        model: The model.
        record: The routing of the tokens that it is called with.
        probs: "computed" computes probabilities from the logits; "recorded" takes the recorded
            values, and the gradient from the logits; "same" computes them and raises unless they
            have the recorded bits, which waits for the device.

    Raises:
        ValueError: The routers, their N or T are not the record's, or a router is given another
            choice.
        RecordError: A probability is not the recorded one ("same"), or a router was not called.

    Determinism: exact. With the parameters and the backend of the rollout the forward has its bits;
    with "recorded" the probabilities do whatever computes the logits.
    """
    if probs not in PROBS:
        raise ValueError(unknown("probs", probs, PROBS))
    routers = _routers(model)
    check_layers({name: router.num_experts for name, router in routers.items()}, record)
    called: set[str] = set()

    def give(name: str, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x = arguments[0]
        if x.shape[0] != record.tokens:
            rule = f"be called with the record's T = {record.tokens} tokens"
            raise ValueError(must(name, rule, x.shape[0]))
        if any(given is not None for given in arguments[1:]):
            raise ValueError(must(name, "be called without topk_ids, which the record has", "some"))
        called.add(name)
        return (x, record.layers[name].routing(x.device).topk_ids)

    def value(name: str, _module: nn.Module, _arguments: Any, out: RouterOutput) -> RouterOutput:
        return with_recorded(name, out, record, probs)

    handles = []
    try:
        for name, router in routers.items():
            handles.append(router.register_forward_pre_hook(partial(give, name)))
            handles.append(router.register_forward_hook(partial(value, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
    if called != set(routers):
        raise RecordError(not_called(sorted(set(routers) - called)))


def with_recorded(
    name: str, out: RouterOutput, record: RoutingRecord, probs: Probs
) -> RouterOutput:
    """Return what a router computed, with its probabilities as ``probs`` says; see ``replaying``.

    Raises:
        RecordError: A probability is not the recorded one ("same").

    Determinism: exact.
    """
    if probs == "computed":
        return out
    computed, ids = out.routing.topk_probs, out.routing.topk_ids
    recorded = record.layers[name].routing(computed.device).topk_probs
    if probs == "same":
        if not bitwise_equal(computed, recorded.to(computed.dtype)):
            token = (computed != recorded).any(1).nonzero()
            where = f"token {int(token[0])}" if token.numel() else "the sign of a zero, or a NaN"
            raise RecordError(f"{name} computes other probabilities than recorded, first: {where}")
        return out
    # A difference that is 0 carries the gradient; the value is the recorded one.
    value = recorded.to(computed.dtype) + (computed - computed.detach())
    return RouterOutput(Routing(ids, value, out.routing.num_experts), out.logits)


def check_layers(numbers: Mapping[str, int], record: RoutingRecord) -> None:
    """Raise ``ValueError`` unless ``record`` is of routers of these names and numbers of experts.

    Determinism: exact.
    """
    if set(numbers) != set(record.layers):
        strange = sorted(set(numbers) ^ set(record.layers))
        raise ValueError(must("record", "have the model's routers", f"a difference in {strange}"))
    for name, number in numbers.items():
        if record.layers[name].num_experts != number:
            rule = f"have num_experts = {number} in {name}, as the model"
            raise ValueError(must("record", rule, record.layers[name].num_experts))


def _routers(model: nn.Module) -> dict[str, Router]:
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    if not routers:
        raise ValueError(must("model", "hold a samebits.nn.Router", type(model).__name__))
    return routers


def not_called(names: list[str]) -> str:
    """Return what to say of routers that were not called.

    Determinism: a function of its argument.
    """
    return (
        f"routers were not called: {', '.join(names)}\n"
        "hint: a compiled model takes no hooks; give MoE or Router the recorded topk_ids"
    )
