"""Fine-tune a small gpt-oss with transformers' own experts and with these: the same loss curve?

    python examples/finetune.py [--steps 30] [--seeds 3] [--device cuda] [--dtype bfloat16]

Trains a tiny ``GptOssForCausalLM`` on text that comes with Python, saves it, and fine-tunes the
saved model on other text with ``experts_implementation="eager"`` and ``"samebits"``, once for each
seed (it draws what dropout drops; the batches are the same). Prints losses, time and peak memory
of a step. A control is the eager model with its gate and up columns read as two halves, a known
mistake of serving code.

Exits 1 unless every loss of "samebits" is within 3 spreads of eager's loss at the same step and
seed, and the control is not. A spread is the standard deviation of eager's losses over the seeds,
averaged over the steps. Needs transformers, no network; about half a minute on two CPU cores.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from samebits.arguments import at_least_one
from samebits.checks.result import plain_table, tracked
from samebits.demo.language_model import read_text
from samebits.integrations.transformers import attach, register

LENGTH, BATCH, LEARNING_RATE, ALLOWED = 64, 8, 2e-3, 3.0
CONFIG = GptOssConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    head_dim=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=32,
    attention_dropout=0.1,
    max_position_embeddings=LENGTH,
)


class Run(NamedTuple):
    """What one fine-tuning measured."""

    # Loss of each step, in nats a byte.
    losses: list[float]
    # Time of the median step.
    seconds: float
    # Peak of one step, beyond what was there before it; 0 where it was not measured.
    memory: int


def batches(text: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(text.numel() - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def train(
    model: PreTrainedModel, text: Tensor, *, steps: int, seed: int, measured: bool = False
) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, seconds = [], []
    source = batches(text)
    torch.manual_seed(seed)

    def step() -> None:
        ids = next(source).to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    memory = peak_memory(step, model.device) if measured else 0
    return Run(losses[:steps], sorted(seconds)[steps // 2], memory)


def peak_memory(step: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes of tensors that ``step`` holds at once beside those before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        step()
    records = [e for e in result.profiler.kineto_results.events() if e.name() == "[memory]"]
    records.sort(key=lambda record: record.start_ns())
    return max(accumulate(record.nbytes() for record in records))


def distance(curves: list[list[float]], eager: list[list[float]]) -> tuple[float, float]:
    """Return the largest gap between curves and eager's, and the spread of eager's."""
    gap = (torch.tensor(curves) - torch.tensor(eager[: len(curves)])).abs().max()
    return float(gap), float(torch.tensor(eager).std(0).mean())


@torch.no_grad()
def read_as_halves(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for stored in (experts.gate_up_proj, experts.gate_up_proj_bias):
            stored.copy_(torch.cat([stored[..., ::2], stored[..., 1::2]], -1))


def fine_tune(folder: str, text: Tensor, options: argparse.Namespace, name: str, seed: int) -> Run:
    dtype = getattr(torch, options.dtype)
    implementation = "samebits" if name == "samebits" else "eager"
    model = GptOssForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation=implementation
    ).to(options.device)
    if name == "samebits":
        attach(model)
    if name == "control":
        read_as_halves(model)
    return train(model.train(), text, steps=options.steps, seed=seed, measured=seed == 0)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=at_least_one, default=30)
    parser.add_argument("--seeds", type=at_least_one, default=3, help="at least 2")
    parser.add_argument("--pretrain", type=at_least_one, default=150, help="steps before")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args(words)
    if options.seeds < 2:
        parser.error("a spread needs at least 2 seeds")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    register()
    text = read_text()
    first, second = text[: text.numel() // 2], text[text.numel() // 2 :]
    torch.manual_seed(0)
    # The products are small: more threads make them slower.
    torch.set_num_threads(1)
    runs: dict[str, list[Run]] = {"eager": [], "samebits": [], "control": []}
    with tempfile.TemporaryDirectory() as folder:
        model = GptOssForCausalLM(CONFIG).to(options.device)
        train(model, first, steps=options.pretrain, seed=0)
        model.save_pretrained(folder)
        wanted = [(n, seed) for n in ("eager", "samebits") for seed in range(options.seeds)]
        for name, seed in tracked([*wanted, ("control", 0)], "fine-tuning"):
            runs[name].append(fine_tune(folder, second, options, name, seed))
    return report(runs)


def report(runs: dict[str, list[Run]]) -> int:
    curves = {name: [run.losses for run in of] for name, of in runs.items()}
    rows = []
    for name, of in runs.items():
        gap, _ = distance(curves[name], curves["eager"])
        last = torch.tensor([run.losses[-1] for run in of])
        rows.append(
            (
                name,
                f"{of[0].losses[0]:.3f}",
                f"{last.mean().item():.3f}",
                f"{gap:.2g}",
                f"{1e3 * min(run.seconds for run in of):.1f} ms",
                f"{max(run.memory for run in of) / 2**20:.1f} MiB",
            )
        )
    head = ["experts", "first loss", "last loss", "from eager", "a step", "peak memory"]
    print(plain_table(head, rows))
    gap, spread = distance(curves["samebits"], curves["eager"])
    control, _ = distance(curves["control"], curves["eager"])
    print(f"allowed from eager: {ALLOWED:g} x {spread:.3g} nats, its spread over seeds")
    good = gap <= ALLOWED * spread < control
    print(
        "the loss curve is eager's" if good else "the loss curve is NOT eager's, or nothing shows"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
