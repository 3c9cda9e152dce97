"""Rewrite the experts of a checkpoint in another scheme, or cut it for ranks, and back.

Files are written front to back, one expert at a time: besides one expert's matrices nothing is held
in memory. Every file gets its name when it is whole, the index comes last. A run that was killed is
resumed by the same call; whole files are kept.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samebits.checkpoints.files import Writer, write_text
from samebits.checkpoints.opened import open_checkpoint
from samebits.checkpoints.plan import is_whole, plan, refuse_strangers, shards_of
from samebits.checkpoints.schemes import parse_scheme
from samebits.checkpoints.source import INDEX, SCHEME_KEY, ranks_of
from samebits.checkpoints.target import Output
from samebits.errors import must

# Key of a file's metadata: which conversion wrote it.
_RUN_KEY = "samebits_conversion"
# What is copied from beside the tensors.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
# (files that are whole, files in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What ``convert`` did."""

    # Scheme of the source, and of the result.
    source: str
    scheme: str
    # Layers with experts.
    layers: int
    # Elements of the source, each once, and of the result; equal but for tensors that several ranks
    # hold whole.
    elements_read: int
    elements_written: int
    # Files written, and files that an earlier run had written.
    written: int
    kept: int


def convert(
    source: Path,
    destination: Path,
    to: str,
    *,
    source_scheme: str | None = None,
    num_experts: int | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write the checkpoint ``source`` to the folder ``destination`` with its experts as ``to``.

    Names keep what comes before the experts, and other tensors stay as they are. With more than one
    rank, each rank's experts get a folder of their own, ``rank-tp0of2-ep0of4`` and so on, numbered
    from 0 there; gate and up are cut apart, each by its rows, and a bias of the second projection
    stays whole, to be added once. A cut source is read as one.

    Args:
        source: A folder of safetensors files, or one file.
        destination: A folder, created where there is none.
        to: A scheme of ``samebits.checkpoints.schemes``: "stacked", "megatron:interleave=32" …
        source_scheme: The scheme of ``source``; None finds it by its names, by what an earlier
            conversion noted, or by its ``config.json``.
        num_experts: E; None takes what the source's ``config.json`` says, or else its names and
            shapes, which must agree. DBRX's do not say.
        tensor_parallel: Ranks that share each expert.
        expert_parallel: Ranks that share the experts, at most as many as those.
        shard_bytes: A file gets no further tensor where it would grow beyond this; None means the
            size of the largest file of the source.
        progress: Called after each file.

    Returns:
        What was done.

    Raises:
        BadFileError: A file is damaged, or a tensor is missing, misshapen or has NaN scales.
        UnsupportedError: The schemes cannot hold what there is, or the source's is not clear.
        ValueError: An argument is wrong, or the destination holds another conversion's files.
        OSError: A file cannot be read or written.

    Determinism: exact: elements are moved, never computed with; the same files each time.
    """
    target = parse_scheme(to)
    for name, number in (
        ("tensor_parallel", tensor_parallel),
        ("expert_parallel", expert_parallel),
        ("num_experts", 1 if num_experts is None else num_experts),
        ("shard_bytes", 1 if shard_bytes is None else shard_bytes),
    ):
        if number < 1:
            raise ValueError(must(name, "be >= 1", number))
    if destination.resolve() == source.resolve():
        raise ValueError(must("destination", "be another folder than source", destination))
    opened = open_checkpoint(source, source_scheme, num_experts)
    fewest = min((layer.num_experts for layer in opened.layers.values()), default=0)
    if expert_parallel > fewest:
        rule = f"be <= {fewest}, the experts of a layer"
        raise ValueError(must("expert_parallel", rule, expert_parallel))
    folders = plan(opened, target, ranks_of(tensor_parallel, expert_parallel))
    limit = opened.largest if shard_bytes is None else shard_bytes
    written = [output.shape for outputs in folders.values() for output in outputs]
    elements = sum(shape.elements for shape in written)
    # Nothing is lost or doubled: only ranks hold some tensors several times.
    assert len(folders) > 1 or elements == opened.elements, (elements, opened.elements)
    run = hashlib.sha256(
        "\n".join([opened.stamp, opened.scheme.key, target.key, str(limit)]).encode()
    ).hexdigest()
    metadata = {"format": "pt", SCHEME_KEY: target.key, _RUN_KEY: run}
    files = [
        (destination / folder / name, shard)
        for folder, outputs in folders.items()
        for name, shard in shards_of(outputs, limit)
    ]
    kept = {path for path, shard in files if is_whole(path, shard, metadata)}
    refuse_strangers(destination, {path for path, _ in files}, run)
    destination.mkdir(parents=True, exist_ok=True)
    for done, (path, shard) in enumerate(files, 1):
        if path not in kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            with Writer(path, [output.shape for output in shard], metadata) as writer:
                for output in shard:
                    for piece in output.pieces():
                        writer.write(piece)
        if progress is not None:
            progress(done, len(files))
    _finish(source, destination, files)
    return Conversion(
        source=opened.scheme.key,
        scheme=target.key,
        layers=len(opened.layers),
        elements_read=opened.elements,
        elements_written=elements,
        written=len(files) - len(kept),
        kept=len(kept),
    )


def _finish(source: Path, destination: Path, files: list[tuple[Path, list[Output]]]) -> None:
    """Copy what stands beside the tensors, and write the indices last."""
    if source.is_dir():
        for pattern in _COPIED:
            for path in source.glob(pattern):
                if path.name != INDEX:
                    shutil.copyfile(path, destination / path.name)
    for partial in destination.rglob("*.safetensors.partial"):
        partial.unlink()
    folders: dict[Path, list[tuple[Path, list[Output]]]] = {}
    for path, shard in files:
        folders.setdefault(path.parent, []).append((path, shard))
    for folder, shards in folders.items():
        if len(shards) == 1:
            continue
        names = {output.shape.name: path.name for path, shard in shards for output in shard}
        size = sum(output.shape.bytes for _, shard in shards for output in shard)
        index = {"metadata": {"total_size": size}, "weight_map": names}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
