"""A checkpoint, opened and checked: its experts as if they were in one place, and the rest."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from samebits.checkpoints.cut import CutExperts
from samebits.checkpoints.files import BadFileError, Entry
from samebits.checkpoints.layers import Experts, check_scales, layers_of
from samebits.checkpoints.schemes import SCHEMES, Scheme, parse_scheme
from samebits.checkpoints.source import (
    Folder,
    Rank,
    open_folder,
    rank_folders,
    read_json,
    scheme_of,
)
from samebits.checkpoints.target import natural
from samebits.errors import UnsupportedError, must
from samebits.integrations.configs import LayerSpec, from_hf_config


@dataclass
class Checkpoint:
    """A source, opened and checked."""

    scheme: Scheme
    layers: dict[str, Experts]
    others: list[Entry]
    # Bytes of the largest file.
    largest: int
    # Elements, each once.
    elements: int
    # What changes when a file does.
    stamp: str


def open_checkpoint(source: Path, named: str | None, num_experts: int | None) -> Checkpoint:
    """Return a checkpoint whose files, names, shapes and scales are as they must be.

    Args:
        source: A folder or a file.
        named: Its scheme; None finds it.
        num_experts: E; None takes what the files, or their ``config.json``, say.

    Raises:
        BadFileError, UnsupportedError, ValueError: See ``samebits.checkpoints.convert``.

    Determinism: exact.
    """
    ranks = {rank: open_folder(path) for rank, path in rank_folders(source).items()}
    main = open_folder(source)
    folders = [main, *ranks.values()]
    if not any(folder.stamps for folder in folders):
        raise BadFileError(f"{source} holds no safetensors file")
    cut = list(ranks.values()) or [main]
    specs = _configured(source)
    scheme = _scheme(source, cut, named, specs)
    told = {spec.num_experts for spec in specs if spec.num_experts > 0}
    if num_experts is None and len(told) == 1:
        # Where an expert is missing as a whole, no name tells.
        (num_experts,) = told
    layers, others = layers_of(main, scheme, num_experts)
    whole: dict[str, Experts] = dict(layers)
    if ranks:
        if layers:
            raise ValueError(must(str(source), "hold no experts beside its ranks", sorted(layers)))
        whole = dict(_join(ranks, scheme, num_experts))
    for layer in whole.values():
        check_scales(layer)
    outside = sum(entry.elements for entry in others)
    inside = sum(
        layer.num_experts * math.prod(matrix.shape)
        for layer in whole.values()
        for matrix in layer.matrices.values()
    )
    return Checkpoint(
        scheme=scheme,
        layers=whole,
        others=others,
        largest=max(folder.largest for folder in folders),
        elements=outside + inside,
        stamp="\n".join(stamp for folder in folders for stamp in folder.stamps),
    )


def _join(
    ranks: dict[Rank, Folder], scheme: Scheme, num_experts: int | None
) -> Iterable[tuple[str, CutExperts]]:
    found = {}
    for rank, folder in ranks.items():
        own = None if num_experts is None else len(rank.experts(num_experts))
        found[rank], others = layers_of(folder, scheme, own)
        if others:
            raise BadFileError(must(rank.folder, "hold experts only", others[0].name))
    roots = sorted({root for layers in found.values() for root in layers}, key=natural)
    for root in roots:
        lacking = [rank.folder for rank, layers in found.items() if root not in layers]
        if lacking:
            raise BadFileError(must(lacking[0], f"hold {root}", "nothing of it"))
        yield root, CutExperts([(rank, layers[root]) for rank, layers in found.items()])


def _scheme(
    source: Path, folders: list[Folder], named: str | None, specs: list[LayerSpec]
) -> Scheme:
    noted = folders[0].written if named is None else named
    if noted is not None:
        scheme = parse_scheme(noted)
        names = [name for folder in folders for name in folder.entries]
        if not any(scheme.place_of(name) for name in names):
            raise ValueError(must(str(source), f"hold names of scheme {scheme.name}", "none"))
        return scheme
    try:
        return scheme_of([name for folder in folders for name in folder.entries], source)
    except UnsupportedError:
        told = {(spec.layout, spec.orientation) for spec in specs}
        for name in ("stacked", "interleaved", "transposed", "gpt-oss"):
            scheme = SCHEMES[name]
            if told == {(scheme.layout, "in_out" if scheme.transposed else "out_in")}:
                return scheme
        raise


def _configured(source: Path) -> list[LayerSpec]:
    """Return what the model's configuration says of its layers; nothing where it does not tell."""
    path = source / "config.json"
    if not path.is_file():
        return []
    config = read_json(path)
    try:
        return list(from_hf_config(config).values())
    except (TypeError, UnsupportedError, ValueError):
        return []
