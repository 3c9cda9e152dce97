"""Evidence of replays, and debts: the JSON that a run writes and the coverage check reads."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from samebits.checks.determinism.variant import RegistryError
from samebits.errors import must

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the replays of one variant showed."""

    # Of its kernels' closures and its configuration; see ``samebits.checks.determinism.source``.
    hash: str
    # Of the bytes of its results.
    digest: str
    # Replays by kind, and how many of them had other bytes than the first call.
    replays: Mapping[str, int]
    different: Mapping[str, int]
    # Where it differed first, or why it could not be replayed; "" where all is well.
    note: str
    # Kernel -> the flags and options that it was launched with.
    launched: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of_none(cls, note: str) -> "Record":
        """Return the record of a variant that could not be replayed, without its hash."""
        return cls(hash="", digest="", replays={}, different={}, note=note, launched={})

    @property
    def total(self) -> int:
        """Replays of every kind."""
        return sum(self.replays.values())

    @property
    def same(self) -> bool:
        """Whether it ran and every replay had the same bytes."""
        return self.total > 0 and not self.note and not self.raced

    @property
    def raced(self) -> bool:
        """Whether a replay had other bytes."""
        return any(self.different.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One run of the replays on one machine."""

    # Where it was read from; "" before it is written.
    file: str = ""
    # Versions and hardware, by name: gpu, device, torch, triton, ….
    machine: Mapping[str, str]
    # What git says of the sources: a revision, with "-dirty" where files were changed.
    tree: str
    seconds: float
    # By name of the variant.
    variants: Mapping[str, Record]

    @property
    def clean(self) -> bool:
        """Whether the sources were those of a revision."""
        return bool(self.tree) and not self.tree.endswith("-dirty")

    @property
    def where(self) -> str:
        """The machine in words."""
        names = ("gpu", "device", "torch", "triton")
        return ", ".join(f"{n} {self.machine[n]}" for n in names if n in self.machine)

    def to_json(self) -> str:
        """Return the file's text: one line a variant, in order of name."""
        head = {
            "check": "determinism",
            "format": FORMAT,
            "machine": dict(self.machine),
            "tree": self.tree,
            "seconds": round(self.seconds, 1),
        }
        lines = [
            f"  {json.dumps(name)}: {json.dumps(asdict(record), sort_keys=True)}"
            for name, record in sorted(self.variants.items())
        ]
        body = ",\n".join(lines)
        return json.dumps(head, indent=1)[:-2] + f',\n "variants": {{\n{body}\n }}\n}}\n'


def joined(known: Evidence, made: Evidence, faults: Collection[str]) -> Evidence:
    """Return the records of two runs of one machine and tree; the later one's where both have one.

    A race stays (that it was not seen again shows nothing), but that of a planted fault.
    """

    def stays(name: str, record: Record) -> bool:
        later = made.variants.get(name)
        if later is None:
            return True
        return record.raced and record.hash == later.hash and name not in faults

    kept = {name: record for name, record in known.variants.items() if stays(name, record)}
    return replace(made, seconds=known.seconds + made.seconds, variants={**made.variants, **kept})


def read_all(folder: Path, debts: Path) -> list[Evidence]:
    """Return the evidence in a folder, in order of name; none where there is no folder.

    Raises:
        RegistryError: A file is not evidence.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [read(file) for file in files if file != debts]


def read(file: Path) -> Evidence:
    """Return the evidence in a file.

    Raises:
        RegistryError: It cannot be read, or is no evidence.
    """
    content = _json(file)
    try:
        if content["check"] != "determinism" or content["format"] != FORMAT:
            raise RegistryError(must(str(file), f"be evidence in format {FORMAT}", "another"))
        return Evidence(
            file=file.name,
            machine=dict(content["machine"]),
            tree=str(content["tree"]),
            seconds=float(content["seconds"]),
            variants={name: Record(**record) for name, record in content["variants"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, RegistryError):
            raise
        raise RegistryError(f"{file} is no evidence: {type(error).__name__}: {error}") from error


class Debt(NamedTuple):
    """Why something has no evidence yet, and its hash when that was said."""

    reason: str
    hash: str


def read_debts(file: Path) -> dict[str, Debt]:
    """Return what is owed, by the name of a variant or of a kernel that is in none.

    Raises:
        RegistryError: The file is not a JSON object of reasons, each with names and hashes.
    """
    if not file.exists():
        return {}
    content = _json(file)
    rule = "map reasons to names, and these to hashes (write it with --owe)"
    if not isinstance(content, dict):
        raise RegistryError(must(str(file), rule, type(content).__name__))
    debts: dict[str, Debt] = {}
    for reason, hashes in content.items():
        if not reason.strip() or not isinstance(hashes, dict):
            raise RegistryError(must(str(file), rule, f"{reason!r}: {type(hashes).__name__}"))
        debts |= {name: Debt(reason, str(hash_)) for name, hash_ in hashes.items()}
    return debts


def write_debts(file: Path, debts: Mapping[str, Debt]) -> None:
    """Write reason -> name -> hash; remove the file where there is no debt."""
    if not debts:
        file.unlink(missing_ok=True)
        return
    content: dict[str, dict[str, str]] = {}
    for name, debt in debts.items():
        content.setdefault(debt.reason, {})[name] = debt.hash
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RegistryError(f"{file} cannot be read: {error}") from error
