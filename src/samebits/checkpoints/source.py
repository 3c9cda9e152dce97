"""Find the files and tensors of a checkpoint, its ranks where it was cut, and its scheme."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.checkpoints.files import BadFileError, Entry, entries_of
from samebits.checkpoints.schemes import SCHEMES, Scheme
from samebits.errors import UnsupportedError, must

INDEX = "model.safetensors.index.json"
# Key of a file's metadata: the scheme of its experts.
SCHEME_KEY = "samebits_scheme"
_RANK = re.compile(r"rank-tp(\d+)of(\d+)-ep(\d+)of(\d+)")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a cut checkpoint; its folder carries its name."""

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return f"rank-tp{self.tp}of{self.tp_size}-ep{self.ep}of{self.ep_size}"

    def experts(self, num_experts: int) -> range:
        """Return the experts of this rank: consecutive, the first ranks have one more."""
        share, more = divmod(num_experts, self.ep_size)
        first = self.ep * share + min(self.ep, more)
        return range(first, first + share + (self.ep < more))


def ranks_of(tp_size: int, ep_size: int) -> list[Rank]:
    """Return every rank, tensor-parallel ranks of one expert-parallel rank side by side."""
    return [Rank(tp, tp_size, ep, ep_size) for ep in range(ep_size) for tp in range(tp_size)]


@dataclass
class Folder:
    """The tensors of one folder (or file) of a checkpoint."""

    path: Path
    # Name -> entry.
    entries: dict[str, Entry] = field(default_factory=dict)
    # Bytes of the largest file.
    largest: int = 0
    # What changes when a file does.
    stamps: list[str] = field(default_factory=list)
    # The scheme that convert() wrote, where it did.
    written: str | None = None


def open_folder(path: Path) -> Folder:
    """Return the tensors of a folder of safetensors files, or of one file.

    Raises:
        BadFileError: A file is damaged, one that the index names is missing or lacks a tensor, or
            two files hold one name.
        FileNotFoundError: There is no such file.

    Determinism: exact.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not path.exists():
        raise FileNotFoundError(must("the checkpoint", "exist", path))
    index = path / INDEX
    listed: Mapping[str, str] = {}
    if index.is_file():
        listed = _weight_map(index)
        files = [path / name for name in sorted(set(listed.values()))]
        for file in files:
            if not file.is_file():
                raise BadFileError(f"{index} names {file.name}, which is missing")
    folder = Folder(path)
    for file in files:
        found, metadata = entries_of(file)
        folder.written = metadata.get(SCHEME_KEY, folder.written)
        for name in found.keys() & folder.entries.keys():
            other = folder.entries[name].path
            raise BadFileError(f"{name} is in two files, {other.name} and {file.name}")
        folder.entries.update(found)
        stat = file.stat()
        folder.largest = max(folder.largest, stat.st_size)
        folder.stamps.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    for name, file_name in listed.items():
        entry = folder.entries.get(name)
        if entry is None or entry.path.name != file_name:
            raise BadFileError(f"{index} says that {file_name} holds {name}, which it does not")
    return folder


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        BadFileError: It is damaged.

    Determinism: exact.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadFileError(f"{path} is no JSON: {error}") from error


def _weight_map(index: Path) -> Mapping[str, str]:
    content = read_json(index)
    held = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held.values()):
        raise BadFileError(f"{index} has no weight_map of names to files")
    return held


def rank_folders(path: Path) -> dict[Rank, Path]:
    """Return the folders of a cut checkpoint; empty where it is not cut.

    Raises:
        BadFileError: Some ranks are missing, or there are folders of two cuts.

    Determinism: exact.
    """
    found: dict[Rank, Path] = {}
    for folder in sorted(path.iterdir()) if path.is_dir() else ():
        match = _RANK.fullmatch(folder.name)
        if match is not None:
            tp, tp_size, ep, ep_size = (int(number) for number in match.groups())
            found[Rank(tp, tp_size, ep, ep_size)] = folder
    sizes = {(rank.tp_size, rank.ep_size) for rank in found}
    if len(sizes) > 1:
        raise BadFileError(f"{path} holds folders of several cuts: {sorted(sizes)}")
    missing = [rank.folder for size in sizes for rank in ranks_of(*size) if rank not in found]
    if missing:
        raise BadFileError(f"{path} lacks {', '.join(missing)}")
    return found


def scheme_of(names: Iterable[str], path: Path) -> Scheme:
    """Return the one scheme that the names of a checkpoint's experts have.

    Raises:
        BadFileError: No name is an expert's.
        UnsupportedError: Several schemes have these names, or none has all of them.

    Determinism: a function of the names.
    """
    places = {name: _schemes_with(name) for name in names}
    known = [schemes for schemes in places.values() if schemes]
    if not known:
        raise BadFileError(f"{path} holds no experts that a scheme names: {', '.join(SCHEMES)}")
    fitting = set.intersection(*known)
    if len(fitting) == 1:
        return SCHEMES[fitting.pop()]
    if not fitting:
        kinds = sorted({"/".join(sorted(schemes)) for schemes in known})
        raise UnsupportedError(f"{path} mixes schemes: {', '.join(kinds)}")
    raise UnsupportedError(
        f"the names in {path} are those of {', '.join(sorted(fitting))}, which differ in storage "
        "only\nhint: say which one it is with --from"
    )


def _schemes_with(name: str) -> set[str]:
    return {scheme.name for scheme in SCHEMES.values() if scheme.place_of(name) is not None}
