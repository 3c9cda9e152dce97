"""Quantised tensors of checkpoints, with the weights that other libraries read from them."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits.errors import UnsupportedError
from samebits.formats import (
    FP8,
    MXFP4,
    MXFP8,
    NVFP4,
    QuantizedMatrix,
    QuantizedWeights,
    WeightFormat,
    dequantize,
)
from samebits.formats.codes import encode_e2m1
from samebits.formats.loading import from_gpt_oss, from_linears
from samebits.formats.packing import quantize_matrix
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.reference

PREFIX = "model.layers.3.mlp.experts"


def _bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _gpt_oss(experts: int = 2, hidden: int = 64, columns: int = 96) -> dict[str, Tensor]:
    """Return any bytes, with scales within the range of bf16 products."""
    shapes = {"gate_up_proj": (2 * columns, hidden), "down_proj": (hidden, columns)}
    tensors = {}
    for seed, (name, (rows, inner)) in enumerate(shapes.items()):
        tensors[f"{PREFIX}.{name}_blocks"] = _bytes(experts, rows, inner // 32, 16, seed=seed)
        scales = _bytes(experts, rows, inner // 32, seed=seed + 9)
        tensors[f"{PREFIX}.{name}_scales"] = scales.clamp(2, 251)
        tensors[f"{PREFIX}.{name}_bias"] = torch.randn(experts, rows).bfloat16()
    return tensors


def test_gpt_oss_has_the_weights_that_transformers_reads() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="needs transformers")
    tensors = _gpt_oss()

    weights = from_gpt_oss(tensors, PREFIX)

    assert weights.layout == Layout(interleave=1)
    dense = dequantize(weights)
    for name, matrix in (("gate_up_proj", dense.gate_up), ("down_proj", dense.down)):
        stored = (tensors[f"{PREFIX}.{name}_{part}"] for part in ("blocks", "scales"))
        theirs = mxfp4.convert_moe_packed_tensors(*stored, dtype=torch.bfloat16)
        assert_bitwise_equal(matrix, theirs.transpose(1, 2))
    assert weights.gate_up.values.data_ptr() == tensors[f"{PREFIX}.gate_up_proj_blocks"].data_ptr()


def _fp8(rows: int, columns: int, seed: int, block: int = 128) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(1, rows, columns, generator=generator)
    packed = quantize_matrix(matrix, WeightFormat(name="fp8", block=(block, block)))
    return {"weight": packed.values[0], "weight_scale_inv": packed.scales[0]}


def _linears(
    one: Callable[[int, int, int], dict[str, Tensor]],
    hidden: int,
    columns: int,
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Tensor]:
    tensors = {}
    for expert in range(3):
        for place, part in enumerate(parts):
            shape = (hidden, columns) if place == 2 else (columns, hidden)
            for tail, tensor in one(*shape, 10 * expert + place).items():
                tensors[f"{PREFIX}.{expert}.{part}.{tail}"] = tensor
    return tensors


def _theirs(tensors: dict[str, Tensor], expert: int, part: str) -> Tensor:
    """Return one matrix as transformers dequantises it on loading."""
    fp8 = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", reason="needs transformers"
    )
    stem = f"{PREFIX}.{expert}.{part}"
    weight, scale = tensors[f"{stem}.weight"], tensors[f"{stem}.weight_scale_inv"]
    converter = fp8.Fp8Dequantize(SimpleNamespace())
    found: Tensor = converter._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
    return found


@pytest.mark.parametrize("e8m0", [False, True])
def test_deepseek_has_the_weights_that_transformers_reads(e8m0: bool) -> None:
    tensors = _linears(_fp8, hidden=256, columns=128)
    if e8m0:
        tensors = {
            name: _bytes(*t.shape).clamp(60, 190).view(torch.float8_e8m0fnu)
            if "scale" in name
            else t
            for name, t in tensors.items()
        }

    weights = from_linears(tensors, PREFIX, experts=range(3))

    assert weights.format.key == "fp8_128x128"
    dense = dequantize(weights)
    for expert in range(3):
        gate, up = dense.gate_up[expert].chunk(2)
        assert_bitwise_equal(gate, _theirs(tensors, expert, "gate_proj"))
        assert_bitwise_equal(up, _theirs(tensors, expert, "up_proj"))
        assert_bitwise_equal(dense.down[expert], _theirs(tensors, expert, "down_proj"))


@pytest.mark.parametrize(("columns", "rows"), [(192, 64), (80, 16), (576, 64), (128, 128)])
def test_gate_and_up_of_ragged_blocks_keep_their_own_scales(columns: int, rows: int) -> None:
    """Their blocks restart at up: rows of scales cannot be put one behind the other as they are."""
    tensors = _linears(_fp8, hidden=144, columns=columns)

    weights = from_linears(tensors, PREFIX, experts=range(3))

    assert weights.gate_up.format.block == (rows, 128)
    dense = dequantize(weights)
    for expert in range(3):
        for place, part in enumerate(("gate_proj", "up_proj")):
            stem = f"{PREFIX}.{expert}.{part}"
            alone = QuantizedMatrix(
                format=FP8,
                columns=144,
                values=tensors[f"{stem}.weight"][None],
                scales=tensors[f"{stem}.weight_scale_inv"][None],
            )
            half = dense.gate_up[expert].chunk(2)[place]
            assert_bitwise_equal(half, alone.dequantize(torch.bfloat16)[0])


def test_a_slice_that_cuts_blocks_is_the_slice_of_the_weights() -> None:
    """A rank's share of down in tensor parallelism: blocks made small enough to be cut."""
    packed = quantize_matrix(torch.randn(2, 64, 384), FP8).refine(128, 64)

    part = QuantizedMatrix(
        format=packed.format,
        columns=192,
        values=packed.values[..., 192:],
        scales=packed.scales[..., 3:],
    )

    whole = packed.dequantize(torch.bfloat16)
    assert_bitwise_equal(part.dequantize(torch.bfloat16), whole[..., 192:])


