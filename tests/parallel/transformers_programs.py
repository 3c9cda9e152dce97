"""What each rank runs of transformers' plans for experts: spread, or cut, beside one rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rank_programs import same
from samebits.checks.models.protocol import Sizes
from samebits.errors import UnsupportedError
from samebits.formats import MXFP4
from samebits.integrations.transformers import fp8_case, pack_experts, register
from samebits.integrations.transformers.expert_parallel import register_expert_parallel
from samebits.testing.numerics import judge

N, H, F, K = 4, 16, 32, 3
TOKENS = (7, 4)


class Holder(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def experts_of(name: str, dtype: torch.dtype) -> nn.Module:
    """Return an experts module, the same on every rank."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": H}
    if name == "gpt_oss":
        config = GptOssConfig(num_local_experts=N, intermediate_size=F, **sizes)
        module: nn.Module = GptOssExperts(config)
    else:
        module = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=N, moe_intermediate_size=F, **sizes))
    module = module.to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    module.config._experts_implementation = "samebits"
    return module


def fp8_experts() -> nn.Module:
    """Return an FP8 module of transformers, the same on every rank."""
    sizes = Sizes(T=1, K=K, E=N, H=H, F=F)
    module = fp8_case.build(sizes, {}, {"block_size": (16, 16)})
    module.config._experts_implementation = "samebits"
    fp8_case.fill(module, 2 * H**-0.5)
    return module


Given = tuple[Tensor, Tensor, Tensor, Tensor]


def drawn(total: int, dtype: torch.dtype) -> Given:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(total, N, generator=generator).argsort(1)[:, :K]
    probs = torch.rand(total, K, generator=generator).to(dtype)
    x, dout = torch.randn(2, total, H, generator=generator).to(dtype)
    return x, ids, probs, dout


def run(module: nn.Module, given: Given) -> dict[str, Tensor]:
    x, ids, probs, dout = given
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out = module(x, ids, probs)
    out.backward(dout)
    assert x.grad is not None
    assert probs.grad is not None
    found = {n: p.grad for n, p in module.named_parameters()}
    found |= {"out": out.detach(), "x": x.grad, "probs": probs.grad}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh of all ranks, and one of this rank alone."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("all", "one"))
    return mesh["all"], mesh["one"]


def spread(module: nn.Module, tp_mesh: DeviceMesh, ep_mesh: DeviceMesh, how: str) -> nn.Module:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {f"experts.{name}": "grouped_gemm" for name, _ in module.named_parameters()}
    holder = Holder(module)
    apply_expert_parallelism(
        holder, ep_mesh, tp_mesh, plan | {"experts": "ep_dispatch_experts"}, how
    )
    return module


def own_batches(name: str) -> list[str]:
    """Return what differs from one rank where each rank has its own batch."""
    register()
    register_expert_parallel()
    every, alone = meshes()
    rank = dist.get_rank()
    start = sum(TOKENS[:rank])
    part = slice(start, start + TOKENS[rank])
    given = drawn(sum(TOKENS), torch.bfloat16)
    whole = run(experts_of(name, torch.bfloat16), given)
    module = spread(experts_of(name, torch.bfloat16), alone, every, "samebits")
    x, ids, probs, dout = given
    mine = run(module, (x[part], ids[part], probs[part], dout[part]))
    expected = {n: t[part] if n in ("out", "x", "probs") else t for n, t in whole.items()}
    return [n for n, t in mine.items() if not same(t, expected[n])]


def quantised() -> list[str]:
    """Return what differs from one rank where transformers holds the experts in FP8 blocks."""
    register()
    register_expert_parallel()
    every, alone = meshes()
    rank = dist.get_rank()
    part = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    given = drawn(sum(TOKENS), torch.bfloat16)
    one, module = fp8_experts(), fp8_experts()
    whole = run(one, given)
    spread(module, alone, every, "samebits")
    x, ids, probs, dout = given
    mine = run(module, (x[part], ids[part], probs[part], dout[part]))
    return [n for n in ("out", "x", "probs") if not same(mine[n], whole[n][part])]


def packing_is_refused() -> str:
    """Return what is said of packing experts that are spread."""
    register()
    register_expert_parallel()
    every, alone = meshes()
    module = spread(experts_of("gpt_oss", torch.bfloat16), alone, every, "samebits")
    try:
        pack_experts(module, MXFP4, exact=False)
    except UnsupportedError as error:
        return str(error)
    return ""


def shared_batch(name: str, how: str) -> list[str]:
    """Return what is wrong where all ranks share one batch: bits for ours, values for theirs."""
    register()
    register_expert_parallel()
    every, _ = meshes()
    dtype = torch.bfloat16 if how == "samebits" else torch.float64
    given = drawn(9, dtype)
    whole = run(experts_of(name, dtype), given)
    mine = run(spread(experts_of(name, dtype), every, every, how), given)
    return [n for n, t in mine.items() if not agrees(t, whole[n], exact=how == "samebits")]


def agrees(one: Tensor, other: Tensor, *, exact: bool) -> bool:
    if exact:
        return same(one, other)
    return judge(one.double(), other.double(), other.double(), torch.float64).passed


def cut() -> list[str]:
    """Return what is wrong under transformers' tensor-parallel plan for experts."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    register()
    every, _ = meshes()
    given = drawn(9, torch.float64)
    whole = run(experts_of("qwen3", torch.float64), given)
    module = experts_of("qwen3", torch.float64)
    plan = {
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "experts": "moe_tp_experts",
    }
    apply_tensor_parallelism(Holder(module), every, plan)
    mine: dict[str, Any] = run(module, given)
    return [n for n, t in mine.items() if not agrees(t, whole[n], exact=False)]
