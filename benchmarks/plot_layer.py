"""Draw the rows of ``./run bench --layer``, and print them as a Markdown table.

    python benchmarks/plot_layer.py benchmarks/results/layer.json --out docs/layer-h200.svg

One panel for each shape: the fraction of the floor over T, ours beside the fastest peer of each
cell, with recorded peers at this machine's speed and as they were recorded.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib.figure
from layer_peers import best_peer
from matplotlib import rc_context

OURS = ("fused", "grouped")
LINES = (
    ("ours", "samebits", "o-", "#236"),
    ("peer", "fastest peer, corrected", "s--", "#c83"),
    ("as_recorded", "fastest peer, as recorded", "s:", "#a9a"),
)
# Text stays text, and the same rows give the same file.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "samebits"}


def read(paths):
    """Return rows, each with ``ours`` and ``peer`` in ms and the peer's name.

    A row of a later file replaces that of the same cell.
    """
    rows = {}
    for path in paths:
        found = json.loads(path.read_text())
        for row in found["rows"]:
            mine = [row["ms"][name] for name in OURS if name in row["ms"]]
            if mine:
                name, peer = best_peer(row, found["speed"])
                _, as_recorded = best_peer(row, math.nan)
                cell = {"ours": min(mine), "peer": peer, "peer_name": name}
                place = row["shape"], row["T"], row["routing"], row["variant"]
                rows[place] = row | cell | {"as_recorded": as_recorded}
    return list(rows.values())


def table(rows):
    """Return lines of Markdown: ours, its fractions, and its ratio to the fastest peer."""
    lines = [
        "| shape | T | ms | of floor | of staged | fastest peer | ms | ours / peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        label = row["shape"] if row["variant"] == "plain" else f"{row['shape']} {row['variant']}"
        label += "" if row["routing"] == "uniform" else f", {row['routing']}"
        ratio = "–" if math.isnan(row["peer"]) else f"{row['ours'] / row['peer']:.2f}"
        lines.append(
            f"| {label} | {row['T']} | {row['ours']:.4g} | {row['floor_ms'] / row['ours']:.2f} | "
            f"{row['staged_ms'] / row['ours']:.2f} | {row['peer_name']} | {row['peer']:.4g} | "
            f"{ratio} |"
        )
    return lines


def draw(rows, path):
    """Draw the panels."""
    plain = [r for r in rows if r["variant"] == "plain" and r["routing"] == "uniform"]
    shapes = list(dict.fromkeys(row["shape"] for row in plain))
    figure = matplotlib.figure.Figure(figsize=(2.6 * len(shapes), 2.8), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        cells = sorted((r for r in plain if r["shape"] == shape), key=lambda r: r["T"])
        at = range(len(cells))
        for key, label, style, color in LINES:
            fractions = [row["floor_ms"] / row[key] for row in cells]
            axes.plot(at, fractions, style, label=label, color=color, ms=4, lw=1.4)
        axes.axhline(1, color="#999", lw=0.8)
        axes.set_xticks(list(at), [f"{row['T']}" for row in cells], rotation=60)
        axes.set(title=shape, xlabel="tokens", ylim=(0, 1.1))
    panels[0].set_ylabel("fraction of the floor")
    panels[0].legend(frameon=False, loc="lower right", fontsize=7)
    with rc_context(SVG):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = read(options.rows)
    print("\n".join(table(rows)))
    if options.out:
        draw(rows, options.out)


if __name__ == "__main__":
    main()
