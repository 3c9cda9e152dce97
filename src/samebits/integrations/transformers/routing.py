"""Record and replay the routing of a transformers model: ``samebits.replay`` for its own routers.

A router is the module beside the experts that returns logits, probabilities and ids. Under both
blocks its probabilities are computed by the rule of the model's configuration, from the logits of
all experts, so that the choice can be another's and the gradient still reaches the router.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samebits.errors import UnsupportedError, must
from samebits.integrations.configs import from_hf_config
from samebits.nn.router import RouterOutput
from samebits.replay import Recorder, RecordError, RoutingRecord
from samebits.replay.hooks import Probs, check_layers, not_called, with_recorded
from samebits.routing import Routing, RoutingRule

# Of a router while a record is replayed through it.
_REPLAYED = "_samebits_replayed"


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Note the routing of every router of ``model`` until the block ends; see ``samebits.replay``.

    Raises:
        UnsupportedError: The model's configuration or its routers are not known, or a router's
            probabilities are not those of its configuration's rule.
        ValueError: The model has no such router.

    Determinism: the model's choice, with the probabilities of this library.
    """
    routers, rule = _routers(model)
    recorder = Recorder(_numbers(routers))
    checked: set[str] = set()

    def note(name: str, module: nn.Module, _arguments: Any, out: Any) -> Any:
        logits, probs, ids = _parts(name, out)
        if hasattr(module, _REPLAYED):  # what it gives is this library's already
            recorder.note(name, Routing(ids, probs, recorder.num_experts[name]))
            return out
        _check_once(name, (logits, probs, ids), rule, checked)
        routed = _routed(logits, rule, ids)
        recorder.note(name, routed.routing)
        return _as_given(logits, probs, routed)

    with _hooked(routers, note):
        yield recorder


@contextmanager
def replaying(model: nn.Module, record: RoutingRecord, probs: Probs = "computed") -> Iterator[None]:
    """Give every router of ``model`` the recorded choice until the block ends; see above.

    Args:
        model: The model.
        record: The routing of the tokens that it is called with, in their order.
        probs: See ``samebits.replay.replaying``.

    Raises:
        UnsupportedError: See ``recording``.
        ValueError: The routers, their N or T are not the record's.
        RecordError: A probability is not the recorded one ("same"), or a router was not called.

    Determinism: exact.
    """
    routers, rule = _routers(model)
    check_layers(_numbers(routers), record)
    called: set[str] = set()

    def give(name: str, _module: nn.Module, _arguments: Any, out: Any) -> Any:
        logits, given, chosen = _parts(name, out)
        _check_once(name, (logits, given, chosen), rule, called)
        if logits.shape[0] != record.tokens:
            text = f"be called with the record's T = {record.tokens} tokens"
            raise ValueError(must(name, text, logits.shape[0]))
        ids = record.layers[name].routing(logits.device).topk_ids
        routed = with_recorded(name, _routed(logits, rule, ids), record, probs)
        return _as_given(logits, given, routed)

    for router in routers.values():
        setattr(router, _REPLAYED, True)
    try:
        with _hooked(routers, give):
            yield
    finally:
        for router in routers.values():
            delattr(router, _REPLAYED)
    if called != set(routers):
        raise RecordError(not_called(sorted(set(routers) - called)))


def _check_once(
    name: str, parts: tuple[Tensor, Tensor, Tensor], rule: RoutingRule, done: set[str]
) -> None:
    """Raise unless the rule gives a router's own choice its own probabilities, at its first call.

    A router may return logits that it has capped or scaled already.
    """
    if name in done:
        return
    done.add(name)
    logits, probs, ids = (part.detach() for part in parts)
    if torch.compiler.is_compiling() or not logits.numel():
        return
    computed = _routed(logits, rule, ids).routing.topk_probs
    apart = (computed - probs.to(computed.dtype)).abs().max()
    # Between two roundings to bf16 and what another function would give.
    if not bool(apart <= 2.0**-6 * computed.abs().max()):
        raise UnsupportedError(
            f"{name} computes other probabilities from its logits than its configuration says: "
            f"{float(apart):.3g} apart"
        )


def _routed(logits: Tensor, rule: RoutingRule, ids: Tensor) -> RouterOutput:
    return RouterOutput(Routing.from_logits(logits, rule, topk_ids=ids.to(torch.int64)), logits)


def _as_given(logits: Tensor, probs: Tensor, routed: RouterOutput) -> tuple[Tensor, ...]:
    return logits, routed.routing.topk_probs.to(probs.dtype), routed.routing.topk_ids


def _parts(name: str, out: Any) -> tuple[Tensor, Tensor, Tensor]:
    fits = (
        isinstance(out, tuple)
        and len(out) == 3
        and all(isinstance(part, Tensor) and part.dim() == 2 for part in out)
        and not out[2].is_floating_point()
        and out[1].shape == out[2].shape
    )
    if not fits:
        raise UnsupportedError(f"{name} does not return logits, probabilities and ids")
    logits, probs, ids = out
    return logits, probs, ids


def _numbers(routers: dict[str, Any]) -> dict[str, int]:
    return {name: int(router.num_experts) for name, router in routers.items()}


def _routers(model: nn.Module) -> tuple[dict[str, Any], RoutingRule]:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(must("model", "have a configuration", type(model).__name__))
    specs = from_hf_config(config)
    beyond = sorted({spec.beyond for spec in specs.values() if spec.beyond is not None})
    rules = {spec.rule for spec in specs.values()}
    if beyond or len(rules) != 1:
        reason = "; ".join(beyond) or "its layers have several rules"
        raise UnsupportedError(f"the routing of {type(model).__name__} is no single rule: {reason}")
    routers = {
        f"{path}.{name}".lstrip("."): child
        for path, module in model.named_modules()
        if "experts" in dict(module.named_children())
        for name, child in module.named_children()
        if name in ("gate", "router") and hasattr(child, "num_experts")
    }
    if len(routers) != len(specs):
        rule = f"have a router beside the experts of each of {len(specs)} layers"
        raise UnsupportedError(must("model", rule, f"{len(routers)} found"))
    return routers, rules.pop()


@contextmanager
def _hooked(routers: dict[str, Any], function: Any) -> Iterator[None]:
    handles = [m.register_forward_hook(partial(function, name)) for name, m in routers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