def test_experts_are_taken_in_the_order_asked_for() -> None:
    tensors = _linears(_fp8, hidden=128, columns=128, parts=("w1", "w3", "w2"))

    whole = dequantize(from_linears(tensors, PREFIX, experts=range(3)))
    part = dequantize(from_linears(tensors, PREFIX, experts=[2, 0]))

    assert_bitwise_equal(part.gate_up, whole.gate_up[[2, 0]])


def test_int8_holds_mxfp4_as_deepseek_v4_stores_it() -> None:
    def one(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
        return {
            "weight": _bytes(rows, columns // 2, seed=seed).view(torch.int8),
            "weight_scale_inv": _bytes(rows, columns // 32, seed=seed)
            .clamp(60, 190)
            .view(torch.float8_e8m0fnu),
        }

    tensors = _linears(one, hidden=64, columns=32)

    dense = dequantize(from_linears(tensors, PREFIX, experts=range(3), weight_format=MXFP4))

    assert_bitwise_equal(dense.down[1], _theirs(tensors, 1, "down_proj"))


def _nvfp4(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = encode_e2m1(torch.randn(rows, columns, generator=generator) * 3)
    scales = torch.rand(rows, columns // 16, generator=generator) * 300 + 1
    return {
        "weight": values,
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01 * (seed // 10 + 1)),
    }


def test_nvfp4_has_the_weights_that_torchao_reads() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="needs torchao")
    tensors = _linears(_nvfp4, hidden=64, columns=32)

    dense = dequantize(
        from_linears(tensors, PREFIX, experts=range(3), weight_format=NVFP4, dtype=torch.float32)
    )

    held = {n: tensors[f"{PREFIX}.2.down_proj.{n}"] for n in _nvfp4(1, 16, 0)}
    theirs = nvfp4.NVFP4Tensor(
        held["weight"],
        held["weight_scale"],
        16,
        torch.float32,
        per_tensor_scale=held["weight_scale_2"],
    )
    assert_bitwise_equal(dense.down[2], theirs.dequantize(torch.float32))


@pytest.mark.parametrize("weight_format", [MXFP8, MXFP4])
def test_mx_formats_have_the_weights_that_torchao_reads(weight_format: WeightFormat) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    weight = torch.randn(2, 64, 96)
    packed = quantize_matrix(weight, weight_format)
    element = torch.float8_e4m3fn if weight_format == MXFP8 else torch.float4_e2m1fn_x2

    theirs = mx.to_dtype(
        packed.values, packed.scales.view(torch.float8_e8m0fnu), element, 32, torch.bfloat16
    )

    assert_bitwise_equal(packed.dequantize(torch.bfloat16), theirs)


@pytest.mark.parametrize("weight_format", [MXFP8, MXFP4])
@pytest.mark.parametrize(("rule", "mode"), [("floor", "FLOOR"), ("round_up", "RCEIL")])
def test_scale_rules_are_those_of_torchao(
    weight_format: WeightFormat, rule: Any, mode: str
) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    weight = torch.randn(2, 64, 96) * torch.logspace(-3, 3, 64)[:, None]
    element = torch.float8_e4m3fn if weight_format == MXFP8 else torch.float4_e2m1fn_x2

    ours = quantize_matrix(weight, weight_format, rule)
    scales, values = mx.to_mx(weight, element, 32, mx.ScaleCalculationMode[mode])

    assert_bitwise_equal(ours.scales, scales.view(torch.uint8))
    assert_bitwise_equal(ours.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(f"{PREFIX}.down_proj_scales"), ValueError, "hold .*down_proj_scales"),
        (lambda t: t.pop(f"{PREFIX}.gate_up_proj_bias"), ValueError, "hold .*gate_up_proj_bias"),
        (
            lambda t: t[f"{PREFIX}.down_proj_scales"][1, 2].fill_(255),
            ValueError,
            r"scales of .*down_proj must be finite, got NaN or infinity at \(1, 2, 0\)",
        ),
        (
            lambda t: t.update(
                {f"{PREFIX}.down_proj_scales": t[f"{PREFIX}.down_proj_scales"][:, :-1]}
            ),
            ValueError,
            r"scales must have shape \(2, 64, 3\)",
        ),
        (
            lambda t: t.update(
                {f"{PREFIX}.gate_up_proj_blocks": t[f"{PREFIX}.gate_up_proj_blocks"].flatten(2)}
            ),
            ValueError,
            r"gate_up_proj_blocks must have shape \(E, rows, columns / 32, 16\)",
        ),
        (
            lambda t: t.update(
                {f"{PREFIX}.down_proj_scales": t[f"{PREFIX}.down_proj_scales"].float()}
            ),
            TypeError,
            "scales must be torch.uint8 for mxfp4, got torch.float32",
        ),
    ],
)
def test_bad_gpt_oss_tensors_are_refused(
    change: Callable[[dict[str, Tensor]], Any], error: type[Exception], message: str
) -> None:
    tensors = _gpt_oss()
    change(tensors)

    with pytest.raises(error, match=message):
        from_gpt_oss(tensors, PREFIX)


def test_bad_linears_are_refused() -> None:
    tensors = _linears(_fp8, hidden=128, columns=128)

    with pytest.raises(ValueError, match="experts must name an expert"):
        from_linears(tensors, PREFIX, experts=[])
    with pytest.raises(ValueError, match=r"hold .*3\.gate_proj\.weight or .*3\.w1\.weight"):
        from_linears(tensors, PREFIX, experts=[3])
    with pytest.raises(ValueError, match=r"hold .*0\.gate_proj\.weight_scale,"):
        from_linears(tensors, PREFIX, experts=[0], weight_format=NVFP4)
    tensors[f"{PREFIX}.1.up_proj.weight_scale_inv"].fill_(torch.inf)
    with pytest.raises(ValueError, match="scales of up_proj must be finite"):
        from_linears(tensors, PREFIX, experts=range(2))


def test_different_global_scales_of_gate_and_up_are_refused() -> None:
    tensors = _linears(_nvfp4, hidden=64, columns=32)
    tensors[f"{PREFIX}.1.up_proj.weight_scale_2"] *= 2

    with pytest.raises(UnsupportedError, match="different global scales"):
        from_linears(tensors, PREFIX, experts=range(2), weight_format=NVFP4)


def test_results_are_checked_like_any_weights() -> None:
    weights = from_gpt_oss(_gpt_oss(), PREFIX)

    with pytest.raises(ValueError, match=r"be torch\.float16"):
        QuantizedWeights(
            gate_up=weights.gate_up,
            down=weights.down,
            dtype=torch.float16,
            gate_up_bias=weights.gate_up_bias,
            layout=weights.layout,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tail", ["weight_scale_inv", "weight_scale", "scale"])
def test_fp8_scales_of_every_name_and_of_16_bits(tail: str, dtype: torch.dtype) -> None:
    """Qwen's FP8 checkpoints keep their scales in bf16."""
    tensors = {
        name: tensor.to(dtype) if "scale" in name else tensor
        for name, tensor in _linears(_fp8, hidden=256, columns=128).items()
    }
    renamed = {name.replace("weight_scale_inv", tail): t for name, t in tensors.items()}

    dense = dequantize(from_linears(renamed, PREFIX, experts=range(3)))

    assert_bitwise_equal(dense.down[2], _theirs(tensors, 2, "down_proj"))


def test_biases_of_linears_are_read() -> None:
    tensors = _linears(_fp8, hidden=144, columns=80)
    plain = from_linears(tensors, PREFIX, experts=range(3))
    sizes = {"gate_proj": 80, "up_proj": 80, "down_proj": 144}
    for expert in range(3):
        for part, size in sizes.items():
            tensors[f"{PREFIX}.{expert}.{part}.bias"] = torch.randn(size).bfloat16()

    weights = from_linears(tensors, PREFIX, experts=[2, 0])

    assert plain.gate_up_bias is None
    assert plain.down_bias is None
    stem = f"{PREFIX}.2"
    gate_up = torch.cat([tensors[f"{stem}.{part}.bias"] for part in ("gate_proj", "up_proj")])
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    assert_bitwise_equal(weights.gate_up_bias[0], gate_up)
    assert_bitwise_equal(weights.down_bias[0], tensors[f"{stem}.down_proj.bias"])
    del tensors[f"{PREFIX}.1.up_proj.bias"]
    with pytest.raises(ValueError, match=r"tensors must hold .*1\.up_proj\.bias"):
        from_linears(tensors, PREFIX, experts=range(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_biases_do_not_tie_a_checkpoint_to_their_dtype(dtype: torch.dtype) -> None:
    tensors = _gpt_oss()

    weights = from_gpt_oss(tensors, PREFIX, dtype=dtype)

    assert weights.down_bias is not None
    assert weights.dtype == dtype
    assert_bitwise_equal(weights.down_bias, tensors[f"{PREFIX}.down_proj_bias"].float())


def test_names_may_have_nothing_before_them() -> None:
    for tensors, load in (
        (_gpt_oss(), from_gpt_oss),
        (_linears(_fp8, 128, 128), partial(from_linears, experts=[1])),
    ):
        bare = {name.removeprefix(f"{PREFIX}."): tensor for name, tensor in tensors.items()}

        assert_bitwise_equal(
            dequantize(load(bare, "")).down, dequantize(load(tensors, PREFIX)).down
        )


def test_experts_that_differ_are_named() -> None:
    tensors = _linears(_fp8, hidden=128, columns=128)

    with pytest.raises(TypeError, match="experts must be a Sequence, got int"):
        from_linears(tensors, PREFIX, experts=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an expert must be an int, got '0'"):
        from_linears(tensors, PREFIX, experts="012")  # type: ignore[arg-type]
    name = f"{PREFIX}.1.up_proj.weight"
    for changed, actual in (
        (tensors[name][:64], r"float8_e4m3fn of shape \(64, 128\)"),
        (tensors[name].view(torch.float8_e5m2), r"float8_e5m2 of shape \(128, 128\)"),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} must be .* as .*0.up_proj.weight, .*{actual}"
        ):
            from_linears(tensors | {name: changed}, PREFIX, experts=range(3))


def test_loading_under_autocast_changes_nothing() -> None:
    tensors = _linears(_fp8, hidden=128, columns=80)
    without = from_linears(tensors, PREFIX, experts=range(3))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = from_linears(tensors, PREFIX, experts=range(3))

    assert_bitwise_equal(dequantize(within).gate_up, dequantize(without).gate_up)
