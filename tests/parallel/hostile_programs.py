"""What each rank runs where users do what nobody planned: errors in between, other modes."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from module_programs import HIDDEN, NUM_EXPERTS, TOKENS, compare, gradients, layer, tokens, whole
from samebits import ProbPlacement, Routing
from samebits.formats import MXFP4, quantize
from samebits.nn import Experts, LoRAExperts, MoE, QuantizedExperts
from samebits.parallel import Capacity, ExpertParallel, ParallelExperts

OUT = ProbPlacement.FC2_OUTPUT


def spread(dtype: torch.dtype = torch.float32, **options: Any) -> MoE:
    module = layer(OUT, dtype, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, {"experts": ExpertParallel()})
    return module


def twice() -> list[str]:
    """Return what differs in a second backward over a graph that was kept, and in a third."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, dout = tokens(torch.float32, size)
    module = spread()
    given = x[rank].clone().requires_grad_()
    out = module(given)
    first: dict[str, Tensor] = {}
    wrong = []
    for step in range(2):
        module.zero_grad()
        given.grad = None
        out.backward(dout[rank], retain_graph=step == 0)
        assert given.grad is not None
        found = {**gradients(module), "x": given.grad.clone()}
        wrong += [line for n, t in first.items() for line in compare(n, found[n], t)]
        first = found
    try:
        out.backward(dout[rank])
    except RuntimeError as error:
        if "second time" not in str(error):
            wrong.append(str(error))
    else:
        wrong.append("a graph that was freed runs again")
    return wrong


def second_derivatives() -> str:
    """Return the error of a gradient of a gradient."""
    x, _ = tokens(torch.float32, dist.get_world_size())
    module, given = spread(), x[dist.get_rank()].clone().requires_grad_()
    try:
        torch.autograd.grad(module(given).sum(), given, create_graph=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def modes() -> list[str]:
    """Return what differs without gradients, and where no rank asks for any."""
    rank = dist.get_rank()
    x, _ = tokens(torch.float32, dist.get_world_size())
    module, wrong = spread(), []
    expected = module(x[rank]).detach()
    with torch.inference_mode():
        wrong += compare("inference_mode", module(x[rank]), expected)
    with torch.no_grad():
        wrong += compare("no_grad", module(x[rank]), expected)
    module.requires_grad_(False)
    out = module(x[rank])
    if out.requires_grad:
        wrong.append("a gradient that nobody wants")
    return wrong + compare("frozen", out, expected)


def dropped(capacity: int | None) -> list[str]:
    """Return what differs where all slots of some tokens are sentinels of either kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    x = torch.randn(sum(TOKENS[:size]), HIDDEN)
    ids = torch.randint(-1, NUM_EXPERTS + 1, (len(x), 3))
    ids[0], ids[-1] = -1, NUM_EXPERTS
    probs = torch.rand(ids.shape)
    probs[(ids < 0) | (ids == NUM_EXPERTS)] = float("nan")
    single = layer(OUT, torch.float32).experts
    room = None if capacity is None else Capacity(capacity, "cpu")
    module = layer(OUT, torch.float32).experts
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(module, mesh, ExpertParallel(capacity=room))
    part = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))

    def run(held: Experts, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        given, chances = x[rows].clone().requires_grad_(), probs[rows].clone().requires_grad_()
        out = held(given, Routing(ids[rows], chances, NUM_EXPERTS))
        out.sum().backward()
        assert given.grad is not None
        assert chances.grad is not None
        return out, given.grad, chances.grad

    expected, found = run(single, slice(None)), run(module, part)
    wrong = [
        line
        for name, one, other in zip(("out", "dx", "dp"), found, expected, strict=True)
        for line in compare(name, one, other[part])
    ]
    grads = gradients(single)
    return wrong + [line for n, g in gradients(module).items() for line in compare(n, g, grads[n])]


def scaled() -> list[str]:
    """Return what is wrong with a scaler whose gradients overflow in one rank's experts."""
    rank = dist.get_rank()
    module = spread()
    experts = module.experts
    assert isinstance(experts, ParallelExperts)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
    before = whole(experts.down.detach()).clone()
    scaler = GradScaler("cpu", init_scale=2.0**15)
    torch.manual_seed(5)
    x = torch.randn(4, HIDDEN)
    # Every token of every rank goes to expert 0, which rank 0 has.
    ids, probs = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    wrong = []
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = experts(x, Routing(ids, probs), out_dtype=torch.float32).sum()
        scaler.scale(loss * (1e4 if step == 0 else 1e-3)).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = not torch.equal(whole(experts.down.detach()), before)
        if changed != (step == 1):
            wrong.append(f"step {step}: parameters {'changed' if changed else 'did not change'}")
    if scaler.get_scale() != 2.0**14:
        wrong.append(f"rank {rank}: scale {scaler.get_scale()}")
    return wrong


def one_raises() -> tuple[str, float]:
    """Return how the group ends where rank 1 raises before its forward, and after how long."""
    module = spread()
    x, start = torch.zeros(2, HIDDEN), time.monotonic()
    if dist.get_rank() == 1:
        x = x[:, 1:]
    message = ""
    try:
        module(x)
    except (RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
        if dist.get_rank() == 1:
            dist.destroy_process_group()
    return message, time.monotonic() - start


def groups_of_one() -> list[str]:
    """Return what differs from plain experts where the axis has one rank, and it has no name."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("ep", "dp"))
    module, single = (layer(OUT, torch.float32) for _ in range(2))
    parallelize_module(module, mesh["ep"], {"experts": ExpertParallel()})
    x, dout = tokens(torch.float32, 1)
    outs = []
    for one in (module, single):
        given = x[0].clone().requires_grad_()
        out = one(given)
        out.backward(dout[0])
        assert given.grad is not None
        outs.append((out, given.grad))
    wrong = compare("out", outs[0][0], outs[1][0]) + compare("dx", outs[0][1], outs[1][1])
    expected = gradients(single)
    return wrong + [
        line for n, g in gradients(module).items() for line in compare(n, g, expected[n])
    ]


def empty_first() -> list[str]:
    """Return which parameters differ where modules were made on no device and filled later."""
    size = dist.get_world_size()
    with torch.device("meta"):
        module = layer(OUT, torch.float32)
    parallelize_module(module, init_device_mesh("cpu", (size,)), {"experts": ExpertParallel()})
    module.to_empty(device="cpu")
    other = layer(OUT, torch.float32)
    module.experts.load_weights(other.experts.weights)
    names = dict(other.experts.named_parameters())
    return [
        line
        for n, p in module.experts.named_parameters()
        for line in compare(n, whole(p.detach()), names[n].detach())
    ]


def other_modules() -> list[str]:
    """Return the errors where ranks were given experts of another dtype, scaling or placement."""
    rank = dist.get_rank()
    plain, held = (layer(OUT, torch.float32).experts for _ in range(2))
    packed = quantize(plain.weights.map(torch.Tensor.detach), MXFP4)
    modules = (
        layer(OUT, torch.bfloat16 if rank else torch.float32).experts,
        LoRAExperts(held, gate_up_rank=1, down_rank=1, scaling=1.0 + rank),
        QuantizedExperts(packed, plain.activation, placement=list(ProbPlacement)[rank]),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    messages = []
    for module in modules:
        try:
            parallelize_module(module, mesh, ExpertParallel(capacity=Capacity(8, "cpu")))
        except ValueError as error:
            messages.append(str(error))
    return messages
