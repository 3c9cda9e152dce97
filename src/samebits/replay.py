"""Record which experts a rollout chose, and make a training step choose the same.

A token near a tie goes to another expert when its router sees other bits, and then nothing that
follows agrees. With the recorded choice both runs use the same experts; the probabilities are
computed again from the logits of all experts, so that their gradient reaches the router.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samebits.checkpoints.files import bytes_of
from samebits.errors import must, unknown
from samebits.nn.router import Router, RouterOutput
from samebits.routing import Routing
from samebits.testing.numerics import bitwise_equal

Probs = Literal["computed", "recorded", "same"]
PROBS: tuple[Probs, ...] = ("computed", "recorded", "same")
_KEY = "samebits_routing"


class RecordError(RuntimeError):
    """A record is damaged, or is not of the run that replays it."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """The routing of T tokens in one layer, in few bytes.

    Raises:
        ValueError: Shapes disagree, or an id is out of range.
        TypeError: A dtype is not what it must be.
    """

    # (T, K), the smallest of uint8, int16 and int32 that holds N; a dropped slot is N.
    topk_ids: Tensor
    # (T, K), fp32.
    topk_probs: Tensor
    # N.
    num_experts: int

    def __post_init__(self) -> None:
        dtype = _compact(self.num_experts)
        if self.topk_ids.dtype != dtype:
            raise TypeError(must("topk_ids", f"be {dtype}", self.topk_ids.dtype))
        if self.topk_probs.dtype != torch.float32:
            raise TypeError(must("topk_probs", "be float32", self.topk_probs.dtype))
        if self.topk_ids.dim() != 2 or self.topk_ids.shape != self.topk_probs.shape:
            shapes = f"{tuple(self.topk_ids.shape)} and {tuple(self.topk_probs.shape)}"
            raise ValueError(must("topk_ids and topk_probs", "have one shape (T, K)", shapes))

    def routing(self, device: torch.device | str = "cpu") -> Routing:
        """Return the routing, with ids as int64, on ``device``.

        Determinism: exact.
        """
        ids = self.topk_ids.to(device=device, dtype=torch.int64)
        return Routing(ids, self.topk_probs.to(device), self.num_experts)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRecord:
    """The routing of the same T tokens in every layer, by the name of the layer's router.

    Raises:
        ValueError: There is no layer, or the layers' T differ.
    """

    layers: Mapping[str, LayerRecord]

    def __post_init__(self) -> None:
        counts = {name: layer.topk_ids.shape[0] for name, layer in self.layers.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(must("layers", "hold one number of tokens", counts))

    @property
    def tokens(self) -> int:
        """T."""
        return next(iter(self.layers.values())).topk_ids.shape[0]

    def select(self, rows: Tensor | slice) -> "RoutingRecord":
        """Return the record of some tokens, in the order of ``rows``.

        Determinism: exact.
        """
        return RoutingRecord(
            {
                name: LayerRecord(layer.topk_ids[rows], layer.topk_probs[rows], layer.num_experts)
                for name, layer in self.layers.items()
            }
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file: ids and probabilities of each layer, and their digests.

        Raises:
            ImportError: safetensors is absent.
            OSError: The file cannot be written.

        Determinism: exact; the same bytes each time.
        """
        from safetensors.torch import save_file

        tensors, said = {}, {}
        for name, layer in self.layers.items():
            tensors[f"{name}.topk_ids"] = layer.topk_ids.cpu().contiguous()
            tensors[f"{name}.topk_probs"] = layer.topk_probs.cpu().contiguous()
            said[name] = {"num_experts": layer.num_experts, "sha256": _digest(layer)}
        partial_path = path.with_name(path.name + ".partial")
        save_file(tensors, partial_path, {_KEY: json.dumps(said)})
        partial_path.replace(path)

    @staticmethod
    def load(path: Path, *, verify: bool = True) -> "RoutingRecord":
        """Return the record in a file, its tensors mapped from it.

        Args:
            path: What ``save`` wrote.
            verify: Compare every layer with its digest, which reads all of it once.

        Raises:
            RecordError: The file is damaged or no record, or a digest is not its tensors'.
            ImportError: safetensors is absent.
            OSError: The file cannot be read.

        Determinism: exact.
        """
        from safetensors import SafetensorError, safe_open

        layers = {}
        try:
            with safe_open(path, "pt") as file:
                said = (file.metadata() or {}).get(_KEY)
                if said is None:
                    raise RecordError(f"{path} is no record of routings")
                for name, about in json.loads(said).items():
                    layers[name] = LayerRecord(
                        file.get_tensor(f"{name}.topk_ids"),
                        file.get_tensor(f"{name}.topk_probs"),
                        about["num_experts"],
                    )
                    if verify and _digest(layers[name]) != about["sha256"]:
                        raise RecordError(f"{path}: layer {name} is not what was recorded")
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path} is damaged: {error}") from error
        return RoutingRecord(layers)


