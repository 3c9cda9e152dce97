"""megatron-core's own code, where it is installed, without Transformer Engine's linear layers."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def with_megatron(test: Any) -> Any:
    """Run a test on megatron-core's own code, where it is installed."""
    # What importing it says of missing packages and of its own code is not ours.
    quiet = pytest.mark.filterwarnings("ignore")(test)
    return pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")(quiet)


EXPERTS, HIDDEN, COLUMNS = 3, 32, 24
SIZES = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "moe_ffn_hidden_size": COLUMNS,
    "ffn_hidden_size": COLUMNS,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "add_bias_linear": False,
    "gated_linear_unit": True,
}


class GroupedLinear(nn.Module):
    """Stand for Transformer Engine's grouped linear layer: one parameter for each expert."""

    def __init__(self, rows: int, columns: int, *, bias: bool = False, dtype: Any = None) -> None:
        super().__init__()
        for expert in range(EXPERTS):
            weight = torch.randn(rows, columns) * (2.0 / columns**0.5)
            self.register_parameter(f"weight{expert}", nn.Parameter(weight.to(dtype)))
            if bias:
                held = nn.Parameter(torch.randn(rows).to(dtype))
                self.register_parameter(f"bias{expert}", held)
        self.biased = bias

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, Any]:
        parts = zip(x.split(tokens_per_expert), range(EXPERTS), strict=True)
        out = torch.cat([linear(part, getattr(self, f"weight{e}")) for part, e in parts])
        return out, None


class Grouped(nn.Module):
    """The parameters of a ``TEGroupedMLP``, for its call."""

    def __init__(self, config: Any, *, bias: bool = False, dtype: Any = torch.float32) -> None:
        super().__init__()
        rows = (2 if config.gated_linear_unit else 1) * COLUMNS
        self.config = config
        self.linear_fc1 = GroupedLinear(rows, HIDDEN, bias=bias, dtype=dtype)
        self.linear_fc2 = GroupedLinear(HIDDEN, COLUMNS, bias=bias, dtype=dtype)


def real_grouped(config: Any, dtype: Any) -> Any:
    """A real ``TEGroupedMLP`` whose linears stand for Transformer Engine's."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    module = TEGroupedMLP.__new__(TEGroupedMLP)
    nn.Module.__init__(module)
    stub = Grouped(config, dtype=dtype)
    module.config, module.num_local_experts = config, EXPERTS
    module.linear_fc1, module.linear_fc2 = stub.linear_fc1, stub.linear_fc2
    module.activation_func = config.activation_func
    module._with_fused_impl = module.activation_recompute = False
    module._use_grouped_tensor = False
    module.offload_expert_fc1 = module.offload_moe_act = False
    return module


class Linear(nn.Module):
    """Stand for a column- or row-parallel linear layer of one expert: no bias, no ranks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return linear(x, self.weight), None


def real_sequential(config: Any, dtype: Any) -> Any:
    """A real ``SequentialMLP`` of real ``MLP`` modules, with linear layers of torch."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.experts import SequentialMLP

    stub = Grouped(config, dtype=dtype)
    module = SequentialMLP.__new__(SequentialMLP)
    nn.Module.__init__(module)
    module.config, module.num_local_experts = config, EXPERTS
    module.local_experts = nn.ModuleList()
    for expert in range(EXPERTS):
        one = MLP.__new__(MLP)
        nn.Module.__init__(one)
        one.config, one.activation_func = config, config.activation_func
        one.linear_fc1 = Linear(getattr(stub.linear_fc1, f"weight{expert}"))
        one.linear_fc2 = Linear(getattr(stub.linear_fc2, f"weight{expert}"))
        module.local_experts.append(one)
    return module
