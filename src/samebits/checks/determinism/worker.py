"""Run by ``record`` in another process: make the calls of some variants, or replay them.

A job names the registry, the variants, and what is wanted of them. What is found is written at
once, a line of JSON for each variant in order: a process that ends early loses nothing.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from samebits import env
from samebits.checks.determinism.memory import digest
from samebits.checks.determinism.planted import planted
from samebits.checks.determinism.replay import SEED, replay, run, told
from samebits.checks.determinism.variant import Variant, load
from samebits.checks.result import FOREIGN_ERRORS

_CALLS = 3
# The exit code of a process that asks for a new one, for what is left.
RENEW = 75


def main(job: str, out: str) -> None:
    """Do the job of one file, and write what is found to another."""
    wanted = json.loads(Path(job).read_text())
    variants = {v.name: v for v in load(Path(wanted["registry"]), planted()).variants}
    parent, end = os.getppid(), time.monotonic() + wanted["seconds"]
    device = env.default_device()
    torch.set_num_threads(1)
    with Path(out).open("w") as file:
        for name in wanted["names"]:
            # Nobody reads on where the parent is gone.
            if time.monotonic() > end or os.getppid() != parent:
                break
            if wanted["replays"] is None:
                found: Any = _digests(variants[name], device)
                renew = False
            else:
                made = replay(
                    variants[name], device, Path(wanted["root"]), replays=wanted["replays"]
                )
                found = asdict(made.record)
                renew = made.broken and wanted["renew"]
            file.write(json.dumps(found) + "\n")
            file.flush()
            if renew:
                sys.exit(RENEW)
            if device.type == "cuda":
                # Each variant has streams of its own, and memory is kept by stream.
                torch.cuda.empty_cache()


def _digests(variant: Variant, device: torch.device) -> list[str]:
    try:
        torch.manual_seed(SEED)
        call = variant.prepare(device)
        return [digest(run(call).results) for _ in range(_CALLS)]
    except FOREIGN_ERRORS as error:
        print(f"{variant.name}, in another process: {told(error)}", file=sys.stderr)
        return []


if __name__ == "__main__":
    main(*sys.argv[1:])
