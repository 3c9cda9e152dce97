"""How large are the four causes of a gap: rounding, placement, order of sums, dropped options?

Each variant changes one thing of a layer in bf16, or of the experts of a small language model like
that of ``samebits demo``, and is compared with the contract's rounding, placement and order.
docs/differences.md has the tables. Half a minute on one core::

    PYTHONPATH=src python benchmarks/differences.py --json benchmarks/results/differences-cpu.json
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from samebits import Activation, Routing, env, experts
from samebits.checks.logprobs import Recording, compare
from samebits.checks.result import plain_table
from samebits.checks.writing import written_whole
from samebits.demo import language_model
from samebits.emulate import EMULATIONS, RoundingPoints, emulated_experts
from samebits.problem import Problem, ProbPlacement
from samebits.testing.inputs import exact, make_inputs, run_function
from samebits.testing.numerics import relative_error

FC2_INPUT, FC2_OUTPUT = ProbPlacement.FC2_INPUT, ProbPlacement.FC2_OUTPUT
OPTIONS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)
LAYER = Problem(
    H=512,
    F=256,
    E=16,
    K=4,
    dtype="bf16",
    activation=OPTIONS,
    gate_up_bias="bf16",
    down_bias="bf16",
)
TOKENS = 256

Function = Callable[..., Tensor]
reference = partial(experts, backend="reference")


def other_product_order(
    x: Tensor, routing: Routing, weights: Any, *rest: Any, **more: Any
) -> Tensor:
    """Compute the layer with the hidden columns of the first product in another order."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    moved = replace(weights, gate_up=weights.gate_up[:, :, order])
    return reference(x[:, order].contiguous(), routing, moved, *rest, **more)


def other_expert_order(
    x: Tensor, routing: Routing, weights: Any, *rest: Any, **more: Any
) -> Tensor:
    """Compute the layer with experts renumbered backwards: a token's terms add in reverse."""
    last = weights.down.shape[0] - 1
    renumbered = Routing(last - routing.topk_ids, routing.topk_probs, routing.num_experts)
    return reference(x, renumbered, weights.map(lambda tensor: tensor.flip(0)), *rest, **more)


def variants() -> Iterator[tuple[str, str, Function, ProbPlacement]]:
    """Yield cause, name, function and placement; the baseline has the same placement."""
    for point in fields(RoundingPoints):
        if point.name in ("slope_once", "scaled"):
            continue
        points = RoundingPoints(**{point.name: True})
        yield (
            "rounding",
            f"{point.name} alone",
            partial(emulated_experts, emulate=points),
            FC2_OUTPUT,
        )
    for name, emulation in EMULATIONS.items():
        placement = FC2_OUTPUT if FC2_OUTPUT in emulation.placements else FC2_INPUT
        yield "rounding", name, partial(emulated_experts, emulate=name), placement
    yield "order", "columns of the first product", other_product_order, FC2_OUTPUT
    yield "order", "experts of a token", other_expert_order, FC2_OUTPUT


def measure_layer() -> Iterator[dict[str, Any]]:
    """Yield the distance of every variant of one layer from its baseline, and of that from fp64."""
    bases = {}
    for placement in (FC2_OUTPUT, FC2_INPUT):
        problem = replace(LAYER, placement=placement)
        inputs = make_inputs(problem, TOKENS)
        bases[placement] = run_function(problem, inputs, reference)["out"]
        truth = exact(problem, inputs)["out"]
        floor = relative_error(bases[placement].double(), truth)
        yield {"cause": "floor", "name": f"{placement} against fp64", "distance": floor}
    for cause, name, function, placement in variants():
        problem = replace(LAYER, placement=placement)
        out = run_function(problem, make_inputs(problem, TOKENS), function)["out"]
        yield _layer_row(cause, name, out, bases[placement])
    yield _layer_row("placement", "fc2_input, not fc2_output", bases[FC2_INPUT], bases[FC2_OUTPUT])
    inputs = make_inputs(LAYER, TOKENS)
    for name, change in {
        "limit": {"limit": None},
        "slope": {"alpha": 1.0},
        "offset": {"linear_offset": 0.0},
        "all three": {"limit": None, "alpha": 1.0, "linear_offset": 0.0},
    }.items():
        problem = replace(LAYER, activation=replace(OPTIONS, **change))
        out = run_function(problem, inputs, reference)["out"]
        yield _layer_row("dropped", name, out, bases[FC2_OUTPUT])


