"""Peers of the layer benchmark: those that run here, and those that were measured before.

A peer is a function of (x, ids, probs). What cannot be captured in a CUDA graph is timed by plain
launches. Megatron-LM's released kernels compute squared ReLU only: they are compared through the
recorded figures.
"""

import json
import math
import statistics
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from sonic_peer import sonic

RECORD = Path(__file__).with_name("peers_h200.json")
# The peer of this run that the record has too, by which its machine is compared with this one.
COMMON = {"torch grouped_mm": "torch_gmm", "transformers grouped_mm": "hf_gmm"}
# batched_mm copies the weights of every slot.
MOST_COPIED_BYTES = 8e9


def _swiglu(z):
    gate, up = z.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(z.dtype)


@cache
def _compiled_swiglu():
    # Asked for here: torch's compiler takes seconds to load.
    return torch.compile(_swiglu, dynamic=True)


def _grouped_mm_layer(x, ids, probs, weights):
    topk = ids.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.zeros(weights.down.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, ids.reshape(-1), torch.ones_like(ids.reshape(-1), dtype=torch.int32))
    offsets = counts.cumsum(0, dtype=torch.int32)
    mm = torch.nn.functional.grouped_mm
    z = mm(x[order // topk], weights.gate_up.transpose(1, 2), offs=offsets)
    y = mm(_compiled_swiglu()(z), weights.down.transpose(1, 2), offs=offsets)
    places = torch.arange(order.numel(), device=x.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    return (y[inverse].view(-1, topk, x.shape[1]).float() * probs[..., None]).sum(1).to(x.dtype)


def _transformers(problem, weights, implementation):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=problem.H, moe_intermediate_size=problem.F,
        num_experts=problem.E, num_experts_per_tok=problem.K,
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    for name, tensor in (("gate_up_proj", weights.gate_up), ("down_proj", weights.down)):
        # The tensors themselves, not parameters of the same memory: they may want gradients.
        delattr(module, name)
        setattr(module, name, tensor)
    return lambda x, ids, probs: module(x, ids, probs.to(x.dtype))


def _liger(weights):
    function = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    gate_up, down = weights.gate_up, weights.down
    return lambda x, ids, probs: function.apply(x, gate_up, down, ids.int(), probs)


@cache
def _installed(name):
    try:
        import_module(name)
    except ImportError as error:
        print(f"no {name} here ({error})")
        return False
    return True


def peers_of(problem, tokens, weights, names):
    """Return {name: (function, can be captured)} of the peers asked for that are installed."""
    found = {}
    if "torch" in names:
        found["torch grouped_mm"] = (
            lambda x, ids, probs: _grouped_mm_layer(x, ids, probs, weights),
            True,
        )
    if "transformers" in names and _installed("transformers"):
        found["transformers grouped_mm"] = (_transformers(problem, weights, "grouped_mm"), False)
        if tokens * problem.K * 6 * problem.H * problem.F < MOST_COPIED_BYTES:
            found["transformers batched_mm"] = (_transformers(problem, weights, "batched_mm"), True)
    if "liger" in names and _installed("liger_kernel"):
        found["liger"] = (_liger(weights), False)
    if "sonic" in names and _installed("sonicmoe"):
        found["sonic"] = (sonic(weights), False)
    return found


def recorded(shape, tokens):
    """Return the ms of every peer that was measured in this cell."""
    return json.loads(RECORD.read_text())["ms"].get(shape, {}).get(str(tokens), {})


def speed_of_this_machine(rows):
    """Return this run's time over the record's, by the common peers in cells of many tokens.

    The median over cells, from T = 256 on: below, launches count, and those depend on the host.
    """
    ratios = []
    for row in rows:
        record = recorded(row["shape"], row["T"])
        for name, other in COMMON.items():
            if row["routing"] == "uniform" and row["T"] >= 256 and name in row["ms"]:
                ratios += [row["ms"][name] / record[other]] if other in record else []
    return statistics.median(ratios) if ratios else math.nan


def best_peer(row, speed):
    """Return (name, ms) of the fastest peer of a row; recorded ones count for uniform routing."""
    ours = ("fused", "grouped")
    peers = {name: ms for name, ms in row["ms"].items() if name not in ours}
    if row["routing"] == "uniform" and row["variant"] == "plain":
        factor = 1.0 if math.isnan(speed) else speed
        for name, ms in recorded(row["shape"], row["T"]).items():
            peers[f"{name} (recorded)"] = ms * factor
    return min(peers.items(), key=lambda item: item[1], default=("none", math.nan))
