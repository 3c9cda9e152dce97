"""One of two ranks under ``fully_shard``: what differs from the mean of both ranks' gradients.

    python fully_sharded.py RANK FILE_OF_THE_STORE

Prints nothing where everything holds; otherwise one line for each difference.
"""

import copy
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from layers import EXPERTS_OPTIONS, make_experts, make_router, make_routing, tokens
from samebits import UnsupportedError, WeightGradients
from samebits.nn import Experts, MoE
from samebits.testing.numerics import bitwise_equal

RANKS = 2


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return out


def _layer(name: str) -> MoE:
    torch.manual_seed(0)
    # Five experts: the ranks hold three and two.
    return MoE(router=make_router(), experts=make_experts(**EXPERTS_OPTIONS[name]))


def _loss(layer: nn.Module, seed: int, dtype: torch.dtype) -> Tensor:
    return layer(tokens(dtype=dtype, seed=seed).requires_grad_()).float().square().sum()


def _mean_of_ranks(layer: nn.Module, microbatches: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What data-parallel training gives each parameter, computed by one process."""
    totals: list[dict[str, Tensor]] = []
    for rank in range(RANKS):
        single = copy.deepcopy(layer).to(dtype)
        for step in range(microbatches):
            _loss(single, rank + RANKS * step, dtype).backward()
        totals.append({n: p.grad.float() for n, p in single.named_parameters()})
    return {name: (totals[0][name] + totals[1][name]) / 2 for name in totals[0]}


def _differences(
    name: str, rank: int, *, dtype: torch.dtype, microbatches: int = 1, again: bool = False
) -> list[str]:
    plain = _layer(name)
    expected = _mean_of_ranks(plain, microbatches, dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    sharded: nn.Module = Checkpointed(plain) if again else plain
    # A unit of its own that casts its inputs would round the fp32 probabilities inside ``Routing``.
    fully_shard(plain.experts, mp_policy=replace(policy, cast_forward_inputs=False))
    fully_shard(sharded, mp_policy=policy)
    assert isinstance(sharded, FSDPModule)
    for step in range(microbatches):
        sharded.set_requires_gradient_sync(step == microbatches - 1)
        _loss(sharded, rank + RANKS * step, dtype).backward()
    differences = []
    for parameter, value in plain.named_parameters():
        if not bitwise_equal(value.grad.full_tensor(), expected[parameter]):
            differences.append(f"{name} {dtype} {microbatches} {again}: {parameter}")
    return differences


def _refusals(rank: int) -> list[str]:
    """What takes gradients away from autograd takes them away from FSDP, and says so."""
    missed = []
    for policy, error in (
        (WeightGradients(delayed=True), UnsupportedError),
        (WeightGradients(main_grad=True), ValueError),
    ):
        module: Experts = make_experts(weight_gradients=policy)
        fully_shard(module)
        try:
            module(tokens(seed=rank), make_routing()).sum().backward()
            module.backward_dw()
        except error:
            continue
        missed.append(f"{policy} was not refused")
    return missed


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    found = [
        *_differences("gpt-oss", rank, dtype=torch.float32),
        *_differences("plain", rank, dtype=torch.float32, microbatches=3),
        *_differences("gpt-oss", rank, dtype=torch.bfloat16),
        *_differences("in-out", rank, dtype=torch.bfloat16, again=True),
        *_refusals(rank),
    ]
    sys.stdout.writelines(f"{line}\n" for line in found)
    dist.barrier()
    dist.destroy_process_group()
    # All is compared and said. What torch's threads do while Python ends is not this test's: seen
    # once to end in "terminate called without an active exception".
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
