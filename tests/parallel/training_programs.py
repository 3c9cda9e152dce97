"""What each rank runs of training options: where gradients go, z computed again, adapters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from module_programs import HIDDEN, NUM_EXPERTS, TOKENS, compare, layer, tokens, whole
from samebits import ProbPlacement, WeightGradients
from samebits.formats import MXFP4, quantize
from samebits.nn import Experts, LoRAExperts, MoE, QuantizedExperts
from samebits.parallel import Capacity, ExpertParallel
from samebits.testing.numerics import judge


class Setting(NamedTuple):
    """How a layer is trained."""

    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    main_grad: bool = False
    delayed: bool = False
    orientation: str = "out_in"
    # Attributes of every parameter.
    attributes: tuple[str, ...] = ()
    capacity: int | None = None
    microbatches: int = 2
    # "plain", "quantised", "adapted", "adapted quantised", "shared adapter".
    kind: str = "plain"
    frozen: tuple[str, ...] = ()
    # "", "reentrant", "non-reentrant".
    checkpointed: str = ""
    autocast: bool = False
    # 2: every second column of a wider tensor.
    stride: int = 1
    tokens_wanted: bool = True


def experts_of(setting: Setting, plain: Experts) -> nn.Module:
    """Return the experts of a kind, made of ``plain``."""
    torch.manual_seed(8)
    adapters = {"gate_up_rank": 3, "down_rank": 2, "scaling": 2.0}
    held = plain
    if "quantised" in setting.kind:
        weights = quantize(plain.weights.map(lambda t: t.detach().clone()), MXFP4)
        held = QuantizedExperts(weights, plain.activation, placement=plain.placement)
        held.requires_grad_(False)
    if "adapte" not in setting.kind:
        return held
    adapted = LoRAExperts(held, shared="shared" in setting.kind, **adapters)
    with torch.no_grad():
        for b in (adapted.gate_up_b, adapted.down_b):
            b.normal_(std=0.1)
    return adapted


def module_of(setting: Setting) -> MoE:
    options: dict[str, Any] = {"recompute": setting.recompute, "orientation": setting.orientation}
    module = layer(setting.placement, setting.dtype, **options)
    if setting.main_grad or setting.delayed:
        policy = WeightGradients(main_grad=setting.main_grad, delayed=setting.delayed)
        module.experts.weight_gradients = policy
    module.experts = experts_of(setting, module.experts)
    for name, parameter in module.experts.named_parameters():
        if name in setting.frozen:
            parameter.requires_grad_(False)
    return module


def prepare(setting: Setting, module: MoE) -> None:
    """Give every trained parameter of the experts a buffer and its attributes."""
    for parameter in module.experts.parameters():
        if setting.main_grad and parameter.requires_grad:
            wide = torch.promote_types(setting.dtype, torch.float32)
            parameter.main_grad = torch.zeros_like(parameter, dtype=wide).detach()
        for name in setting.attributes:
            setattr(parameter, name, False)


def train(
    setting: Setting, module: MoE, x: list[Tensor], dout: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the microbatches; return outputs and gradients of the tokens."""
    prepare(setting, module)
    outs, grads = [], []
    for tokens_, gradient in zip(x, dout, strict=True):
        given = tokens_.clone().requires_grad_(setting.tokens_wanted)
        used = given
        if setting.stride > 1:
            used = torch.stack([given] * setting.stride, 2)[..., 0]
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            if setting.checkpointed:
                out = checkpoint(module, used, use_reentrant=setting.checkpointed == "reentrant")
            else:
                out = module(used)
        out.backward(gradient.to(out.dtype))
        outs.append(out.detach())
        grads.append(given.grad if given.grad is not None else torch.zeros(0))
    if setting.delayed:
        policy = module.experts.weight_gradients
        assert policy.pending == setting.microbatches, policy.pending
        for _ in outs:
            module.experts.backward_dw()
        assert policy.pending == 0
    return outs, grads


