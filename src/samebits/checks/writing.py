"""Write a file whole or not at all."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to; it takes the place of ``path`` if nothing raises.

    Raises:
        OSError: The folder cannot be written to or is not there, or ``path`` is a folder.
    """
    if not path.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "no such folder", str(path.parent))
    # The suffix stays: writers choose the form by it.
    beside = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
