"""``emulate="hf_eager"`` has the bits of transformers' own classes where sums have one value."""

import pytest
import torch

from samebits import Routing
from samebits.emulate import EMULATIONS, RoundingPoints, emulated_experts
from samebits.integrations.transformers import interface
from samebits.integrations.transformers.tiny import DEFAULT_SIZES, build
from samebits.integrations.transformers.translation import weights_of
from samebits.integrations.transformers.verify import translate
from samebits.integrations.transformers.zoo import discover
from samebits.testing.numerics import assert_bitwise_equal, bitwise_equal

pytestmark = pytest.mark.reference

EAGER = EMULATIONS["hf_eager"].points
# Some classes round as the contract does: their sum is fp32, and what is between the projections.
CONTRACT = RoundingPoints()
# Every shape of gate: plain, clamped before and after, sloped with biases, capped, squared, normed.
CLASSES = {
    "deepseek_v4.DeepseekV4Experts": EAGER,
    "gemma4.Gemma4TextExperts": EAGER,
    "gpt_oss.GptOssExperts": EAGER,
    "inkling2.Inkling2Experts": CONTRACT,
    "minimax_m3_vl.MiniMaxM3VLExperts": EAGER,
    "muse_spark.MuseSparkExperts": EAGER,
    "nemotron_h.NemotronHExperts": CONTRACT,
    "qwen3_moe.Qwen3MoeExperts": EAGER,
}


def _grids(module: torch.nn.Module) -> None:
    """Give parameters whose products sum exactly; a row of the second matrix has two numbers."""
    generator = torch.Generator().manual_seed(0)

    def grid(step: float, *shape: int) -> torch.Tensor:
        return torch.randint(-96, 97, shape, generator=generator) * step

    for name, parameter in module.named_parameters():
        if parameter.dim() != 3 or not name.startswith("down"):
            parameter.copy_(grid(2.0**-7, *parameter.shape))
        else:
            along = 1 if module.is_transposed else 2
            shape = list(parameter.shape)
            size, shape[along] = shape[along], 1
            parameter.zero_()
            for _ in range(2):
                places = torch.randint(size, shape, generator=generator)
                parameter.scatter_(along, places, grid(2.0**-7, *shape).to(parameter.dtype))


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_bits_of_the_class(name: str) -> None:
    found = next((one for one in discover() if one.name == name), None)
    if found is None:
        pytest.skip(f"this transformers has no {name}")
    module = build(found, DEFAULT_SIZES)
    translation = translate(module)
    module.bfloat16()
    _grids(module)
    T, K, E, H, _ = DEFAULT_SIZES
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-4, 5, (T, H), generator=generator).bfloat16()
    ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K]
    probs = torch.rand(T, K, generator=generator)

    expected = interface.own_forward(module)(module, x, ids, probs)
    weights = weights_of(module, translation)
    call = (x, Routing(ids, probs), weights, translation.activation)

    assert_bitwise_equal(emulated_experts(*call, emulate=CLASSES[name]), expected)
    contract = emulated_experts(*call, emulate=RoundingPoints())
    assert bitwise_equal(contract, expected) == (CLASSES[name] == RoundingPoints())
