"""SonicMoE as a peer of the layer: its own routing metadata, products and gradients.

Its wheel asks for torch <= 2.9.1, yet imports beside 2.11 with nvidia-cutlass-dsl 4.4.2 and
quack-kernels 0.3.11. It chooses its tiles by timing them in the first call of each shape.
"""

from importlib import import_module

import torch


def sonic(weights):
    """Return the layer as a function of (x, ids, probs) over the same memory of the weights."""
    layer = import_module("sonicmoe").moe_general_routing_inputs
    swiglu = import_module("sonicmoe.enums").ActivationType.SWIGLU
    # It wants experts last, by strides; halves of gate and up are its ``concat_layout``.
    gate_up, down = (part.permute(1, 2, 0) for part in (weights.gate_up, weights.down))
    experts = down.shape[-1]

    def call(x, ids, probs):
        tokens, topk = ids.shape
        token = torch.arange(tokens, dtype=torch.int32, device=x.device)
        out, _ = layer(
            x,
            probs.reshape(-1),
            token.repeat_interleave(topk, output_size=tokens * topk),
            ids.reshape(-1).int(),
            gate_up,
            None,
            down,
            None,
            experts,
            torch.cuda.current_stream().cuda_stream,
            swiglu,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
            concat_layout=True,
        )
        return out

    return call
