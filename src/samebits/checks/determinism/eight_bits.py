"""Variants of layers with activations in 8 bits: their kernels, by the layer's own call."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from samebits.checks.determinism.layers import FEW, SECOND, WHOLE, layer_variant
from samebits.checks.determinism.operations import PERMUTE
from samebits.checks.determinism.variant import Variant
from samebits.formats.descriptor import FP8, MXFP8, ROWS_FP8, FormatPair
from samebits.ops.indirect_gemm import tuning as indirect_tuning
from samebits.ops.quantize import tuning as quantize_tuning
from samebits.ops.scaled_gemm import tuning as scaled_tuning
from samebits.problem import Problem, ProbPlacement

QUANTIZE = "ops/quantize/kernel.py:"
SCALED = "ops/scaled_gemm/kernel.py:_scaled_product_kernel"
SPECIALIZED = "ops/scaled_gemm/specialized/kernel.py:_specialized_product_kernel"

_BLOCKS = FormatPair(gate_up=FP8, down=FP8)
# Families of options of FP8 rows.
FAMILIES: dict[str, Problem] = {
    "plain": FEW,
    "gpt-oss": replace(WHOLE, placement=ProbPlacement.FC2_INPUT),
    "fc1_input": replace(FEW, K=1, placement=ProbPlacement.FC1_INPUT),
    # Multiples of no 16 bytes: pointers instead of descriptors, and ragged blocks.
    "odd": replace(FEW, H=2050, F=770),
}


def eight_bits() -> Iterator[Variant]:
    """Yield every variant."""
    for family, problem in FAMILIES.items():
        held = replace(problem, format=_BLOCKS, row_format=ROWS_FP8)
        for tokens in (8, 1024):
            yield _fp8(family, held, tokens)
    pair = FormatPair(gate_up=MXFP8, down=MXFP8)
    yield _mxfp8(replace(FEW, F=2048, format=pair, row_format=MXFP8), 8)


def _quantised(problem: Problem) -> dict[str, dict[str, object]]:
    """Return the tiles of the two kernels that quantise."""
    permuted = asdict(quantize_tuning.permute_heuristic(problem.H))
    del permuted["block_r"]
    return {
        "_permute_and_quantize_kernel": permuted,
        "_activation_and_quantize_kernel": asdict(quantize_tuning.activation_heuristic(problem.F)),
    }


def _fp8(family: str, problem: Problem, tokens: int) -> Variant:
    """Return the layer whose products are of 8-bit numbers."""
    tiles = _quantised(problem)
    config = scaled_tuning.heuristic(tokens * problem.K, problem.E, problem.device)
    product = SPECIALIZED if config.specialized and family != "odd" else SCALED
    kernels = [*(QUANTIZE + name for name in tiles), product, f"{PERMUTE}_sum_kernel"]
    if family == "odd":
        config = (config.of_plain_rows() if config.specialized else config).for_pointers()
    tiles[product.rpartition(":")[2]] = asdict(config)
    return layer_variant("grouped", f"{family} 8-bit rows", problem, tokens, kernels, tiles)


def _mxfp8(problem: Problem, tokens: int) -> Variant:
    """Return the layer whose products are of the numbers that rows stand for."""
    tiles = _quantised(problem)
    kernels = [*(QUANTIZE + name for name in tiles), SECOND, f"{PERMUTE}_sum_kernel"]
    found = indirect_tuning.quantized_heuristic(tokens * problem.K, problem)
    assert found is not None
    tiles["_second_projection_kernel"] = asdict(found[1])
    return layer_variant("grouped", "mxfp8 rows", problem, tokens, kernels, tiles)
