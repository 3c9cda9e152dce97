"""The demo's parts, small: they say what they measured, and ours is right in each."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samebits import cli, demo, env
from samebits.demo import language_model as lm

pytestmark = pytest.mark.reference


def test_serving_has_the_bits_of_training_and_mistakes_cost() -> None:
    losses, gaps = demo._train_and_serve(12)

    assert losses[-1] < losses[0]
    assert gaps.pop("samebits, as trained") == (0.0, 0.0)
    assert gaps.keys() == lm.MISTAKES.keys()
    assert all(mean > 0.001 for mean, _ in gaps.values()), gaps


def test_the_clamp_of_the_model_binds() -> None:
    torch.manual_seed(0)
    model, text = lm.LanguageModel(), lm.read_text()
    lm.train(model, text, steps=3)
    block, limit = model.blocks[0], lm.TRAINED.activation.limit
    z = torch.randn(512, 96) @ block.gate_up[0].detach().T

    assert limit is not None
    assert (z > limit).double().mean() > 0.2
    assert (z < -limit).double().mean() > 0.2


def test_a_missing_compiler_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    good = demo._show_stale_clamp(None)

    assert good
    assert "not_run: no C++ compiler" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["-3", "0", "1.5", "many"])
def test_steps_are_counted_from_one(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--steps", steps]) == 2
    assert f"the number must be an int >= 1, got '{steps}'" in capsys.readouterr().err


def test_the_example_serves_what_it_trained(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "examples" / "train_and_serve.py"
    plot = tmp_path / "plot.png"

    words = [sys.executable, str(script), "--steps", "3", "--plot", str(plot)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=env.for_child(OMP_NUM_THREADS="1")
    )

    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line.split()[-1] for line in done.stdout.splitlines()[1:]}
    assert rows["backend auto"] == "0"
    assert float(rows["clamp dropped"]) > 0
    assert plot.exists() or "no plot: matplotlib is not installed" in done.stderr


def test_served_part_fails_where_bits_differ() -> None:
    assert not demo._show_served([3.0, 2.0], {"samebits, as trained": (1e-9, 0.0)})
