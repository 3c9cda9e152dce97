"""A made-up framework of one tiny function, for what the check does with any framework."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samebits.checks.models.protocol import (
    Flips,
    Plain,
    Run,
    Scored,
    Sizes,
    UnbuildableError,
)

SIZES = Sizes(T=4, K=1, E=2, H=16, F=8)


class ToyError(RuntimeError):
    """What the toy's implementations refuse with."""


def _x(dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def _function(x: Tensor, slope: float) -> dict[str, Tensor]:
    return {"out": torch.tanh(slope * x), "d_x": slope * (1 - torch.tanh(slope * x).square())}


@dataclass(frozen=True)
class ToyCase:
    """tanh(slope * x); implementations: eager and batched_mm are right, the others are named."""

    name: str
    odd: bool
    sizes: Sizes = SIZES
    per_expert: frozenset[str] = frozenset()

    def scalars(self) -> dict[str, float]:
        return {"slope": 1.0}

    def binding(self) -> dict[str, tuple[float, float]]:
        if self.name == "toy.Particular":
            raise AttributeError("no limit")
        return {"limit": (0.3, 0.1)}

    def _slope(self, scalars: Mapping[str, float] | None) -> float:
        return 1.0 if scalars is None else scalars["slope"]

    def run(self, implementation, dtype, *, dropped=False, scalars=None) -> Run:
        errors = {
            "absent": ImportError("no such kernel"),
            "refusing": ToyError("no\n  odd sizes"),
            "crashing": IndexError("out of range"),
        }
        if implementation in errors:
            raise errors[implementation]
        slope = 1.0 if implementation == "stale" else self._slope(scalars)
        results = _function(_x(dtype), slope)
        if implementation == "wrong":
            results["out"] = results["out"] * 1.5
        if implementation == "infinite":
            results["out"] = results["out"] / 0
        if implementation == "incomplete":
            del results["d_x"]
        if implementation == "misshapen":
            results["out"] = results["out"].T
        return Run(results, "arguments" if implementation == "wrong" else "run")

    def oracle(self, implementation, dtype, *, dropped=False, scalars=None) -> dict[str, Tensor]:
        if self.name == "toy.NoOracle":
            raise ToyError("needs a device")
        if self.name == "toy.Particular" and scalars is not None and scalars["slope"] < 1:
            raise ToyError("no such slope")
        exact = _function(_x(dtype).double(), self._slope(scalars))
        if implementation == "batched_mm" and self.name == "toy.TwoFunctions":
            exact["d_x"] = exact["d_x"] + 1e-6
        return exact

    def plain(self, dtype, *, dropped=False, scalars=None) -> Plain:
        return Plain(_function(_x(dtype), self._slope(scalars)), "the toy's loop")


@dataclass(frozen=True)
class Toy:
    name: str

    def build(self, *, odd: bool = False) -> ToyCase:
        if self.name == "toy.Unbuildable":
            raise UnbuildableError("no configuration fits")
        if self.name == "toy.Broken":
            raise ZeroDivisionError("in its constructor")
        return ToyCase(self.name, odd)


class ToyLanguageCase:
    def __init__(self, ablation: float) -> None:
        self.ablation = ablation

    def exact(self, dtype) -> Tensor:
        return -_x(dtype).double().abs()

    def plain(self, dtype) -> Tensor:
        return self.exact(dtype)

    def run(self, implementation, dtype, *, split=False) -> Scored:
        if implementation == "absent":
            raise ImportError("no such kernel")
        if implementation == "refusing":
            raise ToyError("no whole models")
        change = {"wrong": 0.5, "split": 0.5 if split else 0.0}.get(implementation, 0.0)
        return Scored(self.exact(dtype) - change, "run")

    def flips(self, implementation, dtype) -> Flips:
        return Flips(3, 128)


@dataclass(frozen=True)
class ToyLanguage:
    name: str
    ablation: float = 1.0

    def build(self) -> ToyLanguageCase:
        if self.name == "toy.UnbuildableLM":
            raise UnbuildableError("no configuration fits")
        return ToyLanguageCase(self.ablation)


@dataclass
class ToyProvider:
    names: tuple[str, ...] = ("toy.Experts", "twin.Experts", "toy.TwoFunctions")
    able: tuple[str, ...] = ("eager", "wrong", "absent", "refusing", "ours")
    languages_held: tuple[ToyLanguage, ...] = (ToyLanguage("toy.LM"),)
    versions: dict[str, str] = field(default_factory=lambda: {"toy": "1.0"})
    full: list[bool] = field(default_factory=list)

    def implementations(self) -> list[str]:
        return list(self.able)

    def experts(self) -> list[Toy]:
        return [Toy(name) for name in self.names]

    def languages(self, *, full: bool) -> list[ToyLanguage]:
        self.full.append(full)
        return list(self.languages_held)

    def refuses(self, error: BaseException, implementation: str) -> bool:
        return isinstance(error, ToyError)
