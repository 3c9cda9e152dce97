"""One run of the replays: its plan, the variants, what it says.

Other processes come first; they share the variants and run beside each other, on inputs that each
makes itself: they compile what is to be launched, and say what digests they got. Then one process
replays all of them, one after the other (``samebits.checks.determinism.processes``).
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from samebits import env
from samebits.checks.determinism.coverage import coverage, failure, fingerprint, unseen_by
from samebits.checks.determinism.evidence import Evidence, Record
from samebits.checks.determinism.processes import digests, replays
from samebits.checks.determinism.source import Sources
from samebits.checks.determinism.variant import Registry, RegistryError, Variant
from samebits.checks.result import Result, tracked
from samebits.errors import must

# Of the time, for the other processes; compiling is their work.
_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run does."""

    # Variants by name, as in "fused*"; none takes all. Planted faults are always among them.
    only: Sequence[str]
    # No more than the variants that lack evidence.
    owed: bool
    # Replays of each variant under load.
    replays: int
    # Other processes.
    processes: int
    # Of the sources; None asks git.
    tree: str | None
    # Seconds after which no further variant is started; None means no end.
    budget: float | None = None


def record(
    registry: Registry,
    variants: Sequence[Variant],
    plan: Plan,
    about: Evidence,
    keep: Callable[[Evidence], None],
) -> Evidence:
    """Replay variants of a registry on the first CUDA device, or on the CPU.

    Args:
        registry: The kernels.
        variants: As ``chosen`` says.
        plan: How they are replayed.
        about: The machine and the tree, as ``begun`` says.
        keep: Called with what is known after each variant, so that a run that is cut keeps it.

    Raises:
        RegistryError: A variant names a kernel that is not there.
    """
    start = time.monotonic()
    sources = Sources(registry.root)
    hashes = {variant.name: fingerprint(sources, variant) for variant in variants}
    names = [variant.name for variant in variants]
    seconds = float("inf") if plan.budget is None else plan.budget
    elsewhere = digests(registry, names, plan.processes, start + _SHARE * seconds)
    print(f"other processes: {time.monotonic() - start:.0f} s", file=sys.stderr)
    records: dict[str, Record] = {}
    found = about
    replayed = replays(registry, names, plan.replays, start + seconds)
    # The variant first: its replays may be the end of those that are made.
    for variant, made in zip(tracked(variants, "replays"), replayed, strict=False):
        known = replace(made, hash=hashes[variant.name])
        records[variant.name] = compared(known, elsewhere.get(variant.name, []))
        found = replace(about, seconds=time.monotonic() - start, variants=dict(records))
        keep(found)
    for variant in variants[len(records) :][:1]:
        print(f"out of time before {variant.name}", file=sys.stderr)
    return found


def begun(registry: Registry, plan: Plan) -> Evidence:
    """Return evidence of this machine and tree without a record.

    Raises:
        RegistryError: git does not say what the sources are.
    """
    tree = revision(registry) if plan.tree is None else plan.tree
    about = machine(env.default_device())
    return Evidence(machine=about, tree=tree, seconds=0.0, variants={})


def chosen(registry: Registry, plan: Plan, known: Evidence | None = None) -> list[Variant]:
    """Return the planted faults, and the variants of the plan: none but faults if none is owed.

    Args:
        registry: All variants.
        plan: Which are wanted.
        known: Evidence that will be added to: what it has is owed no more.

    Raises:
        RegistryError: There is none of a name.
    """
    for pattern in plan.only:
        if not any(fnmatch(v.name, pattern) for v in registry.variants):
            rule = "name a variant (--list shows them)"
            raise RegistryError(must("--only", rule, repr(pattern)))
    wanted = [
        v
        for v in registry.variants
        if not plan.only or any(fnmatch(v.name, pattern) for pattern in plan.only)
    ]
    if plan.owed:
        owed = set(coverage(registry).owed)
        sources = Sources(registry.root)
        had = {} if known is None else {n: r.hash for n, r in known.variants.items() if r.same}
        wanted = [v for v in wanted if v.name in owed]
        wanted = [v for v in wanted if had.get(v.name) != fingerprint(sources, v)]
    faults = [v for v in registry.variants if v.expected == "different"]
    return [*faults, *(v for v in wanted if v.expected != "different")]


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
