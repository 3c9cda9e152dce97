"""Write docs/backends.md: which backend runs what, asked of every backend's ``why_not``.

python scripts/backends_table.py            writes the page
python scripts/backends_table.py --check    exits 1 where the page is not what it would write
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill

from samebits import Activation, Layout, Problem, ProbPlacement
from samebits.activation import ACTIVATIONS
from samebits.backends import BACKENDS
from samebits.formats import FormatPair, WeightFormat

PAGE = Path(__file__).parent.parent / "docs" / "backends.md"
DEVICES = ("cpu", "sm_80", "sm_90", "sm_100")
PLAIN = Problem(H=64, F=192, E=8, K=2, dtype="bf16")
BIASED = replace(PLAIN, gate_up_bias="bf16", down_bias="bf16")

HEAD = """\
# Which backend runs what

Written by `python scripts/backends_table.py` from what every backend answers; CI compares. `auto`
takes the first of {order} that runs a problem; a named backend runs it or raises with its reason;
`samebits explain` says the same of your machine. In the tables "yes" means with gradients (those
around quantised weights, which have none), "inference" without them alone. A column says what is
not refused, not what was measured: that is in the pages of the kernels.

`reference` runs everything on every device of torch, with gradients but for activations in 8 bits.

The options asked about: {options}.
"""


def problems() -> Mapping[str, Problem]:
    """Return one problem for each thing that a layer may ask for, by its name on the page."""
    rows = {dtype: replace(PLAIN, dtype=dtype, probs=_probs(dtype)) for dtype in DTYPES}
    for kind, row in ACTIVATIONS.items():
        caps = {"gate_softcap": 4.0} if "gate_softcap" in row.required else {}
        rows[f"{kind}, gated"] = replace(PLAIN, activation=Activation(kind=kind, **caps))
        if row.ungated:
            rows[f"{kind}, no gate"] = replace(PLAIN, activation=Activation(kind=kind, gated=False))
    for name, activation in ACTIVATION_OPTIONS.items():
        rows[name] = replace(PLAIN, activation=activation)
    for placement in ProbPlacement:
        rows[f"placement {placement}"] = replace(BIASED, placement=placement)
    return rows | OPTIONS


DTYPES = ("bf16", "fp16", "fp32", "fp64")
ACTIVATION_OPTIONS = {
    "alpha": Activation(alpha=1.702),
    "limit before the activation": Activation(limit=7.0),
    "limit after it": Activation(limit=7.0, limit_position="post"),
    "linear offset": Activation(linear_offset=1.0),
    "soft cap of up": Activation(kind="situ", gate_softcap=4.0, up_softcap=25.0),
}
FORMATS = ("fp8_128x128", "mxfp8", "mxfp4", "mxfp4_shuffled", "nvfp4")
# Of activations in 8 bits, by the format of the weights.
ROW_FORMATS = {
    "fp8_128x128": "fp8_1x128",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp8",
    "mxfp4_shuffled": "mxfp8",
}


def _rows(weights: str, rows: str) -> Problem:
    held = FormatPair.parse(weights)
    return replace(PLAIN, format=held, row_format=WeightFormat.parse(rows))


OPTIONS = {
    "interleaved rows": replace(PLAIN, layout=Layout(interleave=1)),
    "interleaved blocks": replace(PLAIN, layout=Layout(interleave=32)),
    "up first": replace(PLAIN, layout=Layout(up_first=True)),
    "biases": BIASED,
    "fp32 biases": replace(PLAIN, gate_up_bias="fp32", down_bias="fp32"),
    "bf16 probabilities": replace(PLAIN, probs="bf16"),
    "post-expert norm": replace(PLAIN, norm_eps=1e-5),
    "some of the experts": replace(PLAIN, N=16, expert_start=4),
    "count of valid tokens": replace(PLAIN, counted=True),
    "fp32 output": replace(PLAIN, out_dtype="fp32"),
    **{f"{k} weights": replace(PLAIN, format=FormatPair.parse(k)) for k in FORMATS},
    **{f"{k} weights, {r} rows": _rows(k, r) for k, r in ROW_FORMATS.items()},
    "odd sizes": replace(PLAIN, H=63, F=41, E=7, K=3),
}


def _probs(dtype: str) -> str:
    return "fp64" if dtype == "fp64" else "fp32"


def page() -> str:
    """Return the text of the page."""
    order = ", ".join(f"`{name}`" for name in BACKENDS)
    parts = [_filled(HEAD.format(order=order, options="; ".join(problems())))]
    parts += [_section(name) for name in BACKENDS if name != "reference"]
    return "\n".join(parts)


def _section(backend: str) -> str:
    """Return the table of one backend: what most options get, then those that get other answers."""
    reasons: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, problem in problems().items():
        cells = tuple(_cell(backend, replace(problem, device=d), reasons) for d in DEVICES)
        alike.setdefault(cells, []).append(name)
    groups = sorted(alike.items(), key=lambda group: -len(group[1]))
    lines = [f"## {backend}", "", f"| what | {' | '.join(DEVICES)} |", "| --- " * 5 + "|"]
    for number, (cells, names) in enumerate(groups):
        what = "; ".join(names) if number else "every option but those below"
        lines.append(f"| {what} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def _filled(text: str) -> str:
    """Return ``text`` with its paragraphs wrapped; its first line is a heading."""
    paragraphs = text.strip().split("\n\n")
    wrap = partial(fill, width=120, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(wrap(paragraph) for paragraph in paragraphs) + "\n"


def _cell(backend: str, problem: Problem, reasons: dict[str, int]) -> str:
    why_not = BACKENDS[backend].why_not
    training, inference = (why_not(replace(problem, grad=grad)) for grad in (True, False))
    if training is None:
        return "yes"
    reason = training if inference is None else inference
    number = reasons.setdefault(reason, len(reasons) + 1)
    return f"inference ({number})" if inference is None else f"no ({number})"


def main() -> int:
    """Write or compare the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write("docs/backends.md is out of date; run python scripts/backends_table.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
