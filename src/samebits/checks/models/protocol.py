"""What the check asks of a model: everything it knows of a framework comes through these protocols.

A provider (`samebits.integrations.transformers`) implements them; the check never imports one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from samebits.checks.result import FOREIGN_ERRORS as FOREIGN_ERRORS

# "run": the implementation itself ran. "arguments": its kernel cannot run here, so a stand-in in
# torch computed what the arguments that its adapter passed ask for.
Evidence = Literal["run", "arguments"]

# Output and gradients by name: "out", "d_x", "d_topk_probs", "d_<parameter>".
Results = dict[str, Tensor]


class Sizes(NamedTuple):
    """The sizes of a tiny case; pairwise different, so that no swapped dimension can pass."""

    T: int
    K: int
    E: int
    H: int
    F: int

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in zip(self._fields, self, strict=True))


class Run(NamedTuple):
    """What one implementation computed."""

    results: Results
    evidence: Evidence


class Plain(NamedTuple):
    """The plain loop's results in the working dtype, and which loop it was."""

    results: Results
    loop: str


class ExpertsCase(Protocol):
    """One experts class, built tiny, with fixed parameters, tokens and routing."""

    @property
    def name(self) -> str:
        """``<model>.<Class>``, unique."""

    @property
    def sizes(self) -> Sizes:
        """The sizes it was built with."""

    @property
    def per_expert(self) -> frozenset[str]:
        """Results whose first index is the expert: the budget judges them expert by expert."""

    def scalars(self) -> Mapping[str, float]:
        """Numbers that the module holds as attributes, by dotted name: what sensitivity varies."""

    def binding(self) -> Mapping[str, tuple[float, float]]:
        """For each clamp limit: the shares of z above ``+limit`` and below ``-limit``."""

    def run(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Run:
        """Run one implementation forward and backward.

        Args:
            implementation: A name that ``ModelProvider.implementations`` lists.
            dtype: D, of the parameters and tokens.
            dropped: Drop about a third of the slots, among them all slots of one token.
            scalars: Run once as built, then set these attributes **on the same module** and run
                again; the results are the second run's.
        """

    def oracle(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Results:
        """Run in fp64 on the values rounded to ``dtype``, with every cast mapped to fp64."""

    def plain(
        self,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Plain:
        """Run the plain loop in ``dtype``: what the error budget is measured against."""


class Scored(NamedTuple):
    """Log-probabilities of the target tokens, ``(B, S)`` fp64, and how they came about."""

    log_probs: Tensor
    evidence: Evidence


class Flips(NamedTuple):
    """Routing choices (one per token and layer) that differ from the oracle's, of how many."""

    flipped: int
    choices: int


class LanguageCase(Protocol):
    """One whole tiny language model, whose experts decide at least half a nat.

    Every run but ``flips`` replays the routing of the oracle, ids and probabilities, so that one
    choice that tips over cannot hide (or stand for) an error of the experts.
    """

    @property
    def ablation(self) -> float:
        """Mean |Δ log p| in nats where the experts' outputs are set to 0."""

    def exact(self, dtype: torch.dtype) -> Tensor:
        """Return the log-probabilities in fp64, of the parameters rounded to ``dtype``."""

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return them in ``dtype`` with the plain loop as experts."""

    def run(self, implementation: str, dtype: torch.dtype, *, split: bool = False) -> Scored:
        """Return them in ``dtype`` by one implementation; ``split`` runs each sequence alone."""

    def flips(self, implementation: str, dtype: torch.dtype) -> Flips:
        """Return how often the model's own router chooses other experts than the oracle's."""


class Found(Protocol):
    """One experts class of the framework, not built yet."""

    @property
    def name(self) -> str:
        """``<model>.<Class>``, unique."""

    def build(self, *, odd: bool = False) -> ExpertsCase:
        """Build it tiny; ``odd`` takes sizes that are multiples of nothing.

        Raises:
            UnbuildableError: The builder does not know how.
        """


class ModelProvider(Protocol):
    """A framework's experts classes and the implementations that can run them."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions that decide the results, by package."""

    def implementations(self) -> Sequence[str]:
        """Every registered implementation, the framework's own loop first."""

    def experts(self) -> Sequence[Found]:
        """Every experts class that can be found, in order of name."""

    def languages(self, *, full: bool) -> Iterable["LanguageBuilder"]:
        """Builders of whole language models: a few families, or with ``full`` all there are."""

    def refuses(self, error: BaseException, implementation: str) -> bool:
        """Return whether ``error`` is a clear refusal rather than a crash."""


class LanguageBuilder(Protocol):
    """A whole language model that may or may not build tiny."""

    @property
    def name(self) -> str:
        """``<model>.<Class>`` of the language model."""

    def build(self) -> LanguageCase:
        """Build it tiny.

        Raises:
            UnbuildableError: The builder does not know how.
        """


class UnbuildableError(Exception):
    """A class exists and our tiny builder cannot make one; the check could not look, so not_run."""
