"""What each rank runs of modules: experts on a mesh axis, beside FSDP, tensor parallelism, DCP."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from rank_programs import same
from samebits import PostExpertNorm, ProbPlacement, RoutingRule
from samebits.nn import Experts, LoRAExperts, MoE, Router
from samebits.parallel import ExpertParallel, ParallelExperts
from samebits.testing.numerics import judge

HIDDEN, COLUMNS, NUM_EXPERTS = 32, 24, 5
TOKENS = (6, 3, 0, 5)


def layer(placement: ProbPlacement, dtype: torch.dtype, **options: Any) -> MoE:
    """Return a layer with the same parameters on every rank."""
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": COLUMNS, "dtype": dtype}
    return MoE(
        router=Router(
            hidden_size=HIDDEN, num_experts=NUM_EXPERTS, rule=RoutingRule(topk=3), dtype=dtype
        ),
        experts=Experts(
            num_experts=NUM_EXPERTS,
            placement=placement,
            gate_up_bias=True,
            down_bias=True,
            **sizes,
            **options,
        ),
        shared=Experts(num_experts=1, **sizes),
        routed_scaling=2.5,
    )


def tokens(dtype: torch.dtype, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tokens of each rank and the gradients of their outputs."""
    torch.manual_seed(4)
    counts = TOKENS[:size]
    x = [torch.randn(t, HIDDEN).to(dtype) for t in counts]
    return x, [torch.randn(t, HIDDEN).to(dtype) for t in counts]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def compare(name: str, one: Tensor, other: Tensor) -> list[str]:
    return [] if same(one, other) else [name]


def spread_layer(
    placement: ProbPlacement, dtype: torch.dtype, *, checkpointed: bool = False
) -> list[str]:
    """Return what differs between a layer on one rank and one whose experts are spread."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, dout = tokens(dtype, size)
    single = layer(placement, dtype)
    inputs = torch.cat(x).requires_grad_()
    expected = single(inputs)
    expected.backward(torch.cat(dout))
    module = layer(placement, dtype)
    parallelize_module(module, init_device_mesh("cpu", (size,)), {"experts": ExpertParallel()})
    assert isinstance(module.experts, ParallelExperts)
    mine = x[rank].clone().requires_grad_()
    out = checkpoint(module, mine, use_reentrant=False) if checkpointed else module(mine)
    out.backward(dout[rank])
    start = sum(TOKENS[:rank])
    part = slice(start, start + TOKENS[rank])
    assert inputs.grad is not None
    assert mine.grad is not None
    wrong = compare("out", out, expected[part]) + compare("dx", mine.grad, inputs.grad[part])
    found = gradients(module)
    for name, value in gradients(single).items():
        if name.startswith("experts."):
            wrong += compare(name, found[name], value)
    return wrong


def router_gradients(placement: ProbPlacement) -> list[str]:
    """Return which replicated parameters' shares do not add up to the gradient of one rank.

    In fp64: the order of this sum is that of a reduction, not the contract's.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    x, dout = tokens(torch.float64, size)
    single, module = (layer(placement, torch.float64) for _ in range(2))
    single(torch.cat(x)).backward(torch.cat(dout))
    parallelize_module(module, init_device_mesh("cpu", (size,)), {"experts": ExpertParallel()})
    module(x[rank]).backward(dout[rank])
    found, wrong = gradients(module), []
    for name, value in gradients(single).items():
        if name.startswith("experts."):
            continue
        dist.all_reduce(found[name])
        if not judge(found[name], value, value, torch.float64).passed:
            wrong.append(name)
    return wrong


