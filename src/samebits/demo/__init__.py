"""`samebits demo`: what goes wrong silently in mixture-of-experts layers, on this machine's CPU.

Three parts: a compiled clamp that keeps an old value; the experts classes of transformers under
every experts implementation; a small model trained here and served with the mistakes that engines
were reported to make.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from shutil import which

import torch

from samebits import env
from samebits.arguments import at_least_one
from samebits.checks.result import FAILED, PASSED, plain_table, tracked
from samebits.demo import language_model as lm
from samebits.demo.stale_clamp import CALLS

# Classes of the second part, and the function that each computes between its projections.
CLASSES = {
    "qwen3_moe.Qwen3MoeExperts": "silu(gate) · up",
    "gpt_oss.GptOssExperts": "clamp, slope 1.702, up + 1, interleaved",
    "minimax_m3_vl.MiniMaxM3VLExperts": "clamp, slope 1.702, up + 1, halves",
    "deepseek_v4.DeepseekV4Experts": "clamp before silu",
    "gemma4.Gemma4TextExperts": "gelu_tanh(gate) · up",
    "inkling2.Inkling2Experts": "soft caps on gate and up",
    "nemotron_h.NemotronHExperts": "relu², no gate",
}
STEPS = 350
# What the words in the table of the second part mean.
_WORDS = {
    "(dropped)": "only where slots are dropped, as under expert parallelism",
    "not run": "its kernel cannot run on this machine; ./run check models says why",
    "refused": "it says itself that it cannot compute this",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``demo`` to ``parser``."""
    parser.add_argument(
        "--steps",
        type=at_least_one,
        default=STEPS,
        metavar="N",
        help=f"training steps of the third part; default: {STEPS}",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the three parts; return 0 where ours did what it promises in each part that ran.

    Determinism: repeatable on one machine.
    """
    with tempfile.TemporaryDirectory(prefix="samebits-demo-", ignore_cleanup_errors=True) as folder:
        compiled = _start_stale_clamp(folder)
        try:
            # One core trains while the other compiles; two threads of small products would fight
            # for both.
            torch.set_num_threads(1)
            served = _train_and_serve(arguments.steps)
            good = [_show_stale_clamp(compiled), _show_classes(), _show_served(*served)]
        finally:
            if compiled is not None:
                compiled.kill()
    print("\nnext: ./run check models     every experts class of the installed transformers")
    return PASSED if all(good) else FAILED


def _title(text: str) -> None:
    print(f"\n{text}", flush=True)


def _start_stale_clamp(folder: str) -> "subprocess.Popen[str] | None":
    if which("g++") is None and which("clang++") is None:
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "samebits.demo.stale_clamp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env.for_child(TORCHINDUCTOR_CACHE_DIR=folder, OMP_NUM_THREADS="1"),
    )


def _show_stale_clamp(process: "subprocess.Popen[str] | None") -> bool:
    _title(f"(1/3) torch.compile and a clamp that changes, torch {torch.__version__}")
    if process is None:
        print("not_run: no C++ compiler (torch.compile needs g++ or clang++)")
        return True
    output, errors = process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        print(f"not_run: the compiled program stopped ({process.returncode}): {last}")
        return True
    found = json.loads(output)
    limits = " → ".join(str(limit) for _, limit, _ in CALLS)
    rows = [
        (name, f"{found[key]['forward']:.3f}", f"{found[key]['gradient']:.3f}")
        for key, name in (
            ("plain", "silu(clamp(gate)) · clamp(up), compiled"),
            ("samebits", "samebits.functional.clamped_swiglu, compiled"),
        )
    ]
    print(plain_table([f"limits {limits}: error of the last call", "forward", "gradient"], rows))
    if found["plain"]["forward"] == 0 and found["plain"]["gradient"] == 0:
        print("this torch has the fault fixed for this function")
    return all(error == 0 for error in found["samebits"].values())


def _show_classes() -> bool:
    _title("(2/3) experts classes of transformers, each implementation against the class in fp64")
    if find_spec("transformers") is None:
        print("not_run: transformers is not installed")
        return True
    from samebits.checks.models.command import Plan, judge
    from samebits.checks.models.report import cell
    from samebits.integrations.transformers.provider import Transformers

    provider = Transformers()
    found = [f for f in provider.experts() if f.name in CLASSES]
    implementations = list(provider.implementations())
    findings = list(judge(Plan(found, [], implementations, None), provider))
    rows, good = [], True
    for name in [f.name for f in found]:
        row = [CLASSES[name], name.rpartition(".")[2]]
        for implementation in implementations:
            mine = [f for f in findings if (f.model, f.implementation) == (name, implementation)]
            what = cell(mine)
            good &= implementation != "samebits" or what.verdict == "pass"
            row.append(what.text.partition(",")[0])
        rows.append(row)
    print(plain_table(["function of the experts", "class", *implementations], rows))
    print("WRONG: another function, without an error; the number is error / largest value")
    for word, meaning in _WORDS.items():
        if any(word in text for row in rows for text in row):
            print(f"{word}: {meaning}")
    if any(f.evidence == "arguments" and f.verdict == "fail" for f in findings):
        print("sonicmoe is judged on the arguments its adapter passes: its kernel needs a GPU")
    return good


def _train_and_serve(steps: int) -> tuple[list[float], dict[str, tuple[float, float]]]:
    torch.manual_seed(0)
    text, model = lm.read_text(), lm.LanguageModel()
    ticks = iter(tracked(range(steps), "training a small model"))
    losses = lm.train(model, text, steps=steps, progress=lambda _step, _loss: next(ticks, None))
    next(ticks, None)
    held_out = next(lm.batches(text, model, 32, seed=1))
    with torch.enable_grad():
        trained = model(held_out).detach()
    functions = {"samebits, as trained": lm.TRAINED} | lm.MISTAKES
    gaps = {}
    for name, function in functions.items():
        difference = trained - lm.serve(model, held_out, function)
        gaps[name] = (float(difference.abs().mean()), float(difference.mean()))
    return losses, gaps


def _show_served(losses: list[float], gaps: dict[str, tuple[float, float]]) -> bool:
    first, last = losses[0], sum(losses[-20:]) / len(losses[-20:])
    _title(
        f"(3/3) a gpt-oss-style model, {len(losses)} steps on Python's own documentation, "
        f"{first:.2f} → {last:.2f} nats a byte; then served"
    )
    rows = [(name, f"{mean:.3g}", f"{worse:+.3f}") for name, (mean, worse) in gaps.items()]
    print(plain_table(["served with", "mean |Δ log p|", "loss, nats a byte"], rows))
    return next(iter(gaps.values()))[0] == 0.0
