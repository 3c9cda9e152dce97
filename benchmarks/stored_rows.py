"""Read stored rows: JSON lines of ops, and the files of the layer's two benchmarks, as one kind."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

from case import OURS

Row = dict[str, Any]
# The fastest of all peers of a cell, recorded ones at the speed of the run's machine.
BEST_PEER = "best-peer"
_BACKENDS = ("samebits", "fused", "grouped")


def read(paths: list[Path]) -> list[Row]:
    """Return the rows of every file.

    A file of ``layer.py`` or ``training.py`` is one object; each of its cells becomes a row of the
    op ``layer`` or ``training``, and one of its best peer. They replace those that an earlier file
    has of the same cell.
    """
    rows: list[Row] = []
    for path in paths:
        text = path.read_text()
        lines = [json.loads(text)] if path.suffix == ".json" else map(json.loads, text.splitlines())
        for entry in lines:
            if "rows" in entry:
                found = cells(entry)
                places = set(map(_place, found))
                rows = [row for row in rows if _place(row) not in places] + found
            else:
                rows.append(entry)
    return rows


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("op", "shape", "T", "routing", "variant"))


def cells(whole: Row) -> list[Row]:
    """Return the rows of one file of ``layer.py`` or ``training.py``."""
    found: list[Row] = []
    plain: dict[tuple[Any, ...], float] = {}
    for cell in whole["rows"]:
        training = "host_ms" in cell
        module = import_module("training" if training else "layer_peers")
        base = {
            "op": "training" if training else "layer",
            "shape": cell["shape"], "T": cell["T"],
            "routing": cell.get("routing", "uniform"), "variant": cell.get("variant", "plain"),
            "problem": cell["shape"], "direction": "both" if training else "forward",
        }  # fmt: skip
        mine = {name: cell["ms"][name] for name in _BACKENDS if name in cell["ms"]}
        if not mine:
            found.append(base | {"candidate": OURS})
            continue
        backend = min(mine, key=lambda name: mine[name])
        ms = mine[backend]
        ours = base | {
            "candidate": OURS, "config": backend, "ms": ms, "fraction": cell["floor_ms"] / ms,
            "source_hash": whole.get("kernels"),
        }  # fmt: skip
        if "staged_ms" in cell:
            ours["staged"] = ms / cell["staged_ms"]
        place = (cell["shape"], cell["T"], base["routing"])
        if base["variant"] == "plain":
            plain[place] = ms
        elif not training and place in plain:
            ours |= {"over_plain": ms / plain[place], "beyond_plain_ms": ms - plain[place]}
        if training:
            ours["host"] = cell["host_ms"][backend] / ms
            held = [v for k, v in cell["memory"].items() if k.startswith("transformers")]
            if "over_plain" in cell:
                ours["over_plain"] = cell["over_plain"]
            if held:
                ours["memory"] = cell["memory"][backend] / min(held)
        found.append(ours)
        others = {name: ms for name, ms in cell["ms"].items() if name not in _BACKENDS}
        filled = {"routing": "uniform", "variant": "plain", **cell, "ms": others}
        name, peer = module.best_peer(filled, whole.get("speed") or math.nan)
        if not math.isnan(peer):
            found.append(base | {"candidate": BEST_PEER, "config": name, "ms": peer})
    return found
