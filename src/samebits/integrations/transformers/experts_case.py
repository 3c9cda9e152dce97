"""One experts class of transformers as a case of `samebits check models`."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samebits.checks.models.protocol import Evidence, Plain, Results, Run, Sizes, UnbuildableError
from samebits.integrations.transformers import tiny
from samebits.integrations.transformers.implementations import EAGER, SAMEBITS, device
from samebits.integrations.transformers.oracle import Float64Casts
from samebits.integrations.transformers.plain_loop import plain_loop, projections
from samebits.integrations.transformers.plugin import attach
from samebits.integrations.transformers.stand_in import sonicmoe_runs_here, sonicmoe_stand_in
from samebits.integrations.transformers.zoo import ExpertsClass
from samebits.testing.numerics import relative_error

# An expert that no token chooses: every gradient of its parameters must be exactly 0. It is not the
# last one, so that skipping the last one shows.
_UNUSED = 2
_AGREES = 1e-12

Forward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """A class that was found, with ``build``."""

    found: ExpertsClass

    @property
    def name(self) -> str:
        """``<model>.<Class>``."""
        return self.found.name

    def build(self, *, odd: bool = False) -> "TinyExperts":
        """Build it; see ``samebits.integrations.transformers.tiny``."""
        return TinyExperts(self.found, tiny.ODD_SIZES if odd else tiny.DEFAULT_SIZES)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call, in the working dtype; probabilities fp32 (fp64 for fp64)."""

    x: Tensor
    topk_ids: Tensor
    topk_probs: Tensor
    dout: Tensor
    # (T, K) bool: slots that are dropped.
    dropped: Tensor

    def to(self, place: torch.device) -> "Inputs":
        """Return them on another device."""
        tensors = (self.x, self.topk_ids, self.topk_probs, self.dout, self.dropped)
        return Inputs(*(tensor.to(place) for tensor in tensors))


