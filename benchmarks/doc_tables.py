"""Write the tables of figures in README.md and docs/ from stored rows.

    python benchmarks/doc_tables.py            # after a run's rows came into benchmarks/results
    python benchmarks/doc_tables.py --check    # exit 1 where a table is not that of the rows

A table stands between ``<!-- rows: NAME -->`` and ``<!-- end -->``.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean

import layer_peers
import stored_rows
import targets
import training

from samebits.testing.cases import MODELS

HERE = Path(__file__).parent
ROOT, RESULTS = HERE.parent, HERE / "results"
LAYER = ("layer-h200", "layer-rest-h200", "layer-missing-h200")
OPTIONS = ("layer-options-h200",)
TRAINING = ("training-h200", "training-extras-h200")
PAGES = ("README.md", "docs/projections.md", "docs/training.md")
MARKED = re.compile(r"(<!-- rows: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OURS = ("fused", "grouped")
ASKED = re.compile(r", [\d.]+x? (?:asked|allowed)$")
NONE = "–"


def plain_cells(names, module):
    """Return {(shape, T): row} of plain cells, with ours, the fastest peer, and it as recorded."""
    found = {}
    for name in names:
        whole = json.loads((RESULTS / f"{name}.json").read_text())
        speed = whole.get("speed") or math.nan
        for row in whole["rows"]:
            place = row.get("variant", "plain"), row.get("routing", "uniform")
            if place == ("plain", "uniform"):
                ours = min(row["ms"][k] for k in OURS if k in row["ms"])
                peers = module.best_peer(row, speed), module.best_peer(row, math.nan)
                cell = {"ours": ours, "peer": peers[0], "recorded": peers[1][1]}
                found[row["shape"], row["T"]] = row | cell
    return found


def by_tokens(cells, said):
    """Return lines of a table of T and shapes; ``said`` is what stands in a cell."""
    head = ["T", *MODELS]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for tokens in sorted({tokens for _, tokens in cells}):
        row = [cells.get((shape, tokens)) for shape in MODELS]
        lines.append(f"| {tokens} | {' | '.join(NONE if c is None else said(c) for c in row)} |")
    return lines


def ratio(cell, peer):
    return NONE if math.isnan(peer) else f"{cell['ours'] / peer:.2f}"


def means(cells, groups):
    """Return lines: geometric means of the fraction of the floor, and over the fastest peers."""
    lines = [
        "| geometric mean | cells | of the floor | over the best peer, corrected | as recorded |",
        "|" + " --- |" * 5,
    ]
    for name, tokens in groups.items():
        group = [cell for (_, count), cell in cells.items() if count in tokens]
        floor = geometric_mean(cell["floor_ms"] / cell["ours"] for cell in group)
        parts = []
        for peers in ([c["peer"][1] for c in group], [c["recorded"] for c in group]):
            over = [c["ours"] / p for c, p in zip(group, peers, strict=True) if not math.isnan(p)]
            parts.append(f"{geometric_mean(over):.3f} ({min(over):.2f}–{max(over):.2f})")
        lines.append(f"| {name} | {len(group)} | {floor:.3f} | {' | '.join(parts)} |")
    return lines


def missed(op, names):
    """Return lines: what every target asks, and which cells miss it."""
    rows = stored_rows.read([RESULTS / f"{name}.json" for name in names])
    lines = ["| target | asked | missed by |", "|" + " --- |" * 3]
    for target in targets.read(HERE / "targets.toml"):
        if target["op"] != op:
            continue
        fixed = {op, *(str(v[0]) for v in target["where"].values() if len(v) == 1)}
        found = {}
        for line in targets.misses([target], rows):
            place, _, figure = line.removeprefix(f"{target['name']}: ").rpartition(": ")
            where = " ".join(word for word in place.split() if word not in fixed)
            said = ASKED.sub("", figure).replace("x best-peer", " ×")
            found.setdefault(said, []).append(where)
        parts = [
            f"{', '.join(filter(None, where))}: {said}".removeprefix(": ")
            for said, where in found.items()
        ]
        limits = [str(v) for k, v in target.items() if k.endswith(("_least", "_most"))]
        lines.append(f"| {target['name']} | {limits[0]} | {'; '.join(parts) or 'met'} |")
    return lines


def training_rows(cells):
    lines = [
        "| shape | T | ms | of the floor | best peer, ms | over it | as recorded | host | GB |",
        "|" + " --- |" * 9,
    ]
    for shape, tokens in sorted(cells, key=lambda place: (list(MODELS).index(place[0]), place[1])):
        cell = cells[shape, tokens]
        name, peer = cell["peer"]
        name = name.replace(" (recorded)", ", recorded")
        lines.append(
            f"| {shape} | {tokens} | {cell['ours']:.3f} | {cell['floor_ms'] / cell['ours']:.2f} | "
            f"{peer:.3f} ({name}) | {ratio(cell, peer)} | {ratio(cell, cell['recorded'])} | "
            f"{cell['host_ms']['fused'] / cell['ours']:.2f} | {cell['memory']['fused'] / 1e9:.2f} |"
        )
    return lines


def tables():
    """Return {name: lines} of every table."""
    layer = plain_cells(LAYER, layer_peers)
    steps = plain_cells(TRAINING, training)
    counts = {tokens for _, tokens in layer}
    groups = {"all": counts, "T = 16 and 64": {16, 64}, "T ≥ 4096": {4096, 16384}}
    of_steps = {"all": {t for _, t in steps}}
    of_steps |= {f"T = {t}": {t} for t in sorted({t for _, t in steps})}
    return {
        "layer": by_tokens(layer, lambda c: f"{c['ours']:#.3g} ({c['floor_ms'] / c['ours']:.2f})"),
        "layer-beside-torch": by_tokens(
            layer,
            lambda c: f"{c['ours']:#.3g} / {c['ms'].get('torch grouped_mm', math.nan):#.3g}",
        ),
        "layer-peers": by_tokens(
            layer, lambda c: f"{ratio(c, c['peer'][1])} / {ratio(c, c['recorded'])}"
        ),
        "layer-means": means(layer, groups),
        "layer-missed": missed("layer", (*OPTIONS, *LAYER)),
        "training": training_rows(steps),
        "training-ratios": by_tokens(
            steps, lambda c: f"{c['ours']:.2f} ({ratio(c, c['recorded'])})"
        ),
        "training-means": means(steps, of_steps),
        "training-missed": missed("training", TRAINING),
    }


def filled(text: str, made: dict[str, Iterable[str]]) -> str:
    """Return ``text`` with its tables replaced."""
    return MARKED.sub(lambda m: m[1] + "\n".join(made[m[2]]) + "\n" + m[3], text)


def main() -> int:
    """Return 0, or 1 where ``--check`` finds another table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    only_checked = parser.parse_args().check
    made, others = tables(), []
    for name in PAGES:
        text = (ROOT / name).read_text()
        now = filled(text, made)
        if now != text:
            others.append(name)
            if not only_checked:
                (ROOT / name).write_text(now)
    print("changed:" if others else "nothing changed", *others)
    return 1 if only_checked and others else 0


if __name__ == "__main__":
    sys.exit(main())
