"""What each rank runs of modules whose experts are cut over ranks, and maybe spread besides."""

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from module_programs import compare, gradients, whole
from samebits import Activation, Layout, PostExpertNorm, ProbPlacement, RoutingRule, WeightGradients
from samebits.nn import Experts, MoE, Router
from samebits.parallel import Capacity, ExpertParallel, ExpertTensorParallel, TensorParallelExperts
from samebits.testing.numerics import judge

HIDDEN, NUM_EXPERTS = 32, 3
# Tokens of each coordinate along the axis that spreads.
TOKENS = (5, 2, 0, 4)
BLOCKS = Layout(interleave=64)


class Cut(NamedTuple):
    """A layer and its mesh."""

    # Ranks along the axis that spreads, and along the one that cuts.
    degrees: tuple[int, int]
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    dtype: torch.dtype = torch.float32
    layout: Layout = BLOCKS
    orientation: str = "out_in"
    activation: Activation = Activation()
    capacity: int | None = None
    recompute: bool = False
    checkpointed: bool = False
    # Is the cutting axis the first one of the mesh?
    cut_first: bool = False
    named: bool = True
    bias: bool = True
    device: str = "cpu"


def layer(cut: Cut, **options: Any) -> MoE:
    """Return a layer with the same parameters on every rank."""
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "dtype": cut.dtype, "device": cut.device}
    return MoE(
        router=Router(num_experts=NUM_EXPERTS, rule=RoutingRule(topk=2), **sizes),
        experts=Experts(
            num_experts=NUM_EXPERTS,
            intermediate_size=256,
            placement=cut.placement,
            layout=cut.layout if cut.activation.gated else Layout(),
            orientation=cut.orientation,
            activation=cut.activation,
            gate_up_bias=cut.bias,
            down_bias=cut.bias,
            recompute=cut.recompute,
            **sizes,
            **options,
        ),
        shared=Experts(num_experts=1, intermediate_size=24, **sizes),
    )


def mesh_of(cut: Cut) -> tuple[DeviceMesh, int]:
    """Return a mesh, and its dimension that spreads."""
    ep, etp = cut.degrees
    sizes, names = ((etp, ep), ("etp", "ep")) if cut.cut_first else ((ep, etp), ("ep", "etp"))
    mesh = init_device_mesh(cut.device, sizes, mesh_dim_names=names if cut.named else None)
    return mesh, 1 if cut.cut_first else 0


def alone(device: str = "cpu") -> DeviceMesh:
    """Return a mesh of this rank."""
    mesh = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
    return mesh["one"]


def spread(cut: Cut, **options: Any) -> tuple[MoE, int]:
    """Return a layer over the mesh, and this rank's coordinate along the axis that spreads."""
    module, (mesh, ep) = layer(cut, **options), mesh_of(cut)
    capacity = None if cut.capacity is None else Capacity(cut.capacity, cut.device)
    style = ExpertTensorParallel(ep_dim="ep" if cut.named else ep, capacity=capacity)
    parallelize_module(module, mesh, {"experts": style})
    assert isinstance(module.experts, TensorParallelExperts)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return module, coordinate[ep]


def tokens(cut: Cut) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(4)
    counts = TOKENS[: cut.degrees[0]]
    x = [torch.randn(t, HIDDEN).to(cut.device, cut.dtype) for t in counts]
    return x, [torch.randn(t, HIDDEN).to(cut.device, cut.dtype) for t in counts]


