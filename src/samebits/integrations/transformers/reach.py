"""Find the experts of a model that transformers' experts interface does not reach.

A model accepts any registered name, whether or not its experts look it up: Llama-4 takes the name
and runs its own code. Such classes carry no mark, so they are known by how they are named.
"""

import re
from collections.abc import Iterator

from torch import nn

_EXPERTS = re.compile(r"Expert(?!\w*Router)|(MoE|MoA|Moe|MoeBlock|SparseMLP)$")
_OTHERS = re.compile(r"Shared|Router|Gate$|Output$|PreTrained")


def looks_like_experts(name: str) -> bool:
    """Return whether a class called ``name`` holds routed experts."""
    return _EXPERTS.search(name) is not None and _OTHERS.search(name) is None


def unreachable(model: nn.Module, found: set[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield path and reason of each module that holds routed experts, and none of ``found``.

    A block is reported once, not again for the experts within.
    """
    inside = {child for module in found for child in module.modules()}
    reported: list[str] = []
    for path, module in model.named_modules():
        name = type(module).__name__
        named = path.rpartition(".")[2] == "experts" or looks_like_experts(name)
        covered = module in inside or not found.isdisjoint(module.modules())
        nested = any(prefix == "" or path.startswith(prefix + ".") for prefix in reported)
        if named and not covered and not nested:
            reported.append(path)
            yield path, f"{name}: transformers' experts interface does not reach this class"
