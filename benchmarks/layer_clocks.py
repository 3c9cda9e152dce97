"""Does a large layer take longer once the device is warm? One call at a time, then without pause.

    python benchmarks/layer_clocks.py --out FILE [--cell mixtral:16384] [--seconds 1.2]

Beside it the product of 8192 by 8192 matrices, whose rate the staged model of layer.py takes from a
run of 18 ms. "Alone": a call after a quarter of a second of rest, eight times. "Sustained": calls
without pause; the first three and the median of the last ten. Clocks and power are sampled then.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import triton
from layer_candidates import using
from layer_cases import cells_of, large_product, sets_of, weights_of
from timing import captured

from samebits.experts import experts
from samebits.routing import Routing
from samebits.testing.cases import MODELS

FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


def timed(run):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    return start, stop


def numbers(line):
    """Return the numbers of a sample; none where one of them is not known."""
    try:
        found = [float(part) for part in line.split(",")]
    except ValueError:
        return []
    return found if len(found) == len(FIELDS.split(",")) else []


def sampled(function):
    """Return what ``function`` does, and the device's clocks and power meanwhile: least, most."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return function(), {}
    index = str(torch.cuda.current_device())
    command = [tool, "-i", index, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as file:
        sampler = subprocess.Popen([*command, "-lms", "20"], stdout=file)
        # It takes a while to begin.
        time.sleep(0.3)
        found = function()
        torch.cuda.synchronize()
        sampler.terminate()
        sampler.wait()
        file.seek(0)
        samples = list(map(numbers, file.read().splitlines()))
    state = {}
    for place, name in enumerate(FIELDS.split(",")):
        values = [sample[place] for sample in samples if sample]
        if values:
            state[name] = [min(values), statistics.median(values), max(values)]
    return found, state


def measure(run, seconds):
    alone = []
    for _ in range(8):
        time.sleep(0.25)
        start, stop = timed(run)
        torch.cuda.synchronize()
        alone.append(start.elapsed_time(stop))

    def sustained():
        calls = max(13, int(1e3 * seconds / min(alone)))
        events = [timed(run) for _ in range(calls)]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    time.sleep(0.5)
    times, state = sampled(sustained)
    return {
        "alone_ms": alone, "first_ms": times[:3], "sustained_ms": statistics.median(times[-10:]),
        "all_ms": times, "state": state,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("layer-clocks.json"))
    parser.add_argument("--cell", default="mixtral:16384")
    parser.add_argument("--seconds", type=float, default=1.2)
    arguments = parser.parse_args()
    ((name, tokens),) = cells_of(arguments.cell)
    problem = MODELS[name]
    weights, sets = weights_of(problem), sets_of(problem, tokens, "uniform")
    tiles = {"layer": {}, "layer, first tile s4 g8": {"group": 8, "num_stages": 4}}

    def layer(which):
        x, ids, probs = sets[which]
        routing = Routing(ids, probs, problem.experts)
        return experts(x, routing, weights, problem.activation, backend="fused")

    product, flop = large_product()
    found = {}
    with torch.no_grad():
        graphs = {}
        for label, first in tiles.items():
            with using(first, {}):
                graphs[label] = captured(layer, 1, 1)
        graphs["8192³ × 10"] = captured(product, 1, 10)
        for label, graph in graphs.items():
            row = found[label] = measure(graph.replay, arguments.seconds)
            one, many = statistics.median(row["alone_ms"]), row["sustained_ms"]
            print(
                f"{label:26} alone {one:8.3f} ms  first "
                + " ".join(f"{ms:.3f}" for ms in row["first_ms"])
                + f"  sustained {many:8.3f} ({many / one:.3f})  {row['state']}",
                flush=True,
            )
    for kind in ("alone", "sustained"):
        ms = found["8192³ × 10"][f"{kind}_ms"]
        ms = statistics.median(ms) if isinstance(ms, list) else ms
        print(f"8192³ {kind}: {10 * flop / ms / 1e9:.0f} TFLOP/s")
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"triton": triton.__version__, "cell": arguments.cell, "rows": found}
    arguments.out.write_text(json.dumps(about, indent=0) + "\n")


if __name__ == "__main__":
    main()
