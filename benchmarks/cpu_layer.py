"""Time the layer on a CPU beside transformers' implementations of the same experts module.

    python benchmarks/cpu_layer.py [--tokens 1,16,128,1024] [--dtypes bf16,fp32] [--rounds 21]

Candidates run in turn, round by round; ms is the median. ``noise`` is eager a second time: a
difference smaller than that between the two means nothing.
"""

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from samebits.integrations.transformers import attach, register

PEERS = ("eager", "grouped_mm", "batched_mm")


def modules():
    qwen = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    gpt = GptOssConfig(
        hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4
    )
    yield "H2048 F768 E128 K8", Qwen3MoeExperts, qwen, 128, 8
    yield "H2880 F2880 E32 K4", GptOssExperts, gpt, 32, 4


def build(cls, config, dtype):
    with torch.device("meta"):
        module = cls(config)
    module = module.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    module.requires_grad_(False)
    module.config._experts_implementation = "eager"
    attach(module)
    return module


def measure(module, tokens, experts, topk, dtype, rounds):
    hidden = module.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    probs = torch.rand(tokens, topk, generator=generator)
    # batched_mm copies the weights of every slot: past 8 GB it is left out.
    copied = tokens * topk * module.down_proj[0].numel() * 3 * x.element_size()
    peers = [name for name in PEERS if name != "batched_mm" or copied < 8e9]
    times = {name: [] for name in (*peers, "samebits", "noise")}
    for step in range(rounds + 1):
        for name, found in times.items():
            module.config._experts_implementation = "eager" if name == "noise" else name
            start = time.perf_counter()
            module(x, ids, probs)
            if step:
                found.append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,16,128,1024")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    register()
    rows, ratios = [], []
    for shape, cls, config, experts, topk in modules():
        for name in options.dtypes.split(","):
            dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
            module = build(cls, config, dtype)
            for tokens in map(int, options.tokens.split(",")):
                with torch.inference_mode():
                    ms = measure(module, tokens, experts, topk, dtype, options.rounds)
                ratio = ms["samebits"] / min(ms[peer] for peer in PEERS if peer in ms)
                ratios.append(ratio)
                rows.append({"shape": shape, "dtype": name, "T": tokens, "ms": ms, "ratio": ratio})
                cells = "  ".join(f"{key} {value:8.2f}" for key, value in ms.items())
                print(f"{shape} {name} T={tokens:<5} {cells}  ours/best {ratio:.2f}", flush=True)
            del module
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"geometric mean of ours/best: {mean:.2f}")
    if options.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"machine": platform.processor(), "threads": torch.get_num_threads(), **versions}
        options.out.write_text(json.dumps(about | {"rows": rows}, indent=0))


if __name__ == "__main__":
    main()
