"""Say in the table of attach() what a configuration asks for and the class does not compute."""

import re
from typing import Any

from torch import nn

from samebits.integrations.transformers import fp8
from samebits.integrations.transformers.translation import Translation

# Fields of configurations that bound or change the gate of routed experts.
_GATE_FIELD = re.compile(r"swiglu|(expert|moe|mlp).*(limit|softcap|clamp)")
_OTHERS = re.compile(r"share|router|attn|attention")


def notes_of(module: nn.Module, translation: Translation, name: str) -> str:
    """Return what the reader of the table should know of ``module``; empty where nothing."""
    config: Any = module.config
    notes = [fp8.NOTE] if fp8.is_quantized(module) else []
    notes += [
        f"the class does not apply config.{field} = {value!r}, and neither does samebits"
        for field, value in sorted(vars(config).items())
        if _GATE_FIELD.search(field) and not _OTHERS.search(field) and _ignored(value, translation)
    ]
    current = config._experts_implementation
    if current != name:
        notes.append(f"the configuration selects {current!r}: set experts_implementation={name!r}")
    return "; ".join(notes)


def _ignored(value: object, translation: Translation) -> bool:
    """Return whether ``value`` asks for something, and no scalar of the translation holds it."""
    held = {float(fact.value) for fact in translation.facts if fact.kind == "number"}
    asked = value if isinstance(value, (list, tuple)) else [value]
    numbers = [v for v in asked if isinstance(v, (int, float)) and not isinstance(v, bool) and v]
    return any(float(v) not in held for v in numbers)
