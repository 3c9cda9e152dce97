"""The products of tensor parallelism: the kernels' stages beside the CPU's, interpreted."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from samebits import Activation
from samebits.parallel.stages import DeviceStages, HostStages
from samebits.testing.numerics import assert_within_budget

pytestmark = pytest.mark.interpret

EXPERTS, TOPK, HIDDEN, COLUMNS = 3, 2, 40, 128


@pytest.mark.parametrize("kind", ["silu", "relu"])
def test_stages_of_kernels_and_of_the_cpu_agree(kind: str) -> None:
    gated = kind == "silu"
    activation = Activation(kind=kind, gated=gated)
    x, dout = torch.randn(2, 7, HIDDEN)
    ids = torch.randint(-1, EXPERTS, (7, TOPK))
    probs = torch.rand(7, TOPK)
    gate_up = torch.randn(EXPERTS, (1 + gated) * COLUMNS, HIDDEN)
    down, bias = torch.randn(EXPERTS, HIDDEN, COLUMNS), torch.randn(EXPERTS, HIDDEN)
    kept = int((ids >= 0).sum())

    def run(kind: type[HostStages] | type[DeviceStages], dtype: torch.dtype) -> dict[str, Tensor]:
        tokens, grads, first, second, added = (t.to(dtype) for t in (x, dout, gate_up, down, bias))
        stages = kind(tokens, ids, EXPERTS, None)
        slots = stages.metadata.slots[:kept].long()
        rows, dy = (pad(t[slots // TOPK], (0, 0, 0, 14 - kept)) for t in (tokens, grads))
        z = stages.product(rows, first)
        hidden = stages.hidden(dy, second, z, activation, probs)
        return {
            "z": z[:kept],
            "y": stages.product(hidden.h, second, added, probs)[:kept],
            "dz": hidden.dz[:kept],
            "h": hidden.h[:kept],
            "down": stages.outer(dy, hidden.h, second),
            "down_bias": stages.total(dy, probs, added),
            "probs": stages.probs_gradient(hidden.partial, grads, added, ids),
        }

    kernels, plain = run(DeviceStages, torch.float32), run(HostStages, torch.float32)

    for name, exact in run(HostStages, torch.float64).items():
        assert_within_budget(kernels[name], plain[name], exact, torch.float32, name)
