"""Time ops beside their peers; print a table, append JSON rows, hold them to targets.

    ./run bench --op activation --op permute        # every shape, T = 4096 and 16384
    ./run bench --assert benchmarks/targets.toml    # exit 1 on a miss; a missing row is a miss
    ./run bench --device cpu --tiny                 # does everything run? (its times say nothing)
    ./run bench --layer --help                      # the whole layer

Each case: results are checked first, then all candidates are timed in turn, round by round. The
floor is the bytes that have to move once, at the copy speed measured in the same run.
"""

import argparse
import hashlib
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import stored_rows
import targets
import torch
from case import OURS, PEER_SLACK, Case, Inputs, Options
from timing import clocks, copy_ceiling, sets_for, time_candidates

from samebits import env
from samebits.problem import Problem
from samebits.testing.cases import MODELS

HERE = Path(__file__).parent
# What ./run bench --layer and benchmarks/training.py time; here only their stored rows are judged.
LAYERS = ("layer", "training")
OPS = sorted(path.stem for path in (HERE / "ops").glob("[a-z]*.py"))
SOURCES = HERE.parent / "src" / "samebits" / "ops"
MEMCPY = "memcpy"

Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        prog="./run bench", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--op", action="append", choices=[*OPS, *LAYERS], help="an op; default: all")
    made.add_argument("--shapes", type=_names, default=list(MODELS), help=",".join(MODELS))
    made.add_argument("--tokens", type=_numbers, default=(4096, 16384), help="T, comma-separated")
    made.add_argument("--variants", type=_names, help="only these variants of the ops")
    made.add_argument("--no-peers", action="store_true", help="only ours and the copy bound")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="shapes of a smoke run, T = 4")
    made.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON rows")
    made.add_argument("--assert", dest="targets", type=Path, help="a TOML file of targets")
    made.add_argument("--rows", type=Path, nargs="+", help="take these rows, run nothing")
    return made


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shapes(names: list[str], tiny: bool) -> dict[str, Problem]:
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise SystemExit(f"unknown shapes {unknown}; expected some of {list(MODELS)}")
    shapes = {name: MODELS[name] for name in names}
    if tiny:
        return {n: replace(p, H=96, F=64, E=min(p.E, 16)) for n, p in shapes.items()}
    return shapes


