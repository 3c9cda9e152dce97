"""Evidence of replays, and debts: the JSON that a run writes and the coverage check reads."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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


def read_debts(file: Path) -> dict[str, str]:
    """Return kernel -> reason; nothing where there is no file.

    Raises:
        RegistryError: The file is not a JSON object of reasons.
    """
    if not file.exists():
        return {}
    content = _json(file)
    if not isinstance(content, dict) or not all(
        isinstance(reason, str) and reason.strip() for reason in content.values()
    ):
        raise RegistryError(must(str(file), "map kernels to reasons", type(content).__name__))
    return content


def write_debts(file: Path, debts: Mapping[str, str]) -> None:
    """Write kernel -> reason; remove the file where there is no debt."""
    if debts:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict(sorted(debts.items())), indent=1) + "\n", encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RegistryError(f"{file} cannot be read: {error}") from error
