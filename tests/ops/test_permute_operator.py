"""The operator boundary of sort, permute and combine: opcheck, torch.compile, the first call."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from permute_cases import Case, make_operands
from samebits.ops.permute import combine, permute, sort_slots
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

CASE = Case(tokens=6, topk=3, experts=5, hidden=20)


def test_opcheck() -> None:
    ids, probs, count, x, y, dout, drows = make_operands(CASE, torch.float32)
    m = sort_slots(ids, CASE.experts)
    inverse, offsets, topk = m.inverse, m.offsets, CASE.topk
    ops = torch.ops.samebits
    leaves = [t.requires_grad_() for t in (x, y)]
    assert probs is not None

    torch.library.opcheck(ops.sort_slots, (ids, count, CASE.experts, 0, 16))
    torch.library.opcheck(ops.permute_forward, (x.detach(), inverse, probs, offsets, topk))
    torch.library.opcheck(ops.permute_backward, (drows, inverse, probs, x.detach(), topk))
    torch.library.opcheck(ops.permute_backward, (drows, inverse, None, None, topk))
    torch.library.opcheck(ops.combine_forward, (y.detach(), inverse, probs, topk, torch.float32))
    torch.library.opcheck(
        ops.combine_backward, (dout, inverse, probs, y.detach(), offsets, topk, torch.float32)
    )
    assert all(leaf.grad is None for leaf in leaves)


def _layer(x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    m = sort_slots(ids, CASE.experts, block_r=16)
    rows = permute(x, m.inverse, CASE.topk, probs, offsets=m.offsets)
    y = rows * 1.5
    return combine(y, m.inverse, CASE.topk, probs, out_dtype=torch.float32, offsets=m.offsets)


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1)])
def test_compiled_whole_with_one_graph_for_every_token_count(
    dynamic: bool | None, graphs: int
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_layer, fullgraph=True, backend=counter, dynamic=dynamic)

    def run(function: object, tokens: int) -> list[Tensor]:
        ids, probs, _, x, _, dout, _ = make_operands(
            CASE._replace(tokens=tokens, dropped=True), torch.bfloat16
        )
        assert probs is not None
        leaves = [x.requires_grad_(), probs.requires_grad_()]
        out = function(*leaves, ids)  # type: ignore[operator]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]

    for tokens in (6, 11, 64, 9, 7):
        for ours, theirs in zip(run(compiled, tokens), run(_layer, tokens), strict=True):
            assert_bitwise_equal(ours.nan_to_num(), theirs.nan_to_num())
    # One for the first size and one for all others, or one.
    assert counter.frame_count <= graphs


FIRST_CALL = """
import sys, torch
from samebits.ops.permute import combine, permute, sort_slots

def layer(x, ids):
    m = sort_slots(ids, 4)
    return combine(permute(x, m.inverse, 2), m.inverse, 2)

x = torch.randn(3, 8, requires_grad=True)
ids = torch.tensor([[0, 3], [2, 1], [1, -1]])
out = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, ids)
out.sum().backward()
assert torch.equal(out, torch.stack([x[0] + x[0], x[1] + x[1], x[2]]))
assert torch.equal(x.grad, torch.tensor([2.0, 2.0, 1.0])[:, None].expand(3, 8))
assert "samebits.ops.permute.kernel" not in sys.modules
"""


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path}  # noqa: TID251
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, env=environment)
