"""vLLM's ``fused_experts`` on this library on a GPU: captured in a graph, with a map."""

import pytest
import torch
from torch import Tensor

from samebits.integrations.vllm import fused_experts
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, COLUMNS, TOKENS, TOPK = 8, 256, 128, 16, 2


def _fill(inputs: dict[str, Tensor], seed: int) -> None:
    """Put other tokens, ids, probabilities and another half of the experts there, in place."""
    generator = torch.Generator("cuda").manual_seed(seed)
    inputs["hidden_states"].normal_(generator=generator)
    inputs["topk_weights"].uniform_(generator=generator)
    inputs["topk_ids"].random_(0, EXPERTS, generator=generator)
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[seed % 2 :: 2] = torch.arange(EXPERTS // 2, dtype=torch.int32)
    inputs["expert_map"].copy_(expert_map)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("name", ["silu", "swigluoai"])
def test_a_captured_call_sees_new_tokens_and_another_map(name: str, on_input: bool) -> None:
    place = {"device": "cuda", "dtype": torch.bfloat16}
    held = EXPERTS // 2
    inputs = {
        "hidden_states": torch.empty(TOKENS, HIDDEN, **place),
        "w1": torch.randn(held, 2 * COLUMNS, HIDDEN, **place) * 0.1,
        "w2": torch.randn(held, HIDDEN, COLUMNS, **place) * 0.1,
        "topk_weights": torch.empty(TOKENS, TOPK, device="cuda"),
        "topk_ids": torch.empty(TOKENS, TOPK, device="cuda", dtype=torch.int32),
        "expert_map": torch.empty(EXPERTS, device="cuda", dtype=torch.int32),
    }
    options = {"activation": name, "apply_router_weight_on_input": on_input}
    options |= {"global_num_experts": EXPERTS}

    with torch.inference_mode():
        _fill(inputs, 0)
        fused_experts(**inputs, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_experts(**inputs, **options)
        for seed in (1, 2):
            _fill(inputs, seed)
            graph.replay()
            expected = fused_experts(**inputs, **options)
            assert expected.any()
            assert_bitwise_equal(out, expected)
