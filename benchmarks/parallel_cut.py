"""Compare cut experts and a compiled layer with plain ones, over NCCL; started by torchrun.

    torchrun --nproc-per-node 2 benchmarks/parallel_cut.py [CASE …]

Without numbers of cases, all of ``CASES`` in turn. Ends 1 if bits differ.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from samebits import Layout, ProbPlacement, Routing
from samebits.nn import Experts
from samebits.parallel import Capacity, ExpertParallel

sys.path.append(str(Path(__file__).parent.parent / "tests/parallel"))
from module_programs import compare
from tensor_module_programs import Cut, cut_bits

BF16 = torch.bfloat16
INTERLEAVED = Layout(interleave=1, up_first=True)
CASES = (
    Cut((1, 2), ProbPlacement.FC1_INPUT, BF16),
    Cut((1, 2), ProbPlacement.FC2_INPUT, layout=INTERLEAVED, recompute=True),
    Cut((1, 2), dtype=BF16, orientation="in_out"),
    Cut((2, 1), ProbPlacement.FC2_OUTPUT, BF16),
    Cut((2, 1), ProbPlacement.FC1_INPUT, capacity=10),
    "compiled",
)


def compiled(device):
    """Return what differs between a layer with a capacity and the same, compiled as one graph."""
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 128, "device": device}
    plain, traced = (Experts(**sizes, dtype=BF16) for _ in range(2))
    traced.load_state_dict(plain.state_dict())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (plain, traced):
        parallelize_module(module, mesh, ExpertParallel(capacity=Capacity(96, device)))
    fast = torch.compile(traced, fullgraph=True)
    wrong = []
    torch.manual_seed(1 + dist.get_rank())
    for tokens in (32, 48, 48, 48):
        x, dout = torch.randn(2, tokens, 64, device=device, dtype=BF16)
        ids = torch.randint(4, (tokens, 2), device=device)
        routing = Routing(ids, torch.rand(tokens, 2, device=device))
        found = []
        for module in (plain, fast):
            given = x.clone().requires_grad_()
            out = module(given, routing)
            out.backward(dout)
            assert given.grad is not None
            found.append((out.detach(), given.grad))
        for name, one, other in zip(("out", "dx"), *found, strict=True):
            wrong += compare(f"T = {tokens}: {name}", other, one)
    for name, parameter in plain.named_parameters():
        grads = parameter.grad, traced.get_parameter(name).grad
        assert all(isinstance(grad, DTensor) for grad in grads)
        one, other = (grad.to_local() for grad in grads)
        wrong += compare(name, other, one)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", type=int)
    numbers = parser.parse_args().cases or range(len(CASES))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    wrong = []
    for number in numbers:
        case = CASES[number]
        found = compiled(device) if case == "compiled" else cut_bits([case._replace(device=device)])
        print(f"rank {dist.get_rank()}, case {number}: wrong: {found or 'nothing'}", flush=True)
        wrong += found
    dist.destroy_process_group()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
