"""Compile a layer's kernels ahead of its first call."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from samebits.arguments import require_bool, require_int, require_type
from samebits.backends import choose, reference
from samebits.backends.call import DIFFERENTIABLE, PARAMETERS, Call
from samebits.env import architecture
from samebits.errors import UnsupportedError, must
from samebits.formats.descriptor import WeightFormat
from samebits.problem import DTYPES, Problem
from samebits.weight_gradients import Buffer, WeightGradients


def warmup(
    problem: Problem,
    tokens: Iterable[int],
    *,
    backend: str = "auto",
    weight_gradients: WeightGradients | None = None,
    recompute: bool = False,
) -> None:
    """Compile and load every kernel that ``problem`` needs for these token counts.

    Nothing runs and no memory is taken on the device. The first call inside a CUDA graph needs its
    kernels loaded; so does a first call that must not take seconds. Weights and ``x`` are taken to
    be contiguous and to start at multiples of 16 bytes; ids of both integer types are covered. With
    K = 1 that is also what ``grouped_experts`` needs, T being its rows.

    Args:
        problem: The calls to come, for example ``Problem.parse("H=2048 F=768 E=128 K=8
            dtype=bf16")``; with ``grad`` also their backward. Its device may be left at "cpu";
            kernels are compiled for the current GPU.
        tokens: Each T to come; T that share their tiles share kernels.
        backend: "auto", or the name of one backend.
        weight_gradients: Of the layer: its buffers are taken to be in fp32 and laid out as the
            parameters; to add to them and to overwrite them are both covered.
        recompute: Of the layer.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A token count is below 1, the problem names another architecture, or a problem
            without ``grad`` is to have gradients somewhere.
        UnsupportedError: This machine has no GPU to compile for, or no backend with kernels runs
            the problem.

    Determinism: no result.
    """
    require_type("problem", problem, Problem)
    require_bool("recompute", recompute)
    if weight_gradients is not None:
        require_type("weight_gradients", weight_gradients, WeightGradients)
    if not problem.grad and (recompute or weight_gradients is not None):
        rule = "have grad=True where weight_gradients or recompute is given"
        raise ValueError(must("problem", rule, f"Problem({problem})"))
    require_type("tokens", tokens, Iterable)
    counts = list(tokens)
    for count in counts:
        require_int("tokens", count)
        if count < 1:
            raise ValueError(must("tokens", "be >= 1", count))
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "warmup compiles kernels for the GPU of this machine, which has none; "
            "on a CPU there is nothing to compile"
        )
    here = architecture(torch.device("cuda", torch.cuda.current_device()))
    if problem.device not in ("cpu", here):
        rule = f"be of the current device ({here})"
        raise ValueError(must("problem", rule, problem.device))
    problem = replace(problem, device=here)
    module = _with_kernels(backend, problem)
    # Imported here: refusing must not need Triton.
    from samebits.ops._triton.launch import nothing_launched

    with torch.no_grad(), nothing_launched():
        for call in _calls(problem, counts):
            out, z = module.forward(problem, call, save=problem.grad and not recompute)
            if recompute:
                z = module.recomputed(problem, call)
            if problem.grad:
                _backward(module, problem, call, z, out, weight_gradients)


def _with_kernels(backend: str, problem: Problem) -> ModuleType:
    """Return the backend that runs ``problem``, unless it has nothing to compile."""
    module = choose(backend, problem)
    if module is reference:
        raise UnsupportedError(
            f"the reference would run Problem({problem}), and it has no kernels to compile"
            "\nhint: samebits explain says why no other backend can"
        )
    return module


def _backward(
    module: ModuleType,
    problem: Problem,
    call: Call,
    z: Tensor,
    dout: Tensor,
    policy: WeightGradients | None,
) -> None:
    """Call the backward as a layer with this policy does."""
    wanted = _wanted(problem, call)
    if policy is None:
        module.backward(problem, call, z, dout, wanted, {})
        return
    pairs = list(zip(DIFFERENTIABLE, wanted, strict=True))
    names = [name for name, asked in pairs if asked and name in PARAMETERS]
    if policy.delayed:
        now = tuple(asked and name not in PARAMETERS for name, asked in pairs)
        module.backward(problem, call, z, dout, now, {})
        wanted = tuple(name in names for name in DIFFERENTIABLE)
    for accumulate in (False, True) if policy.main_grad else (False,):
        held = {name: getattr(call, name) for name in names if policy.main_grad}
        into = {
            name: Buffer(torch.empty_like(tensor, dtype=torch.float32), accumulate)
            for name, tensor in held.items()
        }
        module.backward(problem, call, z, dout, wanted, into)


def _calls(problem: Problem, counts: Iterable[int]) -> Iterator[Call]:
    """Yield the calls of ``experts``, and of ``grouped_experts`` where the problem may be its."""
    whole = problem.experts == problem.E and not problem.counted
    for count, ids in product(counts, (torch.int64, torch.int32)):
        call = _call(problem, count, ids)
        yield call
        if problem.K == 1 and whole:
            yield call._replace(offsets=torch.empty(problem.E + 1, dtype=ids, device="meta"))


def _call(problem: Problem, tokens: int, ids: torch.dtype) -> Call:
    """Return tensors that have all but values: kernels are compiled for them, and not launched."""

    def made(kind: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPES[kind], device="meta")

    def bias(kind: str | None, *shape: int) -> Tensor | None:
        return None if kind is None else made(kind, *shape)

    experts, rows, dtype = problem.E, problem.activation.columns * problem.F, problem.dtype
    shapes = {
        "gate_up": (experts, rows, problem.H),
        "down": (experts, problem.H, problem.F),
    }
    matrices: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if problem.format is None:
            matrices[name] = made(dtype, *shape)
        else:
            matrices |= _stored(name, getattr(problem.format, name), shape)
    count = torch.empty(1, dtype=torch.int32, device="meta") if problem.counted else None
    return Call(
        x=made(dtype, tokens, problem.H),
        topk_ids=torch.empty(tokens, problem.K, dtype=ids, device="meta"),
        topk_probs=made(problem.probs, tokens, problem.K),
        gate_up_bias=bias(problem.gate_up_bias, experts, rows),
        down_bias=bias(problem.down_bias, experts, problem.H),
        norm_scale=None if problem.norm_eps is None else made(dtype, problem.H),
        num_valid_tokens=count,
        **matrices,
    )


def _stored(name: str, held: WeightFormat, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return the tensors of a quantised projection, by their names in a call."""
    kinds = {
        "values": (name, held.value.dtype),
        "scales": (f"{name}_scales", held.scale_dtype),
        "global_scale": (f"{name}_global", torch.float32),
    }
    return {
        kinds[part][0]: torch.empty(size, dtype=kinds[part][1], device="meta")
        for part, size in held.shapes(shape).items()
    }


def _wanted(problem: Problem, call: Call) -> tuple[bool, ...]:
    frozen = () if problem.format is None else ("gate_up", "down")
    return tuple(n not in frozen and getattr(call, n) is not None for n in DIFFERENTIABLE)