def source_hash(op: str) -> str:
    """Return a hash of the sources of ``op``: rows of other kernels cannot be mixed up."""
    files = [*(SOURCES / op).rglob("*.py"), *(SOURCES / "_triton").rglob("*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files)))
    return digest.hexdigest()[:12]


def _commit() -> str | None:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def provenance(device: str, ceiling: float) -> Row:
    """Return what a row needs to be read later: machine, versions, command."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "copy_tbs": round(ceiling / 1e9, 3),
        "torch": torch.__version__,
        "triton": env.version_of("triton"),
        "liger": env.version_of("liger-kernel"),
        "python": sys.version.split()[0],
        "samebits": env.version_of("samebits") or "source",
        "commit": _commit(),
        # Folders of this machine are nobody else's business.
        "command": " ".join(
            ["benchmarks/run.py", *(Path(w).name if w.startswith("/") else w for w in sys.argv[1:])]
        ),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _wrong(case: Case, inputs: Inputs) -> dict[str, float]:
    """Return the candidates whose results do not pass, with their error."""
    wrong = {}
    for name, candidate in case.candidates.items():
        error = case.check(inputs, candidate(inputs))
        if not error <= (1.0 if name == OURS else PEER_SLACK):
            wrong[name] = error
    return wrong


def _kernels(call: Callable[[], Any]) -> list[Row]:
    """Return the compiled kernels that ``call`` launches, in order."""
    from triton.runtime import JITFunction

    seen: list[Any] = []
    launch = JITFunction.run

    def noting(*arguments: Any, **options: Any) -> Any:
        seen.append(launch(*arguments, **options))
        return seen[-1]

    with mock.patch.object(JITFunction, "run", noting):
        call()
    return [
        {
            "name": kernel.metadata.name, "hash": kernel.hash[:12],
            "num_warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared,
        }
        for kernel in seen
    ]  # fmt: skip


def run_case(case: Case, device: str, rounds: int, ceiling: float) -> Iterator[Row]:
    """Check and time one case; yield a row per candidate."""
    sets = [case.make(seed) for seed in range(sets_for(case.moved))]
    wrong = _wrong(case, sets[0])
    ours = case.candidates[OURS]
    kernels = _kernels(lambda: ours(sets[0])) if device == "cuda" else []
    candidates = {n: c for n, c in case.candidates.items() if n not in wrong}
    half = torch.empty(case.moved // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    candidates[MEMCPY] = lambda _: (other.copy_(half),)
    times = time_candidates(candidates, sets, case.moved, device, rounds)
    for name in (*case.candidates, MEMCPY):
        row: Row = {
            "op": case.op, "variant": case.variant, "direction": case.direction,
            "shape": case.shape, "T": case.T, "problem": str(case.problem), "candidate": name,
            "config": case.config if name == OURS else "", "moved": case.moved,
            "kernels": kernels if name == OURS else [],
        }  # fmt: skip
        if name in wrong:
            yield row | {"error": wrong[name]}
            continue
        ms = statistics.median(times[name])
        spread = (max(times[name]) - min(times[name])) / ms
        yield row | {
            "ms": ms, "spread": round(spread, 4), "fraction": case.moved / ceiling / ms,
            "rounds": rounds, "sets": len(sets),
        }  # fmt: skip


def _line(case: Case, rows: list[Row]) -> str:
    ours, *others = rows
    label = f"{case.variant:15}{case.direction:9}{case.shape:13} T={case.T:<6}"
    if "ms" not in ours:
        return f"{label} WRONG: {ours['error']:.2f} of the error allowed"
    parts = [f"{ours['ms']:9.4f} ms  {ours['fraction']:.2f} of floor"]
    for row in others:
        said = f"x{row['ms'] / ours['ms']:.2f}" if "ms" in row else "wrong"
        parts.append(f"{row['candidate']} {said}")
    return f"{label} {'  '.join(parts)}"


def _timed_here(asked: list[str] | None) -> list[str]:
    apart = [op for op in asked or [] if op in LAYERS]
    if apart:
        how = "./run bench --layer or benchmarks/training.py times it, --rows FILE judges that"
        raise SystemExit(f"{apart[0]} is no op of this benchmark\nhint: {how}")
    return asked or OPS


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Run what the command line asks for; print, write and return the rows."""
    ops, device, tiny = _timed_here(arguments.op), arguments.device, arguments.tiny
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device cpu --tiny shows only that everything runs")
    shapes = _shapes(arguments.shapes, tiny)
    options = Options((4,) if tiny else arguments.tokens, device, peers=not arguments.no_peers)
    ceiling = copy_ceiling(device, 1 << 20 if tiny else 1 << 30)
    origin = provenance(device, ceiling)
    print(f"{origin['gpu']}  torch {origin['torch']}  Triton {origin['triton']}", end="  ")
    print(f"copy {origin['copy_tbs']} TB/s (read + written)  clocks {clocks()}", flush=True)
    print("peers: their time over ours", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = arguments.out / f"{stamp}-{device}.jsonl"
    written: list[Row] = []
    with path.open("a") as file, torch.no_grad():
        for op in ops:
            module = importlib.import_module(f"ops.{op}")
            extra = origin | {"source_hash": source_hash(op)}
            print(f"\n{op}", flush=True)
            for case in module.cases(shapes, options):
                if arguments.variants and case.variant not in arguments.variants:
                    continue
                rows = list(run_case(case, device, arguments.rounds, ceiling))
                print(_line(case, rows), flush=True)
                for row in rows:
                    file.write(json.dumps(row | extra) + "\n")
                file.flush()
                written += rows
                if device == "cuda":
                    torch.cuda.empty_cache()
    print(f"\nclocks {clocks()}; rows in {path}", flush=True)
    return written


def main() -> int:
    """Return 0, or 1 where a result of ours is wrong or a target is missed."""
    if "--layer" in sys.argv[1:]:
        return importlib.import_module("layer").main([a for a in sys.argv[1:] if a != "--layer"])
    arguments = parser().parse_args()
    rows = stored_rows.read(arguments.rows) if arguments.rows else measure(arguments)
    failures = [
        f"{row['op']} {row['variant']} {row['direction']} {row['shape']} T={row['T']}: wrong result"
        for row in rows
        if row["candidate"] == OURS and "ms" not in row
    ]
    if arguments.targets:
        asked = targets.read(arguments.targets)
        if arguments.op:
            asked = [target for target in asked if target["op"] in arguments.op]
        elif not arguments.rows:
            # The layer is timed by itself, and held to its targets by its stored rows.
            asked = [target for target in asked if target["op"] not in LAYERS]
        found = targets.misses(asked, rows)
        failures += found
        print(f"\n{len(asked)} targets, {len(found)} misses")
    for failure in failures:
        print(f"MISS {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
