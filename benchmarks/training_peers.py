"""Peers of training.py: those of the layer benchmark, and Megatron-LM's compiled activation."""

from importlib import import_module

import torch
from layer_peers import peers_of as layer_peers_of

# What a peer of this run is called in the record of other machines.
RECORDED = {
    "torch grouped_mm": "torch_gmm",
    "transformers grouped_mm": "hf_gmm",
    "megatron activation": "gmm+mlm_act",
    "sonic": "sonic",
    "liger": "liger",
}
# What a peer may raise that does not run here: its row is left out, with the reason.
FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError)


def _megatron(weights):
    """Return sort + ``F.grouped_mm`` + Megatron-LM's weighted SwiGLU, as its experts module does.

    The probability is multiplied into the activation: the same function, rounded elsewhere.
    """
    swiglu = import_module("megatron.core.fusions.fused_bias_swiglu").weighted_bias_swiglu_impl
    mm = torch.nn.functional.grouped_mm

    def call(x, ids, probs):
        topk, flat = ids.shape[1], ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(weights.down.shape[0], dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        offsets = counts.cumsum(0, dtype=torch.int32)
        z = mm(x[order // topk], weights.gate_up.transpose(1, 2), offs=offsets)
        h = swiglu(z, None, probs.reshape(-1)[order][:, None])
        y = mm(h, weights.down.transpose(1, 2), offs=offsets)
        places = torch.arange(order.numel(), device=x.device)
        inverse = torch.empty_like(order).scatter_(0, order, places)
        return y[inverse].view(-1, topk, x.shape[1]).float().sum(1).to(x.dtype)

    return call


def peers_of(problem, weights, names):
    """Return {name: layer} of the peers asked for that are installed."""
    # None is captured here: the number of tokens only tells what batched_mm would copy.
    found = layer_peers_of(problem, 1 << 20, weights, names)
    layers = {name: layer for name, (layer, _) in found.items()}
    if "megatron" in names:
        try:
            layers["megatron activation"] = _megatron(weights)
        except FAULTS as error:
            print(f"no megatron here ({type(error).__name__}: {error})"[:200])
    return layers
