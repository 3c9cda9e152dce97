"""Enter the library into transformers' experts interface, and translate the experts of a model.

``register()`` enters the name ``samebits``; ``attach(model)`` translates and verifies. Nothing else
in transformers is touched: no class, no method, nothing of a configuration but the implementation's
name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.formats import Parameters
from samebits.integrations.transformers import fp8
from samebits.integrations.transformers.interface import is_decorated, load
from samebits.integrations.transformers.notes import notes_of
from samebits.integrations.transformers.reach import unreachable
from samebits.integrations.transformers.translation import (
    ATTRIBUTE,
    PACKED,
    Translation,
    changed,
    is_current,
    packed_weights_of,
    weights_of,
)
from samebits.integrations.transformers.verify import translate
from samebits.problem import ProbPlacement
from samebits.routing import Routing

NAME = "samebits"

_EXACT_IN_FP32 = (torch.bfloat16, torch.float16)

torch.library.define("samebits::refuse", "(Tensor x, str reason) -> Tensor")


def _refuse(x: Tensor, reason: str) -> Tensor:
    raise UnsupportedError(f"{reason} (x of shape {tuple(x.shape)})")


# torch.compile calls the fake while it traces. A raise in traced Python would only break the graph
# and run the frame uncompiled; a raise in an operator reaches the caller.
torch.library.impl("samebits::refuse", "CompositeExplicitAutograd", _refuse)
torch.library.register_fake("samebits::refuse", _refuse)


def register() -> None:
    """Enter the name ``samebits`` into transformers' experts interface and into its FP8 twin.

    Idempotent. transformers checks a requested name against both interfaces together, so the name
    must exist in both.

    Raises:
        ImportError: transformers is absent or has no experts interface.

    Determinism: no arithmetic.
    """
    interface = load()
    interface.moe.ExpertsInterface.register(NAME, experts_forward)
    interface.fp8.FP8ExpertsInterface.register(NAME, experts_forward)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run ``samebits.experts`` on the parameters of an experts module; its registered forward.

    A module that no ``attach`` has seen, or whose scalars changed since, is translated and verified
    first; under torch.compile both raise.

    Args:
        self: The experts module.
        hidden_states: ``(T, H)``.
        top_k_index: ``(T, K)``, integers; ids from E on are slots of other ranks and contribute 0.
        top_k_weights: ``(T, K)``; bf16 and fp16 are widened to fp32, which is exact.

    Returns:
        ``(T, H)`` in the dtype of ``hidden_states``; differentiable (quantised weights are frozen).

    Raises:
        UnsupportedError: The module cannot be translated, or is compiled without ``attach``.
        ValueError: See ``samebits.experts``.

    Determinism: see ``samebits.experts``.
    """
    translation: Translation | None = getattr(self, ATTRIBUTE, None)
    if translation is None or not is_current(self, translation):
        if torch.compiler.is_compiling():
            refused: Tensor = torch.ops.samebits.refuse(hidden_states, _stale(self, translation))
            return refused
        translation = translate(self)
        setattr(self, ATTRIBUTE, translation)
    weights = parameters_of(self, translation, hidden_states.dtype)
    num_experts = weights.down.shape[0]
    if getattr(self, "num_experts", num_experts) != num_experts:
        rule = f"hold num_experts = {self.num_experts} experts"
        raise ValueError(must("down_proj", rule, num_experts))
    # transformers 5.17 has no such flag; there, too, only expert parallelism makes such ids.
    if getattr(self, "_is_expert_parallel", True):
        top_k_index = top_k_index.clamp(max=num_experts)
    if top_k_index.dtype not in (torch.int32, torch.int64):
        top_k_index = top_k_index.to(torch.int64)
    if top_k_weights.dtype in _EXACT_IN_FP32:
        top_k_weights = top_k_weights.float()
    out = experts(
        hidden_states,
        Routing(top_k_index, top_k_weights),
        weights,
        translation.activation,
        placement=ProbPlacement.FC2_OUTPUT,
    )
    # Autocast narrows inside; the interface promises the dtype it was given.
    return out.to(hidden_states.dtype)


