"""Which tensors go into which file of a conversion, and which files are there already."""

from pathlib import Path

from samebits.checkpoints.cut import RankExperts
from samebits.checkpoints.files import Shape, entries_of
from samebits.checkpoints.opened import Checkpoint
from samebits.checkpoints.schemes import Scheme
from samebits.checkpoints.source import INDEX, Rank
from samebits.checkpoints.target import Output, copied, natural, outputs_of
from samebits.errors import must


def plan(opened: Checkpoint, target: Scheme, ranks: list[Rank]) -> dict[str, list[Output]]:
    """Return the tensors of each folder of the result, in order.

    Raises:
        UnsupportedError: The scheme or the ranks cannot hold what there is.

    Determinism: exact.
    """
    folders = {"": [copied(entry) for entry in opened.others]}
    for rank in ranks:
        held = folders.setdefault("" if len(ranks) == 1 else rank.folder, [])
        for layer in opened.layers.values():
            held += outputs_of(layer if len(ranks) == 1 else RankExperts(layer, rank), target)
    return {
        folder: sorted(outputs, key=lambda output: natural(output.shape.name))
        for folder, outputs in folders.items()
    }


def shards_of(outputs: list[Output], limit: int) -> list[tuple[str, list[Output]]]:
    """Return the files of a folder by name: full ones of ``limit`` bytes, a larger tensor alone.

    Determinism: exact.
    """
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.shape.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.shape.bytes
    shards = [shard for shard in shards if shard]
    if len(shards) == 1:
        return [("model.safetensors", shards[0])]
    return [
        (f"model-{number:05}-of-{len(shards):05}.safetensors", shard)
        for number, shard in enumerate(shards, 1)
    ]


def is_whole(path: Path, shard: list[Output], metadata: dict[str, str]) -> bool:
    """Return whether an earlier run of this conversion wrote the file.

    Raises:
        ValueError: Another one did.

    Determinism: exact.
    """
    if not path.is_file():
        return False
    entries, said = entries_of(path)
    if said != metadata:
        rule = "hold nothing, or files of the same conversion of the same source"
        raise ValueError(must(str(path.parent), rule, f"{path.name} of another"))
    held = [Shape(entry.name, entry.dtype, entry.shape) for entry in entries.values()]
    return held == [output.shape for output in shard]


def refuse_strangers(destination: Path, expected: set[Path], run: str) -> None:
    """Raise ``ValueError`` where the destination holds tensors that this conversion does not write.

    Determinism: exact.
    """
    folders = [path.parent for path in expected]
    # A reader would follow an index that stands beside a single file.
    indices = {folder / INDEX for folder in folders if folders.count(folder) > 1}
    found = set(destination.rglob("*.safetensors")) - expected
    strangers = sorted(found | set(destination.rglob(INDEX)) - indices)
    if strangers:
        rule = f"hold only files of this conversion ({run[:8]})"
        raise ValueError(must(str(destination), rule, strangers[0].name))