class Recorder:
    """Collect the routings of a model's routers; see ``recording``."""

    def __init__(self, names: Mapping[str, int]) -> None:
        self._num_experts = names
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}

    def note(self, name: str, routing: Routing) -> None:
        """Append the tokens of one call to those of a layer."""
        number = self._num_experts[name]
        ids = torch.where(routing.topk_ids < 0, number, routing.topk_ids)
        compact = ids.detach().to(_compact(number))
        self._calls[name].append((compact, routing.topk_probs.detach().float().clone()))

    def record(self) -> RoutingRecord:
        """Return what was collected so far, the calls of a layer one behind the other, on the CPU.

        Raises:
            RecordError: A router was not called, as in a model that was compiled before.

        Determinism: exact.
        """
        silent = [name for name, calls in self._calls.items() if not calls]
        if silent:
            raise RecordError(_silent(silent))
        layers = {}
        for name, calls in self._calls.items():
            ids, probs = (torch.cat([call[i] for call in calls]).cpu() for i in (0, 1))
            layers[name] = LayerRecord(ids, probs, self._num_experts[name])
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
        ValueError: The routers, their N or T are not the record's.
        RecordError: A probability is not the recorded one ("same"), or a router was not called.

    Determinism: exact. With the parameters and the backend of the rollout the forward has its bits;
    with "recorded" the probabilities do whatever computes the logits.
    """
    if probs not in PROBS:
        raise ValueError(unknown("probs", probs, PROBS))
    routers = _routers(model)
    _check_layers(routers, record)
    called: set[str] = set()

    def give(name: str, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x = arguments[0]
        if x.shape[0] != record.tokens:
            rule = f"be called with the record's T = {record.tokens} tokens"
            raise ValueError(must(name, rule, x.shape[0]))
        called.add(name)
        return (x, record.layers[name].routing(x.device).topk_ids)

    def value(name: str, _module: nn.Module, _arguments: Any, out: RouterOutput) -> RouterOutput:
        return out if probs == "computed" else _with_recorded(name, out, record, probs)

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
        raise RecordError(_silent(sorted(set(routers) - called)))


def _with_recorded(
    name: str, out: RouterOutput, record: RoutingRecord, probs: Probs
) -> RouterOutput:
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


def _check_layers(routers: dict[str, Router], record: RoutingRecord) -> None:
    if set(routers) != set(record.layers):
        strange = sorted(set(routers) ^ set(record.layers))
        raise ValueError(must("record", "have the model's routers", f"a difference in {strange}"))
    for name, router in routers.items():
        number = record.layers[name].num_experts
        if router.num_experts != number:
            rule = f"have num_experts = {router.num_experts} in {name}, as the model"
            raise ValueError(must("record", rule, number))


def _routers(model: nn.Module) -> dict[str, Router]:
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    if not routers:
        raise ValueError(must("model", "hold a samebits.nn.Router", type(model).__name__))
    return routers


def _compact(num_experts: int) -> torch.dtype:
    """Return the smallest dtype that holds 0 … N."""
    for dtype in (torch.uint8, torch.int16):
        if num_experts <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def _digest(layer: LayerRecord) -> str:
    digest = hashlib.sha256(f"{tuple(layer.topk_ids.shape)} {layer.num_experts}".encode())
    ids = layer.topk_ids.cpu()
    if ids.numel() and not bool(((ids >= 0) & (ids <= layer.num_experts)).all()):
        raise ValueError(must("topk_ids", f"be in [0, {layer.num_experts}]", "another id"))
    for tensor in (ids, layer.topk_probs.cpu().view(torch.int32)):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _silent(names: list[str]) -> str:
    return (
        f"routers were not called: {', '.join(names)}\n"
        "hint: a compiled model takes no hooks; give MoE or Router the recorded topk_ids"
    )
