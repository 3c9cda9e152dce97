"""One run of the replays: other processes first, then every variant here; what it says.

The other processes share the variants and run beside each other, on inputs that each makes itself:
they compile what is to be launched, and say what digests they got.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from samebits import env
from samebits.checks.determinism.coverage import failure, fingerprint, unseen_by
from samebits.checks.determinism.evidence import Evidence, Record
from samebits.checks.determinism.replay import replay
from samebits.checks.determinism.source import Sources
from samebits.checks.determinism.variant import Registry, RegistryError, Variant
from samebits.checks.result import Result, tracked
from samebits.errors import must

# Of the time, for the other processes; compiling is their work.
_SHARE = 0.6
_WORKER = "samebits.checks.determinism.worker"
_SOURCE = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run does."""

    # Variants by name, as in "fused*"; None takes all. Planted faults are always among them.
    only: str | None
    # Replays of each variant under load.
    replays: int
    # Other processes.
    processes: int
    # Of the sources; None asks git.
    tree: str | None
    # Seconds after which no further variant is started; None means no end.
    budget: float | None = None


def record(registry: Registry, plan: Plan) -> Evidence:
    """Replay the variants of a registry on the first CUDA device, or on the CPU.

    Raises:
        RegistryError: No variant has such a name, or git does not say what the sources are.
    """
    start = time.monotonic()
    variants = chosen(registry, plan.only)
    tree = revision(registry) if plan.tree is None else plan.tree
    sources = Sources(registry.root)
    hashes = {variant.name: fingerprint(sources, variant) for variant in variants}
    elsewhere = _other_processes(registry, variants, plan)
    print(f"other processes: {time.monotonic() - start:.0f} s", file=sys.stderr)
    device = env.default_device()
    records = {}
    for variant in tracked(variants, "replays"):
        if plan.budget is not None and time.monotonic() - start > plan.budget:
            print(f"out of time before {variant.name}", file=sys.stderr)
            break
        made = replay(
            variant,
            device,
            registry.root,
            replays=plan.replays,
            hash_=hashes[variant.name],
        )
        records[variant.name] = compared(made, elsewhere.get(variant.name, []))
    return Evidence(
        machine=machine(device),
        tree=tree,
        seconds=time.monotonic() - start,
        variants=records,
    )


def chosen(registry: Registry, only: str | None) -> list[Variant]:
    """Return the planted faults, and the variants of that name.

    Raises:
        RegistryError: There is none of that name.
    """
    fits = [v for v in registry.variants if only is None or fnmatch(v.name, only)]
    if not fits:
        raise RegistryError(must("--only", "name a variant (--list shows them)", repr(only)))
    faults = [v for v in registry.variants if v.expected == "different"]
    return [*faults, *(v for v in fits if v.expected != "different")]


def compared(made: Record, digests: Sequence[str]) -> Record:
    """Return a record with what other processes got added to it."""
    if not made.replays:
        return made
    wrong = sum(digest != made.digest for digest in digests)
    note = made.note
    if wrong and not note:
        note = f"process: {wrong} of {len(digests)} digests differ from {made.digest}"
    if not digests and not note:
        note = "no other process could run it"
    return replace(
        made,
        replays={**made.replays, "process": len(digests)},
        different={**made.different, "process": wrong},
        note=note,
    )


def machine(device: torch.device) -> dict[str, str]:
    """Return the versions and the hardware that evidence is about."""
    found = {name: v for name, v in env.versions().items() if v is not None}
    names = ("samebits", "python", "torch", "triton")
    cuda = torch.version.cuda
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    about = {"gpu": gpu, "device": env.architecture(device), **({"cuda": cuda} if cuda else {})}
    return about | {name: found[name] for name in names if name in found}


def revision(registry: Registry) -> str:
    """Return git's revision of the sources, with "-dirty" where a file below the root is changed.

    Raises:
        RegistryError: git is absent, or does not know the folder.
    """
    try:
        head = _git(registry.root, "rev-parse", "HEAD")
        changed = _git(registry.root, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RegistryError(
            f"git does not say what the sources are ({error}); give --tree"
        ) from None
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def results(evidence: Evidence, variants: Sequence[Variant]) -> list[Result]:
    """Return one result for each variant: the replays that differed, of none that may."""
    return [_result(v, evidence.variants.get(v.name), evidence) for v in variants]


def _result(variant: Variant, made: Record | None, where: Evidence) -> Result:
    about: dict[str, Any] = {
        "check": "determinism", "case": variant.name, "problem": "", "backend": variant.kernels[0],
    }  # fmt: skip
    if made is None or not made.replays:
        note = "out of time" if made is None else made.note
        return Result(**about, verdict="not_run" if made is None else "fail", note=note)
    different = float(sum(made.different.values()))
    if variant.expected == "different":
        unseen = unseen_by(variant, made)
        note = f"a planted fault, not seen by {', '.join(unseen)}" if unseen else "planted, seen"
        return Result(**about, verdict="fail" if unseen else "pass", measured=different, note=note)
    if variant.expected == "either":
        return Result(**about, verdict="not_run", measured=different, note=made.note or "the same")
    if made.same:
        note = f"{made.total} replays"
        return Result(**about, verdict="pass", measured=0.0, allowed=0.0, note=note)
    note = failure(made, where)
    return Result(**about, verdict="fail", measured=different, allowed=0.0, note=note)


def _other_processes(
    registry: Registry, variants: Sequence[Variant], plan: Plan
) -> dict[str, list[str]]:
    """Return the digests that other processes got, by variant."""
    count = min(plan.processes, len(variants))
    budget = None if plan.budget is None else _SHARE * plan.budget
    names = [variant.name for variant in variants]
    digests: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="samebits-determinism-") as folder:
        workers = [
            _start(registry, names[index::count], Path(folder) / str(index), budget)
            for index in range(count)
        ]
        for index, worker in enumerate(workers):
            code = worker.wait()
            if code:
                print(f"process {index} ended with {code}", file=sys.stderr)
            for name, digest in _said(Path(folder) / str(index)):
                digests.setdefault(name, []).append(digest)
    return digests


def _start(
    registry: Registry, names: Sequence[str], out: Path, budget: float | None
) -> "subprocess.Popen[bytes]":
    job = out.with_suffix(".job")
    job.write_text(json.dumps({"names": list(names), "budget": budget}))
    paths = dict.fromkeys([_SOURCE, *(path or "." for path in sys.path)])
    environment = env.for_child(PYTHONPATH=":".join(paths), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", _WORKER, str(registry.file), str(job), str(out)]
    return subprocess.Popen(command, env=environment)


def _said(out: Path) -> Iterator[tuple[str, str]]:
    if out.exists():
        for line in out.read_text().splitlines():
            name, digest = json.loads(line)
            yield name, digest
