"""Train a mixture-of-experts layer whose experts are spread over ranks; compare with one rank.

    python examples/ep_train.py [--ranks 2] [--steps 60]
    torchrun --nproc-per-node 2 examples/ep_train.py [--device cuda]

Starts itself under torchrun where it is not. Each rank has its own tokens and half of the experts.
At the first and the last step every rank also runs the whole layer on everybody's tokens, and
compares its output, the gradient of its tokens and those of its experts, bit by bit. Takes a few
seconds on CPU. Exits 1 if anything differs.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from samebits import ProbPlacement, RoutingRule
from samebits.arguments import at_least_one
from samebits.nn import Experts, MoE, Router
from samebits.parallel import ExpertParallel

HIDDEN, COLUMNS, EXPERTS, TOPK = 64, 96, 8, 2


def layer(device: torch.device) -> MoE:
    """Return the layer, the same on every rank."""
    torch.manual_seed(0)
    place = {"device": device, "dtype": torch.bfloat16}
    return MoE(
        router=Router(
            hidden_size=HIDDEN,
            num_experts=EXPERTS,
            rule=RoutingRule(topk=TOPK, renormalize=True),
            **place,
        ),
        experts=Experts(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=COLUMNS,
            placement=ProbPlacement.FC2_INPUT,
            gate_up_bias=True,
            down_bias=True,
            **place,
        ),
    )


def tokens_of(rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of a rank and what they should become; ranks have different numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(48 + 16 * rank, HIDDEN, generator=generator)
    return x.to(device, torch.bfloat16), x.roll(1, 1).relu().to(device, torch.bfloat16)


def step_of(module: MoE, x: Tensor, goal: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, gradient of x and loss; gradients of parameters are left in them."""
    x = x.clone().requires_grad_()
    out = module(x)
    # A sum over tokens divided by the tokens of all ranks: shares of one loss.
    loss = (out.float() - goal.float()).square().sum() / (total * HIDDEN)
    loss.backward()
    assert x.grad is not None
    return out.detach(), x.grad, loss.detach()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(module: MoE, step: int, out: Tensor, dx: Tensor) -> list[str]:
    """Return which of this rank's results one rank with everybody's tokens has otherwise."""
    rank, size = dist.get_rank(), dist.get_world_size()
    single = layer(out.device)
    with torch.no_grad():
        for own, spread in zip(single.parameters(), module.parameters(), strict=True):
            own.copy_(whole(spread))
    parts = [tokens_of(r, step, out.device) for r in range(size)]
    x, goal = (torch.cat(values) for values in zip(*parts, strict=True))
    everything, gradient, _ = step_of(single, x, goal, len(x))
    start = sum(len(part) for part, _ in parts[:rank])
    mine = slice(start, start + len(out))
    found = {"output": (out, everything[mine]), "gradient of x": (dx, gradient[mine])}
    for name, parameter in module.experts.named_parameters():
        expected = single.experts.get_parameter(name).grad
        found[f"gradient of {name}"] = whole(parameter.grad), whole(expected)
    return [name for name, (one, other) in found.items() if not torch.equal(one, other)]


def train(arguments: argparse.Namespace) -> list[str]:
    """Train on this rank; return what differed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local = dist.get_node_local_rank() if arguments.device == "cuda" else None
    device = torch.device(arguments.device, local)
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
    module = layer(device)
    mesh = init_device_mesh(arguments.device, (size,), mesh_dim_names=("ep",))
    parallelize_module(module, mesh["ep"], {"experts": ExpertParallel()})
    groups = [list(module.router.parameters()), list(module.experts.parameters())]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=3e-3)
    wrong: list[str] = []
    for step in range(arguments.steps):
        optimizer.zero_grad()
        x, goal = tokens_of(rank, step, device)
        total = sum(48 + 16 * r for r in range(size))
        out, dx, loss = step_of(module, x, goal, total)
        if step in (0, arguments.steps - 1):
            wrong += [f"step {step}: {name}" for name in differing(module, step, out, dx)]
        # The router is on every rank: its gradients are shares, to be added. Experts' are sums.
        for parameter in module.router.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss)
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3d}  loss {loss:.4f}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=at_least_one, default=2, help="without torchrun only")
    parser.add_argument("--steps", type=at_least_one, default=60)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        torchrun(["--standalone", "--nproc-per-node", str(arguments.ranks), *sys.argv])
        return 0
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    wrong = train(arguments)
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, wrong)
    rank, failed = dist.get_rank(), any(every)
    dist.destroy_process_group()
    if rank == 0:
        for other, lines in enumerate(every):
            for line in lines:
                print(f"rank {other}: {line} has other bits than on one rank")
        verdict = "do not have" if failed else "have"
        print(f"outputs and gradients {verdict} the bits of one rank")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