def norm_scale() -> list[str]:
    """Return what is wrong with the gradient of the norm's scale, which all experts share."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, dout = tokens(torch.float64, size)

    def make() -> MoE:
        return layer(ProbPlacement.FC2_OUTPUT, torch.float64, norm=PostExpertNorm(eps=1e-5))

    single = make()
    single(torch.cat(x)).backward(torch.cat(dout))
    module = make()
    parallelize_module(module, init_device_mesh("cpu", (size,)), {"experts": ExpertParallel()})
    module(x[rank]).backward(dout[rank])
    found, expected = gradients(module), gradients(single)
    wrong = compare("down", found["experts.down"], expected["experts.down"])
    scale, exact = found["experts.norm_scale"], expected["experts.norm_scale"]
    return wrong + ([] if judge(scale, exact, exact, torch.float64).passed else ["norm_scale"])


def copied() -> list[str]:
    """Return what a deep copy of a spread layer computes otherwise."""
    x, _ = tokens(torch.float32, dist.get_world_size())
    module = layer(ProbPlacement.FC2_OUTPUT, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, {"experts": ExpertParallel()})
    twin, mine = copy.deepcopy(module), x[dist.get_rank()]
    return compare("out", twin(mine), module(mine))


def with_fsdp(dtype: torch.dtype) -> list[str]:
    """Return what differs on a (dp, ep) mesh of 2 x 2, with every parameter under FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x, dout = tokens(dtype, 4)
    rank = dist.get_rank()
    placement = ProbPlacement.FC2_INPUT
    module = layer(placement, dtype)
    parallelize_module(module, mesh["ep"], {"experts": ExpertParallel()})
    fully_shard(module.experts, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    for _ in range(2):
        module.zero_grad()
        out = module(x[rank])
        out.backward(dout[rank])
    # Each half of the ranks holds all experts; FSDP takes the mean of two, which has one order.
    totals: dict[str, Tensor] = {}
    wrong = []
    for half in ((0, 1), (2, 3)):
        single = layer(placement, dtype)
        expected = single(torch.cat([x[r] for r in half]))
        expected.backward(torch.cat([dout[r] for r in half]))
        if rank in half:
            start = 0 if rank == half[0] else TOKENS[half[0]]
            wrong += compare("out", out, expected[start : start + TOKENS[rank]])
        for name, value in gradients(single.experts).items():
            totals[name] = totals[name] + value if name in totals else value
    found = gradients(module.experts)
    return wrong + [line for n, t in totals.items() for line in compare(n, found[n], t / 2)]


class Block(nn.Module):
    """A dense part under tensor parallelism, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 64, bias=False)
        self.down = nn.Linear(64, HIDDEN, bias=False)
        self.moe = layer(ProbPlacement.FC2_OUTPUT, torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dense = self.down(self.up(x).relu())
        return dense, self.moe(dense)


def with_tensor_parallel() -> list[str]:
    """Return what differs where a dense part is tensor parallel over the ranks of the experts.

    Its output is sharded by token (sequence parallel), so each rank brings its own tokens.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(5)
    block = Block()
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(0)),
        "moe.experts": ExpertParallel(),
    }
    parallelize_module(block, mesh, plan)
    torch.manual_seed(6)
    x = torch.randn(6, HIDDEN)
    dense, out = block(x)
    out.sum().backward()
    parts = [torch.empty_like(dense) for _ in range(size)]
    dist.all_gather(parts, dense.detach().contiguous())
    single = layer(ProbPlacement.FC2_OUTPUT, torch.float32)
    expected = single(torch.cat(parts))
    expected.sum().backward()
    rows = len(dense)
    wrong = compare("out", out, expected[rank * rows : (rank + 1) * rows])
    found = gradients(block.moe.experts)
    for name, value in gradients(single.experts).items():
        wrong += compare(name, found[name], value)
    wrong += [n for n, p in block.named_parameters() if p.grad is None]
    return wrong


def save(folder: str, size: int) -> None:
    """Save a layer whose experts are spread over the first ``size`` ranks."""
    on_some(size, lambda module: dcp.save(state(module), checkpoint_id=folder))


def load(folder: str, size: int) -> list[str]:
    """Load it on another number of ranks; return which parameters lost their bits."""
    wrong: list[str] = []

    def check(module: MoE) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        dcp.load(state(module), checkpoint_id=folder)
        expected = dict(layer(ProbPlacement.FC2_OUTPUT, torch.bfloat16).named_parameters())
        for name, parameter in module.named_parameters():
            wrong.extend(compare(name, whole(parameter), expected[name]))

    on_some(size, check)
    return wrong


def state(module: nn.Module) -> dict[str, Any]:
    return {"model": module.state_dict()}


def on_some(size: int, do: Callable[[MoE], None]) -> None:
    """Call ``do`` with a layer whose experts are spread over groups of ``size`` ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "ep"))
    module = layer(ProbPlacement.FC2_OUTPUT, torch.bfloat16)
    parallelize_module(module, mesh["ep"], {"experts": ExpertParallel()})
    do(module)


def load_weights_of_the_whole() -> list[str]:
    """Return which parameters differ after ``load_weights`` of the whole layer's weights."""
    module = layer(ProbPlacement.FC2_OUTPUT, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, {"experts": ExpertParallel()})
    torch.manual_seed(9)
    other = layer(ProbPlacement.FC2_OUTPUT, torch.float32).experts
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    module.experts.load_weights(other.weights)
    expected = dict(other.named_parameters())
    found = module.experts.named_parameters()
    return [line for n, p in found for line in compare(n, whole(p), expected[n])]


def refusals() -> list[str]:
    """Return the messages of what cannot be spread."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    messages = []
    module = layer(ProbPlacement.FC2_OUTPUT, torch.float32)
    spread = {"experts": ExpertParallel()}
    kind = type("OwnExperts", (Experts,), {})
    own = kind(num_experts=2, hidden_size=HIDDEN, intermediate_size=COLUMNS)
    adapted = LoRAExperts(own, gate_up_rank=1, down_rank=1, scaling=1.0)
    attempts: list[Callable[[], object]] = [
        lambda: parallelize_module(module, mesh, {"router": ExpertParallel()}),
        lambda: parallelize_module(module, mesh, spread),
        lambda: parallelize_module(module, mesh, spread),
        lambda: module.experts(torch.zeros(1, HIDDEN), None, expert_start=1),
        lambda: parallelize_module(adapted, mesh, ExpertParallel()),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return messages
