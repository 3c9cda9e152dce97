"""transformers as a provider of `samebits check models`."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import transformers

from samebits._version import __version__
from samebits.checks.models.protocol import Found, LanguageBuilder, UnbuildableError
from samebits.integrations.transformers import fp8_case, packed_case, zoo
from samebits.integrations.transformers import implementations as registered
from samebits.integrations.transformers.experts_case import FoundExperts, TinyExperts


@dataclass(frozen=True, slots=True)
class FoundBroken:
    """A module whose classes cannot be looked at here."""

    broken: zoo.BrokenModule

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.broken.name

    def build(self, *, odd: bool = False) -> TinyExperts:
        """Raise ``UnbuildableError`` with the reason."""
        del odd
        raise UnbuildableError(self.broken.reason)


def _device_name() -> str:
    place = registered.device()
    return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type


class Transformers:
    """The installed transformers: a ``ModelProvider``."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions that decide the results."""
        return {
            "samebits": __version__,
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "python": platform.python_version(),
            "device": _device_name(),
        }

    def implementations(self) -> list[str]:
        """Every registered implementation, the class's own loop first, ours last."""
        return registered.implementations()

    def experts(self) -> Sequence[Found]:
        """Every decorated class, the FP8 class, and modules that cannot be imported to look."""
        decorated: list[Found] = [
            FoundExperts(found) if isinstance(found, zoo.ExpertsClass) else FoundBroken(found)
            for found in zoo.discover()
        ]
        return [*decorated, *fp8_case.found(), *packed_case.found()]

    def languages(self, *, full: bool) -> Iterable[LanguageBuilder]:
        """Builders of whole language models."""
        from samebits.integrations.transformers import language_models

        return language_models.builders(full=full)

    def refuses(self, error: BaseException, implementation: str) -> bool:
        """Return whether ``error`` is a clear refusal."""
        return registered.refuses(error, implementation)