def _layer_row(cause: str, name: str, out: Tensor, base: Tensor) -> dict[str, Any]:
    return {
        "cause": cause,
        "name": name,
        "distance": relative_error(out.double(), base.double()),
        "other_bits": float((out != base).double().mean()),
    }


class Replay:
    """Stands for ``experts`` in the model: a function in bf16, with the routing of the first run.

    All else stays fp32: rounding elsewhere, of logits above all, would hide that of the experts.
    """

    def __init__(self) -> None:
        self.routings: list[Routing] = []
        self.function: Function = reference
        self.placement = FC2_OUTPUT
        self.recording = True
        self._next = 0

    def __call__(
        self, x: Tensor, routing: Routing, weights: Any, activation: Activation, **more: Any
    ) -> Tensor:
        if self.recording:
            self.routings.append(routing)
        else:
            routing = self.routings[self._next % len(self.routings)]
            self._next += 1
        more.pop("backend")
        if more["placement"] == FC2_OUTPUT:
            more["placement"] = self.placement
        narrow = weights.map(Tensor.bfloat16)
        return self.function(x.bfloat16(), routing, narrow, activation, **more).float()


def measure_model(steps: int, sequences: int) -> Iterator[dict[str, Any]]:
    """Yield the gap of every variant of a trained language model, in nats."""
    torch.manual_seed(0)
    text = language_model.read_text()
    model = language_model.LanguageModel(hidden=64)
    loss = language_model.train(model, text, steps=steps)[-1]
    batch = next(language_model.batches(text, model, sequences, seed=1))
    replay = Replay()
    trained = language_model.TRAINED

    def record(name: str, how: Any = trained) -> Recording:
        values = language_model.serve(model, batch, how)
        return Recording(name=name, log_probs=list(values.double()))

    with patch.object(language_model, "experts", replay):
        bases = {FC2_OUTPUT: record("contract")}
        replay.recording = False
        replay.placement = FC2_INPUT
        bases[FC2_INPUT] = record("fc2_input")
        yield _model_row("placement", "fc2_input, not fc2_output", *bases.values())
        for cause, name, function, placement in variants():
            replay.function, replay.placement = function, placement
            yield _model_row(cause, name, bases[placement], record(name))
        replay.function, replay.placement = reference, FC2_OUTPUT
        for name, how in language_model.MISTAKES.items():
            yield _model_row("dropped", name, bases[FC2_OUTPUT], record(name, how))
    yield {"cause": "floor", "name": "loss of the model, nats a byte", "mean": loss}


def _model_row(cause: str, name: str, base: Recording, other: Recording) -> dict[str, Any]:
    rows = compare(base, other)
    found = {row.case: row.verdict for row in rows if row.verdict == "fail" and row.case != "gap"}
    return {"cause": cause, "name": name, **rows[0].figures, "taken_for": sorted(found)}


def show(layer: list[dict[str, Any]], model: list[dict[str, Any]]) -> None:
    """Print both tables."""
    rows = [
        [
            r["cause"],
            r["name"],
            f"{r['distance']:.1e}",
            f"{r['other_bits']:.2%}" if "other_bits" in r else "",
        ]
        for r in layer
    ]
    print(plain_table(["cause", "layer", "distance", "other bits"], rows))
    figures = ("mean", "p99", "max", "outside_share", "k3")
    rows = [
        [r["cause"], r["name"], *(f"{r[f]:.1e}" if r.get(f) is not None else "" for f in figures)]
        for r in model
    ]
    print(plain_table(["cause", "model", *figures], rows))


def main() -> None:
    """Measure, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--sequences", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layer = list(measure_layer())
    model = list(measure_model(arguments.steps, arguments.sequences))
    show(layer, model)
    if arguments.json is not None:
        problem, key = str(LAYER), env.bits_key()
        written = {"bits_key": key, "problem": problem, "layer": layer, "model": model}
        with written_whole(arguments.json) as beside:
            beside.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
