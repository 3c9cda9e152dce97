"""Whole language models of transformers, built tiny, as cases of `samebits check models`."""

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from samebits.checks.models.protocol import (
    FOREIGN_ERRORS,
    Flips,
    LanguageBuilder,
    Scored,
    UnbuildableError,
)
from samebits.integrations.transformers import tiny, zoo
from samebits.integrations.transformers.experts_case import kernel
from samebits.integrations.transformers.implementations import EAGER, SAMEBITS, device
from samebits.integrations.transformers.language_config import shrink
from samebits.integrations.transformers.oracle import Float64Casts
from samebits.integrations.transformers.plain_loop import plain_loop
from samebits.integrations.transformers.plugin import attach
from samebits.integrations.transformers.replay import (
    Routings,
    experts_modules,
    recorded,
    replayed,
)

# One of each function that models compute between the projections, and of each kind of router.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v4", "minimax_m3_vl", "nemotron_h")
_HEADS = ("ForCausalLM", "ForConditionalGeneration")
_MOST_PARAMETERS = 60_000_000
_BATCH, _LENGTH = 2, 32
_SMALLEST_TOKEN = 3
# Spread of the logits of a model that is sure of something, in nats.
_LOGITS = 2.0
_ABLATION = 0.5
_SCALES = [2.0**power for power in range(-12, 7)]


@dataclass(frozen=True, slots=True)
class TinyLanguage:
    """A language model class that was found, with ``build``."""

    model: str
    head: type[PreTrainedModel]

    @property
    def name(self) -> str:
        """``<model>.<Class>``."""
        return f"{self.model}.{self.head.__name__}"

    def build(self) -> "TinyLanguageModel":
        """Build it tiny.

        Raises:
            UnbuildableError: The rules for its configuration do not do, or it has no experts then.
        """
        try:
            return TinyLanguageModel(_build(self.head))
        except FOREIGN_ERRORS as error:
            raise UnbuildableError(f"{type(error).__name__}: {error}") from error


def builders(*, full: bool) -> list[LanguageBuilder]:
    """Return builders of six families, or with ``full`` of every model that has experts.

    Determinism: in order of name; of ``FAMILIES`` otherwise.
    """
    heads: dict[str, TinyLanguage] = {}
    for found in zoo.discover():
        if isinstance(found, zoo.ExpertsClass):
            model = found.name.rpartition(".")[0]
            head = _language_head(found)
            if head is not None:
                heads.setdefault(model, TinyLanguage(model, head))
    if full:
        return list(heads.values())
    return [heads[family] for family in FAMILIES if family in heads]


def _language_head(found: zoo.ExpertsClass) -> type[PreTrainedModel] | None:
    own = [
        value
        for value in vars(found.module).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == found.module.__name__
        and getattr(value, "config_class", None) is not None
        and "forward" in value.__dict__
    ]
    for ending in _HEADS:
        for value in own:
            if value.__name__.endswith(ending):
                return value
    return None


def _build(head: Any) -> Any:
    config = shrink(head.config_class())
    with torch.device("meta"):
        size = sum(p.numel() for p in head(copy.deepcopy(config)).parameters())
    if size > _MOST_PARAMETERS:
        raise UnbuildableError(f"{size / 1e6:.0f} million parameters are not tiny")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = head(config).eval()
    modules = experts_modules(model)
    if not modules:
        raise UnbuildableError("no experts in the tiny model")
    for seed, module in enumerate(modules):
        tiny.fill(module, seed=seed)
        module.config._experts_implementation = EAGER
    return model


