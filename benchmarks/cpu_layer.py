"""Time the layer on a CPU beside transformers' implementations of the same experts module.

    python benchmarks/cpu_layer.py --out benchmarks/results/layer-cpu.json
    python benchmarks/cpu_layer.py --quick

Candidates run in turn, round by round; ms is the median. ``noise`` is eager a second time: a
difference smaller than that between the two means nothing. A peer that is far behind in its first
run gets three rounds. At the end, what row independence by fixed blocks of rows would cost.
"""

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from samebits import env
from samebits.integrations.transformers import attach, register

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PEERS = ("eager", "grouped_mm", "batched_mm")
# A peer so many times slower than the best is out of the race.
_FAR_BEHIND = 2.0
# batched_mm copies the weights of every slot: past this many bytes it is left out.
_MOST_COPIED = 8e9


def modules() -> Iterator[tuple[str, Any, Any, int, int]]:
    """Yield shape, experts class, configuration, E and K of each module."""
    qwen = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    gpt = GptOssConfig(
        hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4
    )
    yield "H2048 F768 E128 K8", Qwen3MoeExperts, qwen, 128, 8
    yield "H2880 F2880 E32 K4", GptOssExperts, gpt, 32, 4


def build(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return an attached module of ``dtype`` with random parameters."""
    with torch.device("meta"):
        module = cls(config)
    module = module.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        for part in parameter.data:
            part.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    module.requires_grad_(False)
    module.config._experts_implementation = "eager"
    attach(module)
    return module


def measure(
    module: Any, tokens: int, experts: int, topk: int, dtype: torch.dtype, rounds: int
) -> dict[str, float]:
    """Return the median milliseconds of each candidate, by name."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, module.config.hidden_size, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    probs = torch.rand(tokens, topk, generator=generator)
    copied = tokens * topk * module.down_proj[0].numel() * 3 * x.element_size()
    peers = [name for name in PEERS if name != "batched_mm" or copied < _MOST_COPIED]

    def run(name: str) -> None:
        module.config._experts_implementation = "eager" if name == "noise" else name
        module(x, ids, probs)

    return interleave(dict.fromkeys((*peers, "samebits", "noise"), run), rounds)


def interleave(candidates: dict[str, Callable[[str], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each candidate; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    first: dict[str, float] = {}
    for step in range(rounds + 1):
        for name, candidate in candidates.items():
            if step > 3 and first[name] > _FAR_BEHIND * min(first.values()):
                continue
            start = time.perf_counter()
            candidate(name)
            ms = (time.perf_counter() - start) * 1e3
            if step == 0:
                first[name] = ms
            else:
                first[name] = min(first[name], ms)
                times[name].append(ms)
    return {name: statistics.median(found) for name, found in times.items()}


def row_blocks(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield what products of fixed blocks of rows cost beside the quickest product of all rows.

    Blocks make a row independent of the number of rows: a product then has one shape always, the
    last block is padded. Weights rotate, so that they come from memory.
    """
    for name, dtype in DTYPES.items():
        weights = (torch.randn(16, 1536, 2048) / 45).to(dtype)
        for rows in (1, 8, 64):
            x = torch.randn(rows, 2048).to(dtype)
            candidates: dict[str, Callable[[str], object]] = {}
            for order, product in (("x·wᵀ", linear), ("w·xᵀ", _weight_first)):
                candidates[f"whole {order}"] = _over(weights, x, product)
                for block in (16, 64):
                    padded = torch.zeros(-(-rows // block) * block, 2048, dtype=dtype)
                    padded[:rows] = x
                    call = _over(weights, padded, product, block)
                    candidates[f"blocks of {block} {order}"] = call
            ms = interleave(candidates, rounds)
            best = {
                kind: min(value for key, value in ms.items() if key.startswith(kind))
                for kind in ("whole", "blocks of 16", "blocks of 64")
            }
            cost = {kind: best[kind] / best["whole"] for kind in best if kind != "whole"}
            yield {"dtype": name, "rows": rows, "ms": ms, "cost": cost}


def _weight_first(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(weight[None], x.T[None])[0].T


def _over(
    weights: Tensor, x: Tensor, product: Callable[[Tensor, Tensor], Tensor], block: int = 0
) -> Callable[[str], object]:
    blocks = x.split(block) if block else (x,)

    def call(_name: str) -> None:
        for weight in weights:
            for part in blocks:
                product(part, weight)

    return call


def cpu_name() -> str:
    """Return the model name of the CPU, as the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Print a line for each cell and the geometric means; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    register()
    rows: list[dict[str, Any]] = []
    for shape, cls, config, experts, topk in modules():
        for name in options.dtypes.split(","):
            module = build(cls, config, DTYPES[name])
            for tokens in map(int, options.tokens.split(",")):
                with torch.inference_mode():
                    ms = measure(module, tokens, experts, topk, DTYPES[name], rounds)
                ratio = ms["samebits"] / min(ms[peer] for peer in PEERS if peer in ms)
                rows.append({"shape": shape, "dtype": name, "T": tokens, "ms": ms, "ratio": ratio})
                cells = "  ".join(f"{key} {value:8.2f}" for key, value in ms.items())
                print(f"{shape} {name} T={tokens:<5} {cells}  ours/best {ratio:.2f}", flush=True)
            del module
    means = {}
    for name in options.dtypes.split(","):
        ratios = [row["ratio"] for row in rows if row["dtype"] == name]
        means[name] = math.exp(statistics.mean(map(math.log, ratios)))
        print(f"geometric mean of ours/best, {name}: {means[name]:.2f}, worst {max(ratios):.2f}")
    blocks = []
    with torch.inference_mode():
        for row in row_blocks(min(rounds, 7)):
            blocks.append(row)
            cost = "  ".join(f"{kind} {value:.2f}" for kind, value in row["cost"].items())
            print(f"row blocks {row['dtype']} rows={row['rows']:<4} time / unblocked: {cost}")
    if options.out:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "rounds": rounds,
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "devices": env.devices(),
            "versions": env.versions() | {"transformers": transformers.__version__},
        }
        result = about | {"geometric_means": means, "rows": rows, "row_blocks": blocks}
        options.out.write_text(json.dumps(result, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
