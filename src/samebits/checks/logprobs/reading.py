"""Read a recording from a file: JSON lines, safetensors, Arrow or Parquet, by its suffix."""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.checks.logprobs.recording import Recording, RecordingError
from samebits.errors import must

# Names under which log-probabilities are looked for, in this order.
KEYS = ("log_probs", "logprobs")


def read(path: Path, key: str | None = None) -> Recording:
    """Return the recording in ``path``.

    Args:
        path: The file; docs/logprobs.md describes the forms.
        key: Name of the log-probabilities in it; None looks for ``KEYS``.

    Raises:
        RecordingError: The file has another form, or its values cannot be compared.
        OSError: The file cannot be read.
        ImportError: What reads this form is not installed.
    """
    if path.suffix not in READERS:
        rule = f"end in one of {', '.join(READERS)}"
        raise RecordingError(must(str(path), rule, repr(path.suffix)))
    columns = READERS[path.suffix](path)
    name = _key(path, columns, key)
    ids = columns.get("id")
    return Recording(
        name=path.name,
        log_probs=_tensors(path, name, columns[name], torch.float64),
        masks=_optional(path, "mask", columns, torch.bool),
        tokens=_optional(path, "tokens", columns, torch.int64),
        ids=None if ids is None else [str(name) for name in ids],
    )


Columns = Mapping[str, Sequence[Any]]


def _read_lines(path: Path) -> Columns:
    """Return one column for each key that every line has."""
    rows: list[dict[str, Any]] = []
    # Some editors begin a file with a mark of its encoding.
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(path, number, line))
        except UnicodeDecodeError as error:
            raise RecordingError(must(str(path), "be UTF-8 text", error)) from None
    if not rows:
        raise RecordingError(must(str(path), "hold at least one line", "none"))
    return {key: [row[key] for row in rows] for key in rows[0] if all(key in row for row in rows)}


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"{path}:{number}"
        raise RecordingError(
            must(where, "be one JSON object", f"{line[:40]!r} ({error})")
        ) from None
    if not isinstance(row, dict):
        raise RecordingError(must(f"{path}:{number}", "be one JSON object", type(row).__name__))
    return row


def _read_safetensors(path: Path) -> Columns:
    _need("safetensors", path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise RecordingError(must(str(path), "be a safetensors file", error)) from None
    # One sequence a row; a tensor without rows is refused later, by its shape.
    return {name: list(value) if value.dim() else [value] for name, value in tensors.items()}


def _read_arrow(path: Path) -> Columns:
    _need("pyarrow", path)
    import pyarrow as pa
    from pyarrow import feather, parquet

    try:
        table = parquet.read_table(path) if path.suffix == ".parquet" else feather.read_table(path)
    except pa.ArrowInvalid as error:
        raise RecordingError(must(str(path), "be an Arrow or Parquet file", error)) from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


READERS: Mapping[str, Callable[[Path], Columns]] = {
    ".jsonl": _read_lines,
    ".safetensors": _read_safetensors,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
    ".parquet": _read_arrow,
}


def _need(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise ImportError(f"{path}: {package} reads this; install it")
    # A file that cannot be opened is told apart from one of another form.
    path.open("rb").close()


def _key(path: Path, columns: Columns, key: str | None) -> str:
    wanted = KEYS if key is None else (key,)
    for name in wanted:
        if name in columns:
            return name
    rule = f"hold {' or '.join(wanted)}"
    hint = "" if key else " (--key names another)"
    found = ", ".join(sorted(map(str, columns))) or "nothing"
    raise RecordingError(must(str(path), rule + hint, found))


def _optional(
    path: Path, name: str, columns: Columns, dtype: torch.dtype
) -> Sequence[Tensor] | None:
    return _tensors(path, name, columns[name], dtype) if name in columns else None


def _tensors(path: Path, name: str, column: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    return [_tensor(f"{path}: {name}[{i}]", values, dtype) for i, values in enumerate(column)]


def _tensor(where: str, values: Any, dtype: torch.dtype) -> Tensor:
    try:
        if not isinstance(values, Tensor):
            if dtype == torch.float64 and isinstance(values, list):
                # A token that an engine has no number for must be masked: NaN says so later.
                values = [float("nan") if value is None else value for value in values]
            values = torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RecordingError(must(where, "be a list of numbers", error)) from None
    if values.dim() != 1:
        raise RecordingError(must(where, "be one sequence of numbers", tuple(values.shape)))
    tensor: Tensor = values.to(dtype)
    if dtype != torch.float64 and bool((tensor != values).any()):
        # A weight is no mask, and a fraction no token: neither is rounded in silence.
        rule = "hold 0 and 1 alone" if dtype == torch.bool else "hold whole numbers"
        wrong = values[tensor != values][0].item()
        raise RecordingError(must(where, rule, wrong))
    return tensor
