"""Time triton_kernels' MXFP4 layer beside ours: a peer that is installed by hand.

    python benchmarks/triton_kernels_peer.py --out FILE [--cells mixtral:mxfp4_shuffled:16,…]

No package index has it (PyPI's ``triton-kernels`` is another project). vLLM's wheel brings a copy
in ``vllm/third_party``, which imports with Triton 3.6; put the folder that holds it on PYTHONPATH.
Its weights are stored as vLLM stores them for Hopper, ours as a cell says. Both layers have the
activation of gpt-oss and interleaved weights, which is what its fused activation computes. The
peer's routing is made outside the timed region, ours inside: the comparison favours the peer by
those launches.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
import triton
from layer_cases import sets_of
from low_precision import captured, cells_of, interleaved, problem_of
from quantized_inputs import random_weights
from timing import captured as captured_calls

from samebits.activation import Activation
from samebits.formats import MXFP4
from samebits.weights import Layout

ACTIVATION = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
CELLS = [
    *(("gpt-oss-120b", "mxfp4_shuffled", tokens) for tokens in (1, 4, 16)),
    *(("mixtral", "mxfp4_shuffled", tokens) for tokens in (4, 16)),
]
# Its activation and ours round at other places.
FARTHEST = 0.02


def _stored(matrix):
    """Return values and scales in the layouts of Hopper."""
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    # The contraction is not split on Hopper, as vLLM has it.
    opt_flags.update_opt_flags_constraints({"split_k": 1})
    scales = torch.nn.functional.pad(matrix.scales, (0, -matrix.scales.shape[2] % 4))
    kind, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    values = wrap_torch_tensor(matrix.values.transpose(1, 2), dtype=FP4)
    values = convert_layout(values, kind, **options)
    kind, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    return values, convert_layout(wrap_torch_tensor(scales.transpose(1, 2)), kind, **options)


def layer_of(weights):
    """Return the peer, a function of x and of what ``routed`` returns."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from triton_kernels.swiglu import swiglu_fn

    first, first_scales = _stored(weights.gate_up)
    second, second_scales = _stored(weights.down)
    activation = FusedActivation(
        FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (ACTIVATION.alpha, ACTIVATION.limit), 2
    )

    def layer(x, routing):
        data, gather, scatter = routing
        h = matmul_ogs(
            x, first, None, data, gather_indx=gather, fused_activation=activation,
            precision_config=PrecisionConfig(weight_scale=first_scales),
        )  # fmt: skip
        return matmul_ogs(
            h, second, None, data, scatter_indx=scatter, gammas=data.gate_scal,
            precision_config=PrecisionConfig(weight_scale=second_scales),
        )  # fmt: skip

    return layer


def routed(problem, ids, probs):
    """Return the peer's routing of given experts and probabilities, which add up to 1."""
    from triton_kernels.routing import routing

    logits = torch.full((ids.shape[0], problem.E), -torch.inf, device=ids.device)
    return routing(logits.scatter(1, ids.long(), probs.float().log()), problem.K)


def measure(shape, key, tokens, weights, peer):
    """Return the rows of one cell: ours, and the peer's."""
    problem = replace(problem_of(shape, key), activation=ACTIVATION, layout=weights.layout)
    sets = [
        (x, ids, probs / probs.sum(1, keepdim=True))
        for x, ids, probs in sets_of(problem, tokens, "uniform")
    ]
    routings = [routed(problem, ids, probs) for _, ids, probs in sets]
    graph, out = captured(problem, weights, sets)
    theirs = peer(sets[0][0], routings[0]).view_as(out)
    distance = float((theirs.float() - out.float()).norm() / out.float().norm())
    other = captured_calls(lambda which: peer(sets[which][0], routings[which]), len(sets), 1)
    ms, peer_ms = interleaved((graph, other), len(sets))
    about = {"op": "low_precision", "shape": shape, "format": key, "T": tokens}
    print(
        f"{shape:13} {key:14} T={tokens:<5} {ms:8.4f} ms  triton_kernels {peer_ms:8.4f} ms  "
        f"{peer_ms / ms:5.2f}x  distance {distance:.1e}"
        + ("" if distance < FARTHEST else "  FAR APART"),
        flush=True,
    )
    rows = [about | {"candidate": "samebits, gpt-oss activation", "ms": ms}]
    if distance < FARTHEST:
        rows.append(about | {"candidate": "triton_kernels", "ms": peer_ms})
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", type=cells_of, default=CELLS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; this benchmark has nothing to time")
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    versions["triton"] = triton.__version__
    rows = []
    with torch.no_grad():
        for shape in dict.fromkeys(cell[0] for cell in arguments.cells):
            problem = problem_of(shape, "mxfp4")
            weights = random_weights(MXFP4, problem, Layout(interleave=1))
            peer, stored = layer_of(weights), {"mxfp4": weights}
            for _, key, tokens in (cell for cell in arguments.cells if cell[0] == shape):
                if key not in stored:
                    stored[key] = weights.shuffled()
                rows += [r | versions for r in measure(shape, key, tokens, stored[key], peer)]
            del weights, peer, stored
            torch.cuda.empty_cache()
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
