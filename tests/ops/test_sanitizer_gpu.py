"""compute-sanitizer over small calls of the kernels: no access out of bounds, no race.

    ./run gpu-test tests/ops/test_sanitizer_gpu.py     # about two minutes

The tool comes with the CUDA toolkit, not with torch; without it these tests are skipped, and the
reason is counted.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samebits import env

pytestmark = pytest.mark.gpu

NAME = "compute-sanitizer"
TOOL = shutil.which(NAME) or next(map(str, Path("/usr/local").glob(f"cuda*/bin/{NAME}")), None)

PERMUTE = """
import torch
from samebits.ops.permute import combine, permute, sort_slots

# 9000 slots: the launches for many as well as for few.
for tokens in (5, 3000):
    ids = torch.arange(3 * tokens, device="cuda").view(tokens, 3) % 11 - 1
    m = sort_slots(ids, 9, block_r=16)
    x = torch.ones(tokens, 200, device="cuda", requires_grad=True)
    probs = torch.ones(tokens, 3, device="cuda", requires_grad=True)
    rows = permute(x, m.inverse, 3, probs, offsets=m.offsets)
    combine(rows, m.inverse, 3, probs, offsets=m.offsets).sum().backward()
torch.cuda.synchronize()
"""
ACTIVATION = """
import torch
from samebits.activation import Activation
from samebits.ops.activation import Operands, Wanted, activate_backward
from samebits.ops.activation.kernel import launch_activation_backward, launch_activation_forward
from samebits.ops.activation.tuning import Config
from samebits.weights import Layout

gpt_oss = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
rows, columns = 70, 104
z = torch.ones(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
dh = torch.ones(rows, columns, device="cuda", dtype=torch.bfloat16)
bias = torch.ones(3, 2 * columns, device="cuda", dtype=torch.bfloat16)
offsets = torch.tensor([0, 20, 20, 66], device="cuda", dtype=torch.int32)
probs = torch.ones(rows, device="cuda")
for layout in (Layout(), Layout(interleave=1)):
    for walk in (False, True):
        config = Config(block_r=2, block_f=64, num_warps=2, num_stages=3, walk=walk)
        operands = Operands(z, row_probs=probs)
        launch_activation_forward(operands, gpt_oss, layout, config)
        wanted = Wanted(dp=True, h=True)
        launch_activation_backward(dh, operands, gpt_oss, layout, wanted, config)
    operands = Operands(z, bias, offsets, probs)
    launch_activation_forward(operands, gpt_oss, layout)
    activate_backward(dh, operands, gpt_oss, layout, Wanted(dp=True, dbias=True))
torch.cuda.synchronize()
"""


@pytest.mark.skipif(TOOL is None, reason=f"not run: {NAME} is not on this machine")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("calls", [PERMUTE, ACTIVATION], ids=["permute", "activation"])
def test_compute_sanitizer_finds_nothing(calls: str, tool: str) -> None:
    assert TOOL is not None
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", calls]
    environment = env.for_child(
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )

    assert done.returncode == 0, done.stdout + done.stderr