class TinyLanguageModel:
    """A ``LanguageCase`` over a tiny model; every run works on its own copy of it."""

    def __init__(self, model: Any) -> None:
        self._master = model
        generator = torch.Generator().manual_seed(3)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._tokens = torch.randint(
            _SMALLEST_TOKEN, vocabulary, (_BATCH, _LENGTH), generator=generator
        )
        self._exact: dict[torch.dtype, tuple[Tensor, Routings]] = {}
        self._scale_head()
        self._ablation = self._scale_experts()
        with Float64Casts():
            logits = _logits(self._copy(torch.float64, torch.float64), self._tokens)
        # Targets are drawn from the model itself: what it would generate and be trained on.
        chances = logits.double().softmax(-1).flatten(0, 1)
        self._targets = torch.multinomial(chances, 1, generator=generator).view(_BATCH, _LENGTH)

    @property
    def ablation(self) -> float:
        """Mean |Δ log p| in nats where the experts' outputs are set to 0."""
        return self._ablation

    def exact(self, dtype: torch.dtype) -> Tensor:
        """Return the oracle's log-probabilities; see ``LanguageCase.exact``."""
        return self._oracle(dtype)[0]

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return log-probabilities with the plain loop as experts."""
        model = self._copy(dtype, dtype)
        wide = torch.float32 if dtype != torch.float64 else dtype
        for module in experts_modules(model):
            module.forward = partial(plain_loop, copy.deepcopy(module).to(wide))
        return self._score(model, self._oracle(dtype)[1])

    def run(self, implementation: str, dtype: torch.dtype, *, split: bool = False) -> Scored:
        """Return log-probabilities by one implementation; see ``LanguageCase.run``."""
        context, evidence = kernel(implementation)
        with context:
            model = self._implemented(implementation, dtype)
            return Scored(self._score(model, self._oracle(dtype)[1], split=split), evidence)

    def flips(self, implementation: str, dtype: torch.dtype) -> Flips:
        """Return how many choices of the model's own router differ from the oracle's."""
        context, _ = kernel(implementation)
        with context:
            model = self._implemented(implementation, dtype)
            with recorded(model) as routings:
                _logits(model, self._tokens)
        flipped = choices = 0
        for own, theirs in zip(routings, self._oracle(dtype)[1], strict=True):
            for (ids, _), (exact, _) in zip(own, theirs, strict=True):
                flipped += int((ids.cpu().sort(-1).values != exact.sort(-1).values).any(-1).sum())
                choices += ids.shape[0]
        return Flips(flipped, choices)

    def _oracle(self, dtype: torch.dtype) -> tuple[Tensor, Routings]:
        if dtype not in self._exact:
            model = self._copy(dtype, torch.float64)
            with recorded(model) as routings, Float64Casts():
                log_probs = self._pick(_logits(model, self._tokens), self._targets)
            self._exact[dtype] = (log_probs, routings)
        return self._exact[dtype]

    def _copy(self, dtype: torch.dtype, wide: torch.dtype) -> Any:
        """Return a copy rounded to ``dtype`` and held in ``wide``, as from_pretrained would.

        Some modules stay in fp32 whatever the dtype: their code multiplies in fp32.
        """
        model = copy.deepcopy(self._master)
        kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            in_fp32 = any(f".{part}." in f".{name}." for part in kept)
            if tensor.is_floating_point() and not in_fp32:
                tensor.data = tensor.data.to(dtype)
        return model.to(wide) if wide == torch.float64 else model

    def _implemented(self, implementation: str, dtype: torch.dtype) -> Any:
        model = self._copy(dtype, dtype)
        for module in experts_modules(model):
            module.config._experts_implementation = implementation
        model.to(device())
        if implementation == SAMEBITS:
            attach(model)
        return model

    def _score(self, model: Any, routings: Routings, *, split: bool = False) -> Tensor:
        parts = [slice(b, b + 1) for b in range(_BATCH)] if split else [slice(0, _BATCH)]
        scored = []
        for part in parts:
            rows = slice(part.start * _LENGTH, part.stop * _LENGTH)
            with replayed(model, routings, rows):
                scored.append(self._pick(_logits(model, self._tokens[part]), self._targets[part]))
        return torch.cat(scored)

    @staticmethod
    def _pick(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def _scale_head(self) -> None:
        head = self._master.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UnbuildableError("its output embeddings are no linear layer")
        spread = _logits(self._master, self._tokens).std()
        with torch.no_grad():
            head.weight *= _LOGITS / spread

    def _scale_experts(self) -> float:
        """Scale down projections up until ablating the experts costs enough; return the cost."""
        modules = experts_modules(self._master)
        originals = [copy.deepcopy(module.state_dict()) for module in modules]
        without = self._with_experts(0.0, originals)
        cost = 0.0
        for scale in _SCALES:
            change = self._with_experts(scale, originals) - without
            cost = float(change.abs().mean())
            if cost >= _ABLATION:
                break
        return cost

    def _with_experts(self, scale: float, originals: list[dict[str, Any]]) -> Tensor:
        """Return log-probabilities of the whole vocabulary with experts scaled by ``scale``."""
        for module, original in zip(experts_modules(self._master), originals, strict=True):
            for name, parameter in module.named_parameters():
                if name.startswith(("down", "post_expert_norm")):
                    with torch.no_grad():
                        parameter.copy_(original[name] * scale)
        return _logits(self._master, self._tokens).double().log_softmax(-1)


def _logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        place = next(model.parameters()).device
        logits: Tensor = model(input_ids=tokens.to(place), use_cache=False).logits
    return logits.cpu()
