"""gpt-oss in MXFP4 as a case of `samebits check models`: dense to be judged by, packed to run.

Weights are frozen then: output, dx and the gradients of probabilities and biases are judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from samebits.checks.models.protocol import Results, Run, Sizes
from samebits.formats import MXFP4
from samebits.formats.packing import quantize_matrix
from samebits.integrations.transformers import tiny, zoo
from samebits.integrations.transformers.experts_case import TinyExperts
from samebits.integrations.transformers.implementations import SAMEBITS
from samebits.integrations.transformers.packing import pack_experts

_CLASS = "gpt_oss.GptOssExperts"
_MATRICES = ("gate_up_proj", "down_proj")
_FROZEN = frozenset(f"d_{name}" for name in _MATRICES)


@dataclass(frozen=True, slots=True)
class FoundPacked:
    """gpt-oss' class, with ``build``."""

    found: zoo.ExpertsClass

    @property
    def name(self) -> str:
        """``gpt_oss_mxfp4.GptOssExperts``."""
        return _CLASS.replace(".", "_mxfp4.")

    def build(self, *, odd: bool = False) -> "TinyPacked":
        """Build it; see ``samebits.integrations.transformers.tiny``."""
        return TinyPacked(self, tiny.ODD_SIZES if odd else tiny.DEFAULT_SIZES)


def found() -> list[FoundPacked]:
    """Return the case, where the installed transformers has the class.

    Determinism: in a fixed order.
    """
    classes = [c for c in zoo.discover() if isinstance(c, zoo.ExpertsClass)]
    return [FoundPacked(c) for c in classes if c.name == _CLASS]


class TinyPacked(TinyExperts):
    """A ``TinyExperts`` whose weights are numbers of MXFP4, and packed where ours runs."""

    def __init__(self, about: FoundPacked, sizes: Sizes) -> None:
        super().__init__(about.found, sizes)
        self._about = about
        self._per_expert -= _FROZEN
        with torch.no_grad():
            for name in _MATRICES:
                stored = getattr(self._master, name)
                matrix = stored.transpose(1, 2) if self._master.is_transposed else stored
                matrix.copy_(quantize_matrix(matrix, MXFP4).dequantize(torch.float32))

    @property
    def name(self) -> str:
        """See ``FoundPacked.name``."""
        return self._about.name

    def run(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Run:
        """Run ours on packed weights; see ``ExpertsCase.run``."""
        if implementation != SAMEBITS:
            raise NotImplementedError(f"{implementation} runs dense weights: see {_CLASS}")
        return super().run(implementation, dtype, dropped=dropped, scalars=scalars)

    def _judged(self, results: Results) -> Results:
        return {name: value for name, value in results.items() if name not in _FROZEN}

    def _attach(self, module: nn.Module) -> None:
        pack_experts(module, MXFP4)
