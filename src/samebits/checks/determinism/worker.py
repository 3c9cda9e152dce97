"""Run by ``record`` in another process: make the calls of some variants, write their digests."""

import json
import sys
import time
from pathlib import Path

import torch

from samebits import env
from samebits.checks.determinism.memory import digest
from samebits.checks.determinism.planted import planted
from samebits.checks.determinism.replay import SEED, run
from samebits.checks.determinism.variant import load
from samebits.checks.result import FOREIGN_ERRORS

_CALLS = 3


def main(registry: str, job: str, out: str) -> None:
    """Write ``[name, digest]`` a line for each call of the variants that the job names."""
    device = env.default_device()
    wanted = json.loads(Path(job).read_text())
    variants = {v.name: v for v in load(Path(registry), planted()).variants}
    start = time.monotonic()
    torch.set_num_threads(1)
    with Path(out).open("w") as file:
        for name in wanted["names"]:
            if wanted["budget"] is not None and time.monotonic() - start > wanted["budget"]:
                break
            try:
                torch.manual_seed(SEED)
                call = variants[name].prepare(device)
                found = [digest(run(call).results) for _ in range(_CALLS)]
            except FOREIGN_ERRORS as error:
                text = str(error).partition("\n")[0][:200]
                print(f"{name}: {type(error).__name__}: {text}", file=sys.stderr)
                continue
            file.writelines(json.dumps([name, each]) + "\n" for each in found)


if __name__ == "__main__":
    main(*sys.argv[1:])