def parameters_of(module: nn.Module, translation: Translation, dtype: torch.dtype) -> Parameters:
    """Return the parameters of ``module``, quantised where it holds them so; ``dtype`` is D."""
    if getattr(module, PACKED, None) is not None:
        return packed_weights_of(module, translation)
    if fp8.is_quantized(module):
        return fp8.quantized_weights_of(module, translation, dtype)
    return weights_of(module, translation)


def _stale(module: nn.Module, translation: Translation | None) -> str:
    name = type(module).__name__
    hint = "call samebits.integrations.transformers.attach(model) before compiling"
    if translation is None:
        return f"{name} is not attached: {hint}"
    return f"{name}: {changed(module, translation)} changed since attach; {hint} again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What attach() did with one experts module."""

    # Path in the model; "" for the module itself.
    path: str
    # Name of its class.
    cls: str
    # ``Activation.key``.
    activation: str
    # ``Layout.key``.
    layout: str
    # "out_in" or "in_out": how the matrices are stored.
    orientation: str
    # How the translation was verified, with the errors measured.
    verified: str
    # What a reader should know; empty where there is nothing.
    note: str


class Table(tuple[Row, ...]):
    """Rows of attach(), one for each experts module, in the order of the model."""

    def __str__(self) -> str:
        columns = ("path", "cls", "activation", "layout", "orientation", "verified", "note")
        lines = [columns, *(tuple(str(getattr(row, c)) for c in columns) for row in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        padded = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join(line.rstrip() for line in padded)


def attach(model: nn.Module) -> Table:
    """Translate every experts module of ``model`` and switch a transformers model to ``samebits``.

    Each translation is verified against the class's own forward and gate before it is kept. Where
    one module cannot be translated nothing is changed at all. Idempotent. Parameters stay where
    they are: the library computes with views of them.

    Args:
        model: A transformers model, or a module that holds experts modules, or one of them. Of a
            model, ``set_experts_implementation`` is called; of any other module the configuration
            is left alone, because modules may share it.

    Returns:
        One row for each experts module.

    Raises:
        TypeError: ``model`` is no module.
        ImportError: transformers is absent or has no experts interface.
        UnsupportedError: Some experts cannot be translated, or the interface does not reach them;
            the message gives the reason for each class.
        ValueError: The model holds no experts.

    Determinism: no arithmetic on the model.
    """
    require_type("model", model, nn.Module)
    register()
    interface = load()
    found = {path: m for path, m in model.named_modules() if is_decorated(m, interface)}
    refused = dict(unreachable(model, set(found.values())))
    translations: dict[str, Translation] = {}
    for path, module in found.items():
        try:
            translations[path] = translate(module)
        except UnsupportedError as error:
            refused[path] = f"{type(module).__name__}: {error}"
    if refused:
        raise UnsupportedError(_refusal(refused))
    if not found:
        raise ValueError(must("model", "hold an experts module", type(model).__name__))
    _select(model, list(found.values()))
    for path, module in found.items():
        setattr(module, ATTRIBUTE, translations[path])
    return Table(
        Row(
            path=path,
            cls=type(module).__name__,
            activation=translations[path].activation.key,
            layout=translations[path].layout.key,
            orientation="in_out" if translations[path].transposed else "out_in",
            verified=translations[path].verified,
            note=notes_of(module, translations[path], NAME),
        )
        for path, module in found.items()
    )


def _refusal(refused: dict[str, str]) -> str:
    """Return one line for each reason, with the first module it holds for and their number."""
    paths: dict[str, list[str]] = {}
    for path, reason in refused.items():
        paths.setdefault(reason, []).append(path or "the module itself")
    lines = [
        f"  {reason} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"
        for reason, where in paths.items()
    ]
    return "\n".join(["samebits cannot be attached because", *lines, "hint: docs/refused.md"])


def _select(model: nn.Module, modules: list[nn.Module]) -> None:
    switch = getattr(model, "set_experts_implementation", None)
    if switch is None:
        return
    switch(NAME)
    for module in modules:
        config: Any = module.config
        # Some models give each layer a copy of the configuration, which the call above misses.
        if config._experts_implementation != NAME:
            config._experts_implementation = NAME