def run(module: MoE, x: Tensor, dout: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = checkpoint(module, x, use_reentrant=False) if again else module(x)
    out.backward(dout)
    assert x.grad is not None
    return out.detach(), x.grad


def cut_bits(cuts: list[Cut]) -> list[str]:
    """Return what differs from a layer on one rank that has everybody's tokens."""
    wrong = []
    for cut in cuts:
        x, dout = tokens(cut)
        module, mine = spread(cut)
        out, dx = run(module, x[mine], dout[mine], cut.checkpointed)
        single = layer(cut)
        # On a GPU the bits are those of plain experts; on a CPU those of one rank here.
        if cut.device == "cpu":
            parallelize_module(single, alone(), {"experts": ExpertTensorParallel()})
        whole_out, whole_dx = run(single, torch.cat(x), torch.cat(dout))
        part = slice(sum(TOKENS[:mine]), sum(TOKENS[: mine + 1]))
        lines = compare("out", out, whole_out[part]) + compare("dx", dx, whole_dx[part])
        found, expected = gradients(module.experts), gradients(single.experts)
        for name in sorted(found.keys() | expected.keys()):
            lines += compare(name, found[name], expected[name])
        wrong += [f"{cut}: {line}" for line in lines]
    return wrong


def cut_values(cut: Cut) -> list[str]:
    """Return what is not as in ``Experts`` on one rank, in fp64 but for the order of sums."""
    cut = cut._replace(dtype=torch.float64)
    x, dout = tokens(cut)
    module, mine = spread(cut)
    out, dx = run(module, x[mine], dout[mine])
    single = layer(cut)
    whole_out, whole_dx = run(single, torch.cat(x), torch.cat(dout))
    part = slice(sum(TOKENS[:mine]), sum(TOKENS[: mine + 1]))
    pairs = {"out": (out, whole_out[part]), "dx": (dx, whole_dx[part])}
    expected = gradients(single.experts)
    pairs |= {n: (g, expected[n]) for n, g in gradients(module.experts).items()}
    return [n for n, (a, b) in pairs.items() if not judge(a, b, b, torch.float64).passed]


def with_fsdp(sizes: tuple[int, ...]) -> list[str]:
    """Return what differs where parameters are sharded over replicas besides."""
    names = ("dp", "ep", "etp") if len(sizes) == 3 else ("dp", "etp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    cut = Cut(degrees=(1 if len(sizes) == 2 else sizes[1], sizes[-1]))
    module, single = layer(cut), layer(cut)
    inner = mesh["etp"] if len(sizes) == 2 else mesh["ep", "etp"]
    parallelize_module(module, inner, {"experts": ExpertTensorParallel()})
    parallelize_module(single, alone(), {"experts": ExpertTensorParallel()})
    fully_shard(module.experts, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    torch.manual_seed(7)
    # The same tokens everywhere: the mean over replicas is then each replica's gradient.
    x, dout = torch.randn(2, 4, HIDDEN)
    found, expected = run(module, x, dout), run(single, x, dout)
    wrong = compare("out", found[0], expected[0]) + compare("dx", found[1], expected[1])
    if len(sizes) == 3:
        return wrong  # the ranks of ep brought the same tokens several times
    sharded, grads = gradients(module.experts), gradients(single.experts)
    return wrong + [line for n, g in grads.items() for line in compare(n, sharded[n], g)]


def save(folder: str, cut: Cut) -> None:
    module, _ = spread(cut)
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder)


def load(folder: str, cut: Cut | str) -> list[str]:
    """Load into another mesh, or into experts that are spread or plain; return what differs."""
    expected = layer(Cut((1, 1)))
    if isinstance(cut, Cut):
        module, _ = spread(cut)
    else:
        module = layer(Cut((1, 1)))
        if cut == "spread":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            parallelize_module(module, mesh, {"experts": ExpertParallel()})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    dcp.load({"model": module.state_dict()}, checkpoint_id=folder)
    names = dict(expected.named_parameters())
    return [
        line for n, p in module.named_parameters() for line in compare(n, whole(p), names[n].data)
    ]


def converted() -> list[str]:
    """Return which parameters differ after ``load_weights`` from another layout."""
    module, _ = spread(Cut((1, dist.get_world_size())))
    torch.manual_seed(9)
    other = layer(Cut((1, 1), layout=Layout(up_first=True))).experts
    module.experts.load_weights(other.weights)
    expected = other.weights.to_layout(BLOCKS)
    found = module.experts.weights.named_tensors()
    return [line for n, t in found.items() for line in compare(n, whole(t), getattr(expected, n))]


def copied() -> list[str]:
    """Return what a deep copy of a cut layer computes otherwise."""
    cut = Cut((1, dist.get_world_size()))
    module, _ = spread(cut)
    x, _ = tokens(cut)
    return compare("out", copy.deepcopy(module)(x[0]), module(x[0]))


def refusals() -> list[str]:
    """Return the messages of what cannot be cut."""
    sizes = {"num_experts": 2, "hidden_size": 8, "intermediate_size": 128, "layout": BLOCKS}
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("ep", "etp"))

    def attempt(mesh: DeviceMesh, style: ExpertTensorParallel, **options: Any) -> str:
        module = Experts(**(sizes | options))
        try:
            parallelize_module(module, mesh, style)
            module(torch.zeros(1, 8), None, expert_start=1)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return ""

    plain = ExpertTensorParallel()
    return [
        attempt(mesh, plain, intermediate_size=64),
        attempt(mesh, plain, hidden_size=7),
        attempt(mesh, plain, layout=Layout()),
        attempt(mesh, plain, layout=Layout(interleave=128)),
        attempt(mesh, plain, norm=PostExpertNorm(eps=1e-5)),
        attempt(mesh, plain, weight_gradients=WeightGradients(delayed=True)),
        attempt(mesh, plain, backend="grouped"),
        attempt(mesh, ExpertTensorParallel(capacity=Capacity(3, "cpu"))),
        attempt(mesh, ExpertTensorParallel(ep_dim="ep")),
        attempt(two, ExpertTensorParallel(ep_dim="dp")),
        attempt(mesh, plain, hidden_size=8 + 8 * dist.get_rank()),
        attempt(two, plain),
    ]


def one_differs() -> str:
    """Return the error of a mesh of two dimensions, one rank of which has other experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    hidden = 16 if dist.get_rank() == 3 else 8
    module = Experts(num_experts=2, hidden_size=hidden, intermediate_size=128, layout=BLOCKS)
    try:
        parallelize_module(module, mesh, ExpertTensorParallel())
    except ValueError as error:
        return str(error)
    return ""
