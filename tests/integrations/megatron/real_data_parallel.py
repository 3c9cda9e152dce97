"""Megatron-LM's own data-parallel wrapper, on one CPU process, over adapted experts.

Prints nothing where every gradient is in its ``main_grad``, in place; one line for each mistake.
"""

import itertools
import sys
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from samebits.integrations.megatron import adapt
from samebits.integrations.megatron.parameters import held_by, owners_of
from samebits.integrations.megatron.stacking import in_memory_order
from samebits.testing.numerics import bitwise_equal
from test_weight_gradients import DELAYED, FUSED, _grouped, _step


def _start(store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    # The wrapper asks CUDA for a device and a stream.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda _: None)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()


def _wrapped(module: nn.Module, *, delayed: bool, overlap: bool, distributed: bool) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    for parameter in module.parameters():
        parameter.allreduce = True
    for linear in (module.linear_fc1, module.linear_fc2):
        hooks = []
        linear.register_wgrad_accumulation_and_reduce_hooks = hooks.append
        name = "_trigger_wgrad_accumulation_and_reduce_hooks"
        vars(linear)[name] = lambda hooks=hooks: [hook() for hook in hooks]
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed,
        delay_wgrad_compute=delayed,
    )
    sizes = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    return DistributedDataParallel(sizes, config, module)


def _mistakes(fused: bool, delayed: bool, overlap: bool, distributed: bool) -> list[str]:
    case = f"fused={fused} delayed={delayed} overlap={overlap} distributed={distributed}"
    options = (FUSED if fused else {}) | (DELAYED if delayed else {})
    plain, module = _grouped(), _grouped(**options)
    adapt(plain, backend="reference")
    adapt(module, backend="reference")
    wrapper = _wrapped(module, delayed=delayed, overlap=overlap, distributed=distributed)
    wrapper.zero_grad_buffer()
    _step(plain)
    _step(wrapper)
    if delayed:
        module.backward_dw()
    wrapper.finish_grad_sync()
    found = []
    for name, parameter in module.named_parameters():
        grad, expected = parameter.main_grad, plain.get_parameter(name).grad
        same = bitwise_equal(grad.to(expected.dtype) + 0.0, expected + 0.0)
        rounded = bool((grad == grad.to(expected.dtype)).all())
        # Expert 1 has no rows.
        if not same or (rounded == fused and not name.endswith("1")) or parameter.grad is not None:
            found.append(f"{case}: {name} same={same} rounded={rounded}")
    held = {name: in_memory_order(parameters) for name, parameters in held_by(module).items()}
    for name, owner in owners_of(held).items() if fused else ():
        place = owner.open(name).tensor.untyped_storage().data_ptr()
        if place != held[name][0].main_grad.untyped_storage().data_ptr():
            found.append(f"{case}: {name} is not written in place")
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _start(sys.argv[1])
    for case in itertools.product((False, True), repeat=4):
        sys.stderr.writelines(f"mistake: {line}\n" for line in _mistakes(*case))


if __name__ == "__main__":
    main()
