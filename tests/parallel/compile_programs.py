"""What each rank runs of compiled layers over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from module_programs import HIDDEN, NUM_EXPERTS, TOKENS, compare, gradients, layer
from samebits import ProbPlacement, Routing
from samebits.parallel import Capacity, ExpertParallel
from tensor_module_programs import Cut, spread


class Block(nn.Module):
    """Experts that are spread, and a little around them; the whole layer is slow to compile."""

    def __init__(self, placement: ProbPlacement, capacity: int | None, *, routed: bool) -> None:
        super().__init__()
        self.moe = layer(placement, torch.float32)
        self.routed = routed
        room = None if capacity is None else Capacity(capacity, "cpu")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(self.moe, mesh, {"experts": ExpertParallel(capacity=room)})

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        if self.routed:
            return self.moe(x)
        return self.moe.experts(x * 2, Routing(ids, probs, NUM_EXPERTS)) + x


def given(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, their routing, and the gradient of the output."""
    torch.manual_seed(tokens + 10 * dist.get_rank())
    x, dout = torch.randn(2, tokens, HIDDEN)
    return x, torch.randint(-1, NUM_EXPERTS, (tokens, 3)), torch.rand(tokens, 3), dout


def run(module: Any, tokens: int) -> dict[str, Tensor]:
    x, ids, probs, dout = given(tokens)
    x.requires_grad_()
    out = module(x, ids, probs)
    out.backward(dout)
    assert x.grad is not None
    return {"out": out.detach(), "dx": x.grad}


def differing(plain: Block, traced: Block, fast: Any, steps: list[int]) -> list[str]:
    """Return what differs between compiled and eager steps, without gradients and with them."""
    wrong = []
    for tokens in steps:
        expected, found = run(plain, tokens), run(fast, tokens)
        wrong += [line for n, t in expected.items() for line in compare(n, found[n], t)]
    grads, found = gradients(plain), gradients(traced)
    return wrong + [line for n, g in grads.items() for line in compare(n, found[n], g)]


def compiled(
    placement: ProbPlacement, backend: str, routed: bool, ranks: tuple[int, ...]
) -> list[str]:
    """Return what differs between one graph, on ``ranks`` alone, and an eager layer.

    The number of tokens changes from step to step.
    """
    torch._dynamo.reset()
    plain, traced = (Block(placement, 21, routed=routed) for _ in range(2))
    fast = torch.compile(traced, fullgraph=True, backend=backend)
    if dist.get_rank() not in ranks:
        fast = traced
    tokens = TOKENS[dist.get_rank()]
    wrong = differing(plain, traced, fast, [tokens, tokens + 1])
    with torch.no_grad():
        x, ids, probs, _ = given(tokens)
        return wrong + compare("inference", fast(x, ids, probs), plain(x, ids, probs))


def overflowing() -> list[str]:
    """Return what is wrong where slots of compiled code do not fit."""
    torch._dynamo.reset()
    module = Block(ProbPlacement.FC2_OUTPUT, 2, routed=False)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, ids, probs, _ = given(6)
    x.requires_grad_()
    out, expected = fast(x, ids, probs), module(x, ids, probs)
    wrong = [] if torch.equal(out.isnan(), expected.isnan()) and out.isnan().any() else ["NaN"]
    overflow = module.moe.experts.ranks.capacity.overflow
    return wrong + ([] if int(overflow) and int(overflow) % 2 == 0 else [f"{int(overflow)} lost"])


def inference(placement: ProbPlacement) -> list[str]:
    """Return what differs in one graph without gradients, where counts are exchanged."""
    torch._dynamo.reset()
    module = Block(placement, None, routed=False)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, ids, probs, _ = given(5)
    with torch.no_grad():
        return compare("out", fast(x, ids, probs), module(x, ids, probs))


def inference_beside_training() -> str:
    """Return the error where rank 0 is compiled without gradients and rank 1 wants some."""
    torch._dynamo.reset()
    module = Block(ProbPlacement.FC2_OUTPUT, None, routed=False)
    first = dist.get_rank() == 0
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if first else module
    try:
        with torch.set_grad_enabled(not first):
            run(*given(5)[:3])
    except NotImplementedError as error:
        return str(error)
    return ""


def broken() -> list[str]:
    """Return what is wrong where the graph has to break at the exchange."""
    torch._dynamo.reset()
    plain, traced = (Block(ProbPlacement.FC2_OUTPUT, None, routed=False) for _ in range(2))
    counter = CompileCounter()
    fast = torch.compile(traced, backend=counter)
    wrong = differing(plain, traced, fast, [5])
    return wrong if counter.frame_count > 1 else [*wrong, "it does not break"]


def cut() -> list[str]:
    """Return what differs between compiled experts that are cut and eager ones."""
    torch._dynamo.reset()
    size = dist.get_world_size()
    plain, traced = (spread(Cut((1, size)))[0].experts for _ in range(2))
    fast = torch.compile(traced, backend="aot_eager")
    torch.manual_seed(2)
    x, dout = torch.randn(2, 5, HIDDEN)
    ids, probs = torch.randint(-1, plain.num_experts, (5, 2)), torch.rand(5, 2)
    found = []
    for module in (plain, fast):
        given = x.clone().requires_grad_()
        out = module(given, Routing(ids, probs))
        out.backward(dout)
        assert given.grad is not None
        found.append((out.detach(), given.grad))
    wrong = [
        line
        for name, one, other in zip(("out", "dx"), *found, strict=True)
        for line in compare(name, one, other)
    ]
    grads = gradients(traced)
    return wrong + [line for n, g in gradients(plain).items() for line in compare(n, grads[n], g)]
