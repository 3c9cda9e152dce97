"""A checkpoint converted for ranks, loaded into megatron-core's own experts: the ranks' sum."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="needs safetensors")

from real_megatron import EXPERTS, SIZES, real_grouped, with_megatron
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from checkpoint_files import ROOT, SQUARE, Sizes, hf_tensors, read, stacked, write
from samebits.checkpoints import convert
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

# F is a multiple of 4 ranks times the interleave of 2.
OBLONG = Sizes(EXPERTS, 32, 24)
COUNTS = [4, 0, 9]
LIMIT = 0.5


def _expected(tensors: dict[str, Tensor], x: Tensor, probs: Tensor) -> Tensor:
    """Megatron-LM's layer on transformers' matrices, in fp64: gate bounded above, p before fc2."""
    out = []
    for expert, (rows, p) in enumerate(zip(x.split(COUNTS), probs.split(COUNTS), strict=True)):
        gate, up, down = (
            tensors[f"{ROOT.format(0)}.{expert}.{part}_proj.weight"].double()
            for part in ("gate", "up", "down")
        )
        g, u = linear(rows, gate).clamp(max=LIMIT), linear(rows, up).clamp(-LIMIT, LIMIT)
        out.append(linear(silu(g) * u * p[:, None], down))
    return torch.cat(out)


def _megatron(folder: Path, sizes: Sizes, ranks: int, interleave: int | None) -> Any:
    """megatron-core's experts of one rank, with the matrices of its folder."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"activation_func": silu, "activation_func_clamp_value": LIMIT}
    options |= {"hidden_size": sizes.hidden, "moe_ffn_hidden_size": sizes.columns // ranks}
    options |= {"moe_mlp_glu_interleave_size": interleave}
    module = real_grouped(TransformerConfig(**(SIZES | options)), torch.float32)
    held = load_file(folder / "model.safetensors")
    for expert in range(EXPERTS):
        for layer in ("linear_fc1", "linear_fc2"):
            parameter = getattr(getattr(module, layer), f"weight{expert}")
            parameter.data = held[f"{ROOT.format(0)}.{layer}.weight{expert}"].float()
    return module


@with_megatron
@pytest.mark.parametrize("interleave", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", [OBLONG, SQUARE], ids=["oblong", "square"])
def test_the_sum_of_its_ranks_is_the_layer(
    tmp_path: Path, sizes: Sizes, ranks: int, interleave: int | None
) -> None:
    tensors = hf_tensors(sizes, layers=1)
    scheme = "megatron" if interleave is None else f"megatron:interleave={interleave}"
    x = torch.randn(sum(COUNTS), sizes.hidden)
    probs = torch.rand(sum(COUNTS)) + 0.1

    convert(write(tmp_path / "a", tensors, files=1), tmp_path / "b", scheme, tensor_parallel=ranks)
    convert(tmp_path / "b", tmp_path / "c", "hf")

    total = torch.zeros(x.shape, dtype=torch.float64)
    for rank in range(ranks):
        name = "" if ranks == 1 else f"rank-tp{rank}of{ranks}-ep0of1"
        module = _megatron(tmp_path / "b" / name, sizes, ranks, interleave)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            total += module.forward(x, torch.tensor(COUNTS), probs)[0].double()
    assert relative_error(total, _expected(tensors, x.double(), probs.double())) < 2.0**-18
    again = read(tmp_path / "c")
    for part in ("gate", "up", "down"):
        assert_bitwise_equal(stacked(again, 0, part), stacked(tensors, 0, part), part)
