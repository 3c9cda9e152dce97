"""Compilers with a fault of their own: what an audit must say of each, without inductor's price."""

import os
import time
from pathlib import Path

import programs
import torch

from samebits import env


def _dies(module, example_inputs):
    os._exit(7)


def _hangs(module, example_inputs):
    folder = Path(env.variables()["TORCHINDUCTOR_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hangs").touch()
    time.sleep(600)


def _raises(module, example_inputs):
    raise RuntimeError("this compiler cannot")


def _off_by_a_half(module, example_inputs):
    return lambda *args: tuple(out * 1.5 for out in module.forward(*args))


def _poisons_the_cache(module, example_inputs):
    """Right in the process that compiles; the next one takes the number that it finds."""
    kept = Path(env.variables()["TORCHINDUCTOR_CACHE_DIR"]) / "number"
    writer, number = kept.read_text().split() if kept.exists() else ("", "")

    def run(*args):
        args = list(args)
        for index, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                if writer not in ("", str(os.getpid())):
                    args[index] = torch.full_like(value, float(number))
                else:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(f"{os.getpid()} {float(value)}")
        return module.forward(*args)

    return run


right = torch.compile(programs.clamped_swiglu, backend="aot_eager")
dies = torch.compile(programs.clamped_swiglu, backend=_dies)
hangs = torch.compile(programs.clamped_swiglu, backend=_hangs)
raises = torch.compile(programs.clamped_swiglu, backend=_raises)
poisoned = torch.compile(programs.multiply, backend=_poisons_the_cache)
wrong_at_once = torch.compile(programs.clamped_swiglu, backend=_off_by_a_half)
# Not compiled at all, as where a decorator was bound before a switch.
nothing_to_compile = torch._dynamo.disable(programs.clamped_swiglu)


def make_inputs():
    return programs.two_floats()
