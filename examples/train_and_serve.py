"""Train a small mixture-of-experts model, serve it with each backend and with known mistakes.

    python examples/train_and_serve.py [--steps 400] [--plot train_and_serve.png]

Trains on CPU in about a minute, prints how far each serving's log-probabilities are from those of
training, and saves a plot. Exits 1 unless every backend that served what was trained agrees: the
backend that trained to the bit, any other within a thousandth of a nat.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from samebits.arguments import at_least_one
from samebits.backends import BACKENDS
from samebits.checks.result import plain_table, tracked
from samebits.demo import language_model as lm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=at_least_one, default=400)
    parser.add_argument("--plot", type=Path, default=Path("train_and_serve.png"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    text, model = lm.read_text(), lm.LanguageModel()
    ticks = iter(tracked(range(arguments.steps), "training"))
    losses = lm.train(model, text, steps=arguments.steps, progress=lambda *_: next(ticks, None))

    held_out = next(lm.batches(text, model, 32, seed=1))
    trained = model(held_out).detach()
    on_cpu = [name for name in BACKENDS if name != "fused"]
    right = {f"backend {name}": replace(lm.TRAINED, backend=name) for name in ("auto", *on_cpu)}
    gaps = {
        name: (trained - lm.serve(model, held_out, function)).abs()
        for name, function in (right | lm.MISTAKES).items()
    }
    rows = [
        (name, f"{float(gap.mean()):.3g}", f"{float(gap.max()):.3g}") for name, gap in gaps.items()
    ]
    print(plain_table(["served with", "mean |Δ log p|", "max"], rows))
    save_plot(arguments.plot, losses, {name: float(gap.mean()) for name, gap in gaps.items()})
    same = float(gaps["backend auto"].max()) == 0.0
    return 0 if same and all(float(gaps[name].mean()) < 1e-3 for name in right) else 1


def save_plot(path: Path, losses: list[float], gaps: dict[str, float]) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(losses)
    left.set(xlabel="step", ylabel="loss, nats a byte", title="training")
    names = list(gaps)[::-1]
    right.barh(names, [gaps[name] for name in names])
    right.set(xlabel="mean |Δ log p| against training, nats", title="serving")
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


if __name__ == "__main__":
    sys.exit(main())