class TinyExperts:
    """An ``ExpertsCase`` over a tiny instance; every run works on its own copy of the module."""

    def __init__(self, found: ExpertsClass, sizes: Sizes) -> None:
        self._found = found
        self._sizes = sizes
        self._master = tiny.build(found, sizes)
        names = [n for n, p in self._master.named_parameters() if p.shape[0] == sizes.E]
        self._per_expert = frozenset(f"d_{name}" for name in names)
        self._fits: bool | None = None

    @property
    def name(self) -> str:
        """``<model>.<Class>``."""
        return self._found.name

    @property
    def sizes(self) -> Sizes:
        """The sizes it was built with."""
        return self._sizes

    @property
    def per_expert(self) -> frozenset[str]:
        """Gradients of parameters whose first index is the expert."""
        return self._per_expert

    def scalars(self) -> dict[str, float]:
        """Return the numbers that the module holds as attributes, by dotted name."""
        return tiny.scalars(self._master)

    def binding(self) -> dict[str, tuple[float, float]]:
        """Return, for each clamp limit, the shares of z beyond it on either side."""
        inputs = self._inputs(torch.float32, drop=False)
        first, _ = projections(self._master)
        with torch.no_grad():
            chosen = [(inputs.topk_ids == e).any(1) for e in range(self._sizes.E)]
            z = torch.cat([first(inputs.x[rows], e) for e, rows in enumerate(chosen)])
        return {
            name: (float((z > limit).float().mean()), float((z < -limit).float().mean()))
            for name, limit in tiny.limits(self._master).items()
        }

    def run(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Run:
        """Run one implementation; see ``ExpertsCase.run``."""
        place = device()
        module = self._runnable(dtype).to(place)
        module.config._experts_implementation = implementation
        if dropped:
            _expect_dropped(module)
        context, evidence = kernel(implementation)
        with context:
            if implementation == SAMEBITS:
                self._attach(module)
            inputs = self._inputs(dtype, drop=dropped)
            if dropped:
                inputs = _marked(inputs, self._sizes.E)
            inputs = inputs.to(place)
            if scalars:
                _forward_backward(module, _call, inputs)
                _set(module, scalars)
            results = _forward_backward(module, _call, inputs)
            return Run({name: value.cpu() for name, value in results.items()}, evidence)

    def oracle(
        self,
        implementation: str,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Results:
        """Run in fp64; see ``ExpertsCase.oracle``.

        A dropped slot keeps its expert here, with probability 0: that is the same function, and it
        needs no class to know about dropped slots. Its probability's gradient is set to 0.
        """
        module = self._module(dtype, torch.float64)
        module.config._experts_implementation = implementation
        _set(module, scalars or {})
        inputs = _map(self._inputs(dtype, drop=dropped), torch.Tensor.double)
        with Float64Casts():
            return self._judged(_forward_backward(module, _call, inputs))

    def plain(
        self,
        dtype: torch.dtype,
        *,
        dropped: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Plain:
        """Run the contract's plain loop, or the class's own where that loop does not fit."""
        if self._fits is None:
            self._fits = self._loop_fits(dtype)
        fits = self._fits
        wide = torch.float32 if dtype != torch.float64 and fits else dtype
        module = self._module(dtype, wide)
        _set(module, scalars or {})
        inputs = self._inputs(dtype, drop=dropped)
        if not fits:
            results, loop = _forward_backward(module, _call, inputs), "the class's own loop"
        else:
            results, loop = _forward_backward(module, plain_loop, inputs), "the contract's loop"
        return Plain(self._judged(results), loop)

    def _judged(self, results: Results) -> Results:
        """Return the results that the implementations are judged by."""
        return results

    def _loop_fits(self, dtype: torch.dtype) -> bool:
        """Return whether the plain loop in fp64 is the class's function."""
        module = self._module(dtype, torch.float64)
        inputs = _map(self._inputs(dtype, drop=False), torch.Tensor.double)
        exact = self.oracle(EAGER, dtype)
        with Float64Casts():
            loop = _forward_backward(module, plain_loop, inputs)
        return all(relative_error(loop[name], exact[name]) <= _AGREES for name in exact)

    def _attach(self, module: nn.Module) -> None:
        attach(module)

    def _runnable(self, dtype: torch.dtype) -> Any:
        """Return a copy for an implementation to run."""
        return self._module(dtype, dtype)

    def _module(self, dtype: torch.dtype, wide: torch.dtype) -> Any:
        """Return a copy with parameters rounded to ``dtype`` and held in ``wide``."""
        module: Any = copy.deepcopy(self._master).to(dtype).to(wide)
        module.config = copy.deepcopy(self._master.config)
        return module

    def _inputs(self, dtype: torch.dtype, *, drop: bool) -> Inputs:
        size = self._sizes
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(size.T, size.H, generator=generator).to(dtype)
        used = torch.tensor([e for e in range(size.E) if e != _UNUSED])
        scores = torch.rand(size.T, size.E - 1, generator=generator)
        topk_ids = used[scores.argsort(1)[:, : size.K]]
        # Every used expert gets a row, the last one included.
        topk_ids[: size.E - 1, 0] = used
        for row in range(size.E - 1):
            taken = [int(e) for e in used if e != used[row]]
            topk_ids[row, 1:] = torch.tensor(taken[: size.K - 1])
        probs = (torch.rand(size.T, size.K, generator=generator) + 0.05).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        dout = torch.randn(size.T, size.H, generator=generator).to(dtype)
        dropped = torch.zeros(size.T, size.K, dtype=torch.bool)
        if drop:
            dropped = torch.rand(size.T, size.K, generator=generator) < 1 / 3
            dropped[1] = True
        return Inputs(x, topk_ids, probs.masked_fill(dropped, 0.0), dout, dropped)


def _call(module: nn.Module, x: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Tensor:
    out = module(x, topk_ids, topk_probs)
    if not isinstance(out, Tensor):
        raise UnbuildableError(
            f"{type(module).__name__} returns {type(out).__name__}, not a tensor"
        )
    return out


def _forward_backward(module: Any, forward: Forward, inputs: Inputs) -> Results:
    x = inputs.x.clone().requires_grad_()
    probs = inputs.topk_probs.clone().requires_grad_()
    out = forward(module, x, inputs.topk_ids.clone(), probs)
    leaves = {"d_x": x, "d_topk_probs": probs}
    leaves |= {f"d_{name}": p for name, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        out, list(leaves.values()), inputs.dout, allow_unused=True, materialize_grads=True
    )
    results = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
    # Where matrices are packed there is no parameter to ask.
    held = module.num_experts if module.down_proj is None else module.down_proj.shape[0]
    if inputs.topk_ids.max() < held:
        # Dropped by probability 0 only: the slot's expert still sees a gradient here.
        results["d_topk_probs"] = results["d_topk_probs"].masked_fill(inputs.dropped, 0.0)
    return results


def _marked(inputs: Inputs, experts: int) -> Inputs:
    """Return inputs whose dropped slots carry transformers' sentinel, the id ``experts``."""
    ids = inputs.topk_ids.masked_fill(inputs.dropped, experts)
    return Inputs(inputs.x, ids, inputs.topk_probs, inputs.dout, inputs.dropped)


def _expect_dropped(module: Any) -> None:
    """Tell a module of transformers >= 5.24 that ids may be sentinels."""
    if hasattr(module, "_is_expert_parallel"):
        module._is_expert_parallel = True


def _map(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    x, probs, dout = (function(t) for t in (inputs.x, inputs.topk_probs, inputs.dout))
    return Inputs(x, inputs.topk_ids, probs, dout, inputs.dropped)


def _set(module: nn.Module, scalars: Mapping[str, float]) -> None:
    for name, value in scalars.items():
        tiny.set_scalar(module, name, value)


def kernel(implementation: str) -> tuple[AbstractContextManager[None], Evidence]:
    """Return the context in which an implementation's kernel runs, and what that shows."""
    if implementation == "sonicmoe" and not sonicmoe_runs_here():
        return sonicmoe_stand_in(), "arguments"
    return nullcontext(), "run"