def batches(setting: Setting, size: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return for each microbatch the tokens of each rank, and the gradients of their outputs."""
    x, dout = tokens(setting.dtype, size)
    scales = range(1, setting.microbatches + 1)
    return [[t * s for t in x] for s in scales], [[t / s for t in dout] for s in scales]


def results(setting: Setting, module: MoE) -> dict[str, Tensor]:
    """Return where the gradients of the experts' parameters went."""
    found = {}
    for name, parameter in module.experts.named_parameters():
        if parameter.grad is not None and "grad_added_to_main_grad" not in setting.attributes:
            found[f"{name}.grad"] = whole(parameter.grad)
        if hasattr(parameter, "main_grad"):
            found[f"{name}.main_grad"] = whole(parameter.main_grad)
            if "grad_added_to_main_grad" in setting.attributes:
                assert parameter.grad_added_to_main_grad
                assert isinstance(parameter.grad, type(parameter.data))
    return found


def trained(settings: list[Setting]) -> list[str]:
    """Return what differs between a layer trained on one rank and one whose experts are spread."""
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong = []
    for setting in settings:
        x, dout = batches(setting, size)
        single, module = module_of(setting), module_of(setting)
        capacity = None if setting.capacity is None else Capacity(setting.capacity, "cpu")
        style = ExpertParallel(capacity=capacity)
        parallelize_module(module, init_device_mesh("cpu", (size,)), {"experts": style})
        part = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
        outs, grads = train(setting, module, [t[rank] for t in x], [t[rank] for t in dout])
        outs_, grads_ = train(
            setting, single, [torch.cat(t) for t in x], [torch.cat(t) for t in dout]
        )
        lines = []
        for step in range(setting.microbatches):
            lines += compare(f"out {step}", outs[step], outs_[step][part])
            if setting.tokens_wanted:
                lines += compare(f"dx {step}", grads[step], grads_[step][part])
        found, expected = results(setting, module), results(setting, single)
        if found.keys() != expected.keys():
            lines.append(f"{sorted(found)} instead of {sorted(expected)}")
        for name in found.keys() & expected.keys():
            if "shared" in setting.kind:
                close = judge(found[name], expected[name], expected[name], torch.float32).passed
                lines += [] if close else [name]
            else:
                lines += compare(name, found[name], expected[name])
        wrong += [f"{setting}: {line}" for line in lines]
    return wrong


def merged() -> list[str]:
    """Return what a merged spread layer computes otherwise than before."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x, _ = tokens(torch.bfloat16, size)
    module = module_of(Setting(kind="adapted", dtype=torch.bfloat16))
    parallelize_module(module, init_device_mesh("cpu", (size,)), {"experts": ExpertParallel()})
    before = module(x[rank])
    module.experts = module.experts.merge()
    return compare("out", before, module(x[rank]))


def reloaded(folder: str) -> list[str]:
    """Return what a checkpoint of frozen experts and adapters loses from 2 ranks to all."""
    setting, wrong = Setting(kind="adapted quantised", dtype=torch.bfloat16), []
    modules = []
    for size in (2, dist.get_world_size()):
        shape = (dist.get_world_size() // size, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
        module = module_of(setting)
        parallelize_module(module, mesh["ep"], {"experts": ExpertParallel()})
        modules.append(module)
    dcp.save({"model": modules[0].state_dict()}, checkpoint_id=folder)
    other = modules[1].state_dict()
    for tensor in other.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    dcp.load({"model": other}, checkpoint_id=folder)
    single = module_of(setting).state_dict()
    for name, tensor in modules[1].state_dict().items():
        wrong += compare(name, whole(tensor), single[name])
    return wrong


def messages_of(*attempts: Callable[[], object]) -> list[str]:
    found = []
    for attempt in attempts:
        try:
            attempt()
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def refused() -> list[str]:
    """Return the messages of what is not delivered over ranks."""
    from samebits import PostExpertNorm

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    normed = layer(ProbPlacement.FC2_OUTPUT, torch.float32, norm=PostExpertNorm(eps=1e-5))
    normed.experts.weight_gradients = WeightGradients(delayed=True)
    parallelize_module(normed, mesh, {"experts": ExpertParallel()})
    module = module_of(Setting(main_grad=True))
    parallelize_module(module, mesh, {"experts": ExpertParallel()})
    x = torch.zeros(2, HIDDEN)

    def plain_buffers() -> None:
        for parameter in module.experts.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        module(x).sum().backward()

    assert isinstance(module.experts.down, DTensor)
    assert module.experts.down.shape[0] == NUM_EXPERTS
    return messages_of(lambda: normed(x), lambda: module(x), plain_buffers)
