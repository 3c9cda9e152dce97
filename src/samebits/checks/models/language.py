"""Judge whole language models: what an experts implementation costs in log-probability."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from samebits.checks.models.finding import Finding
from samebits.checks.models.protocol import LanguageBuilder, ModelProvider


def judge_language(
    builder: LanguageBuilder,
    provider: ModelProvider,
    implementations: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> Iterator[Finding]:
    yield from ()
