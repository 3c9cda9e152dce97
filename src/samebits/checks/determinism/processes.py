"""Processes that make or replay calls, so that what breaks one costs one variant.

A lost device, a broken capture or a crash ends its process; the variants that are left go on in a
new one.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samebits import env
from samebits.checks.determinism.evidence import Record
from samebits.checks.determinism.variant import Registry
from samebits.checks.determinism.worker import RENEW

_WORKER = "samebits.checks.determinism.worker"
_SOURCE = str(Path(__file__).resolve().parents[3])
# Processes up to which an error is followed by a new one; what comes after is replayed in the last.
_RENEWED = 8
# Seconds in which a variant has to be replayed, or its call to be made.
_PATIENCE = 120.0
# Seconds after the end in which calls that are being made have to return.
_GRACE = 30.0
_PAUSE = 0.05


def digests(
    registry: Registry, names: Sequence[str], processes: int, end: float
) -> dict[str, list[str]]:
    """Return what processes beside each other got, by variant; none of one that could not run.

    Args:
        registry: Kernels and variants.
        names: Of the variants, which the processes share.
        processes: How many at most.
        end: When no further variant is begun, by ``time.monotonic``.
    """
    count = min(processes, len(names))
    shares = [list(names[index::count]) for index in range(count)]
    got: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="samebits-determinism-") as folder, _Workers() as all_:
        while shares:
            begun = []
            for share in shares:
                out = Path(folder) / str(len(all_.started))
                job = {"names": share, "seconds": end - time.monotonic(), "replays": None}
                begun.append((share, out, all_.start(registry, job, out)))
            shares = []
            for share, out, worker in begun:
                code = _ended(worker, out, end)
                # What follows the last end of a line was cut.
                found = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
                got.update(zip(share, found, strict=False))
                if code and share[len(found) :]:
                    name, *rest = share[len(found) :]
                    print(f"{name}: another process ended with {code}", file=sys.stderr)
                    # A process that said nothing may have a fault of its own, if nobody ended it.
                    shares += [rest] if rest and (found or code == -signal.SIGKILL) else []
    return got


def replays(registry: Registry, names: Sequence[str], count: int, end: float) -> Iterator[Record]:
    """Yield the records of variants in order, without their hashes, until the time is over.

    Args:
        registry: Kernels and variants.
        names: Of the variants.
        count: Replays under load.
        end: When no further variant is begun, by ``time.monotonic``.
    """
    silent = False
    with tempfile.TemporaryDirectory(prefix="samebits-determinism-") as folder, _Workers() as all_:
        while names:
            renew = len(all_.started) < _RENEWED
            seconds = end - time.monotonic()
            job = {"names": names, "seconds": seconds, "replays": count, "renew": renew}
            out = Path(folder) / str(len(all_.started))
            worker = all_.start(registry, job, out)
            done = 0
            for line in _said(worker, out):
                yield Record(**line)
                done += 1
            names = names[done:]
            code = worker.wait()
            if code == 0:
                return
            if code != RENEW and names:
                # Twice before it said anything: no variant is at fault.
                lost = len(names) if silent and not done else 1
                for _ in names[:lost]:
                    yield Record.of_none(f"its process ended with {code}")
                names, silent = names[lost:], not done


def _ended(worker: "subprocess.Popen[bytes]", out: Path, end: float) -> int:
    """Return the exit code of a process that writes to ``out``; end one that has stopped."""
    while (code := worker.poll()) is None:
        silent = time.time() - out.stat().st_mtime
        if silent > _PATIENCE or time.monotonic() > end + _GRACE:
            worker.kill()
        time.sleep(_PAUSE)
    return code


def _said(worker: "subprocess.Popen[bytes]", out: Path) -> Iterator[Any]:
    """Yield the lines that a process writes, as long as it does; end one that has stopped."""
    heard, rest = time.monotonic(), ""
    with out.open() as file:
        while True:
            alive = worker.poll() is None
            *lines, rest = (rest + file.read()).split("\n")
            yield from map(json.loads, lines)
            if lines:
                heard = time.monotonic()
            elif not alive:
                return
            elif time.monotonic() - heard > _PATIENCE:
                worker.kill()
            time.sleep(_PAUSE)


class _Workers:
    """Processes that end with this block, whatever ends it."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.started:
            if worker.poll() is None:
                worker.kill()
                worker.wait()

    def start(
        self, registry: Registry, job: dict[str, Any], out: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a process that does a job and writes to ``out``."""
        out.touch()
        file = out.with_suffix(".job")
        about = {"registry": str(registry.file), "root": str(registry.root)}
        file.write_text(json.dumps(about | job))
        paths = dict.fromkeys([_SOURCE, *(path or "." for path in sys.path)])
        environment = env.for_child(PYTHONPATH=":".join(paths), OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", _WORKER, str(file), str(out)]
        self.started.append(subprocess.Popen(command, env=environment))
        return self.started[-1]
