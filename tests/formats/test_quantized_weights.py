"""Layers over quantised weights: the bits of the dequantised layer, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samebits import Activation, ProbPlacement, UnsupportedError, explain, grouped_experts
from samebits.checkpoints.files import BadFileError
from samebits.checkpoints.quantized import load_quantized, save_quantized
from samebits.experts import experts
from samebits.formats import (
    FP8,
    MXFP4,
    MXFP8,
    NVFP4,
    FormatPair,
    QuantizedMatrix,
    QuantizedWeights,
    dequantize,
    quantize,
)
from samebits.problem import Problem
from samebits.routing import Routing
from samebits.testing.cases import CASES, QUANTIZED
from samebits.testing.inputs import Inputs, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights, Layout

pytestmark = pytest.mark.reference

FORMATS = ("fp8_128x128", "fp8_16x32/fp8_32x16", "mxfp8", "mxfp4", "nvfp4")


def _dense(inputs: Inputs) -> Inputs:
    assert isinstance(inputs.weights, QuantizedWeights)
    return replace(inputs, weights=dequantize(inputs.weights))


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize(
    "name",
    ["gpt-oss-whole", "relu2", "fc1_input", "local-experts", "norm"],
)
def test_bits_of_the_dequantised_layer(backend: str, key: str, name: str) -> None:
    """The output, and every gradient around the frozen weights."""
    stored = FormatPair.parse(key)
    for dtype in ("bf16", "fp32") if backend == "grouped" else ("bf16",):
        biases = {n: dtype for n in ("gate_up_bias", "down_bias") if getattr(CASES[name], n)}
        problem = replace(CASES[name], dtype=dtype, format=stored, **biases)
        inputs = make_inputs(problem, 9, distribution="zipf")

        got = run(problem, inputs, backend)
        expected = run(replace(problem, format=None), _dense(inputs), backend)

        assert got.keys() == expected.keys() - {"d_gate_up", "d_down"}
        for quantity, value in got.items():
            assert_bitwise_equal(value, expected[quantity])


@pytest.mark.parametrize("placement", list(ProbPlacement))
@pytest.mark.parametrize("interleave", [None, 1, 16])
def test_every_placement_and_layout(placement: ProbPlacement, interleave: int | None) -> None:
    layout = Layout(interleave=interleave)
    problem = replace(QUANTIZED["mxfp4-gpt-oss"], placement=placement, layout=layout)
    inputs = make_inputs(problem, 6)

    for backend in ("reference", "grouped"):
        got = run(problem, inputs, backend)
        expected = run(replace(problem, format=None), _dense(inputs), backend)
        for quantity, value in got.items():
            assert_bitwise_equal(value, expected[quantity])


@pytest.mark.parametrize("columns", [192, 80, 576])
def test_ragged_blocks(columns: int) -> None:
    problem = Problem(
        H=160, F=columns, E=3, K=2, dtype="bf16", format=FormatPair.parse("fp8_128x128")
    )
    inputs = make_inputs(problem, 5)

    got = run(problem, inputs, "grouped")

    assert_bitwise_equal(
        got["out"], run(replace(problem, format=None), _dense(inputs), "grouped")["out"]
    )


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("key", FORMATS)
def test_experts_without_tokens_are_not_read(backend: str, key: str) -> None:
    problem = replace(
        CASES["gpt-oss-whole"],
        format=FormatPair.parse(key),
        dtype="bf16",
        gate_up_bias="bf16",
        down_bias="bf16",
    )
    inputs = make_inputs(problem, 6)
    ids = inputs.routing.topk_ids
    ids[ids == 2] = 3
    clean = run(problem, inputs, backend)

    def poisoned(matrix: QuantizedMatrix) -> QuantizedMatrix:
        def fill(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            tensor[2:3].view(torch.uint8).fill_(0xFF)
            return tensor

        return matrix.map(fill)

    weights = inputs.weights
    assert isinstance(weights, QuantizedWeights)
    bad = replace(weights, gate_up=poisoned(weights.gate_up), down=poisoned(weights.down))
    for quantity, value in run(problem, replace(inputs, weights=bad), backend).items():
        assert_bitwise_equal(value, clean[quantity])


@pytest.mark.parametrize("weight_format", [FP8, MXFP8, MXFP4, NVFP4])
def test_layouts_are_converted_without_changing_a_weight(weight_format: FormatPair) -> None:
    inputs = make_inputs(CASES["gpt-oss-whole"], 2)
    assert isinstance(inputs.weights, ExpertWeights)
    packed = quantize(inputs.weights, weight_format)

    for layout in (Layout(), Layout(up_first=True), Layout(interleave=16), Layout(interleave=1)):
        got, expected = dequantize(packed.to_layout(layout)), dequantize(packed).to_layout(layout)
        assert got.layout == layout
        for name, tensor in got.named_tensors().items():
            assert_bitwise_equal(tensor, expected.named_tensors()[name])


def _leaf(inputs: Inputs) -> QuantizedWeights:
    weights = inputs.weights
    assert isinstance(weights, QuantizedWeights)
    scales = weights.gate_up.scales.clone().requires_grad_()
    return replace(weights, gate_up=replace(weights.gate_up, scales=scales))


def test_a_gradient_of_the_weights_is_refused_with_the_reason() -> None:
    inputs = make_inputs(QUANTIZED["fp8_128x128-gpt-oss"], 3)
    weights = _leaf(inputs)

    with pytest.raises(UnsupportedError, match="weights in fp8_128x128 have no gradient"):
        experts(inputs.x, inputs.routing, weights)
    with torch.no_grad():
        experts(inputs.x, inputs.routing, weights, QUANTIZED["fp8_128x128-gpt-oss"].activation)


def test_the_problem_says_the_format_and_reads_it_back() -> None:
    problem = QUANTIZED["fp8_16x32-fp8_32x16-gpt-oss"]

    assert "format=fp8_16x32/fp8_32x16" in str(problem).split()
    assert Problem.parse(str(problem)) == problem
    with pytest.raises(TypeError, match="format must be a FormatPair, got str"):
        replace(problem, format="mxfp4")  # type: ignore[arg-type]


def test_explain_names_who_runs_it() -> None:
    reasons = explain(QUANTIZED["mxfp4-gpt-oss"])

    assert reasons["grouped"] is None
    assert reasons["reference"] is None


def test_rows_that_are_sorted_already() -> None:
    problem = QUANTIZED["mxfp8-gpt-oss"]
    inputs = make_inputs(problem, 10)
    offsets = torch.tensor([0, 2, 2, 5, 7, 9])

    got = grouped_experts(inputs.x, offsets, inputs.weights, problem.activation)
    expected = grouped_experts(inputs.x, offsets, _dense(inputs).weights, problem.activation)

    assert_bitwise_equal(got, expected)


def test_autocast_says_what_the_weights_stand_for() -> None:
    problem = replace(QUANTIZED["mxfp4-odd-sizes"], dtype="fp32")
    inputs = make_inputs(problem, 4)
    assert isinstance(inputs.weights, QuantizedWeights)

    with torch.autocast("cpu", torch.bfloat16):
        got = experts(inputs.x, inputs.routing, inputs.weights)

    expected = experts(inputs.x.bfloat16(), inputs.routing, inputs.weights.to(torch.bfloat16))
    assert_bitwise_equal(got, expected)


def test_one_compiled_graph() -> None:
    problem = QUANTIZED["mxfp4-gpt-oss"]
    inputs = make_inputs(problem, 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        return experts(x, Routing(ids, probs), inputs.weights, problem.activation)

    x = inputs.x.clone().requires_grad_()
    out = layer(x, inputs.routing.topk_ids, inputs.routing.topk_probs)
    (dx,) = torch.autograd.grad(out, x, inputs.dout)

    expected = run(problem, inputs, "auto")
    assert_bitwise_equal(out.detach(), expected["out"])
    assert_bitwise_equal(dx, expected["d_x"])


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_files_keep_every_bit_and_option(name: str, tmp_path: Path) -> None:
    weights = make_inputs(QUANTIZED[name], 1).weights
    assert isinstance(weights, QuantizedWeights)
    path = tmp_path / "experts.safetensors"

    save_quantized({"layers.0": weights, "layers.1": weights.map(lambda t: t.flip(0))}, path)
    found = load_quantized(path)

    assert list(found) == ["layers.0", "layers.1"]
    again = found["layers.0"]
    fields = ("format", "dtype", "layout", "norm", "gated")
    assert [getattr(again, f) for f in fields] == [getattr(weights, f) for f in fields]
    assert (again.gate_up.shape, again.down.shape) == (weights.gate_up.shape, weights.down.shape)
    for key, tensor in weights.named_tensors().items():
        assert_bitwise_equal(again.named_tensors()[key], tensor)


def test_files_are_read_by_the_library_that_defines_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    weights = make_inputs(QUANTIZED["nvfp4-gpt-oss"], 1).weights
    assert isinstance(weights, QuantizedWeights)
    path = tmp_path / "experts.safetensors"

    save_quantized({"layer": weights}, path)

    found = safetensors.load_file(path)
    assert found.keys() == {f"layer.{name}" for name in weights.named_tensors()}
    for name, tensor in weights.named_tensors().items():
        assert_bitwise_equal(found[f"layer.{name}"].view(torch.uint8), tensor.view(torch.uint8))


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    path = tmp_path / "other.safetensors"
    safetensors.save_file({"a": torch.ones(2)}, path)

    with pytest.raises(BadFileError, match=r"say samebits.quantized = 1 in its metadata, got None"):
        load_quantized(path)
    safetensors.save_file(
        {"a.gate_up.values": torch.ones(2)}, path, {"samebits.quantized": "1", "a": "format=mxfp4"}
    )
    with pytest.raises(BadFileError, match=r"a must state F, H, down\.scales"):
        load_quantized(path)
    metadata = {"samebits.quantized": "1", "a": "format=mxfp4 dtype=int4 layout=halves H=4 F=4"}
    safetensors.save_file({"a.gate_up.values": torch.ones(2)}, path, metadata)
    with pytest.raises(BadFileError, match="unknown dtype 'int4'"):
        load_quantized(path)
    safetensors.save_file({"b": torch.ones(2)}, path, metadata)
    with pytest.raises(BadFileError, match="hold tensors of its layers only, got b"):
        load_quantized(path)
    metadata["a"] = metadata["a"].replace("int4", "bf16")
    safetensors.save_file({"a.down_bias": torch.ones(2, dtype=torch.int32)}, path, metadata)
    with pytest.raises(BadFileError, match="unknown dtype 'I32'"):
        load_quantized(path)


def test_what_is_no_layer_is_not_saved(tmp_path: Path) -> None:
    weights = make_inputs(QUANTIZED["mxfp4-gpt-oss"], 1).weights
    path = tmp_path / "experts.safetensors"

    for layers, message in (
        (weights, "layers must be a Mapping, got QuantizedWeights"),
        ({1: weights}, "the name of a layer must be a str, got int"),
        ({"a": weights.gate_up}, r"layers\['a'\] must be a QuantizedWeights"),
    ):
        with pytest.raises(TypeError, match=message):
            save_quantized(layers, path)

    assert not list(tmp_path.iterdir())


def test_names_of_layers_may_begin_alike(tmp_path: Path) -> None:
    weights = make_inputs(QUANTIZED["mxfp4-gpt-oss"], 1).weights
    assert isinstance(weights, QuantizedWeights)
    path = tmp_path / "experts.safetensors"

    save_quantized({"a": weights, "a.gate_up": weights}, path)

    assert set(load_quantized(path)) == {"a", "a.gate_up"}


def test_formats_that_do_not_go_together_are_refused() -> None:
    inputs = make_inputs(QUANTIZED["mxfp4-gpt-oss"], 1)
    weights = inputs.weights
    assert isinstance(weights, QuantizedWeights)
    other = quantize(dequantize(weights), MXFP8)

    with pytest.raises(ValueError, match=r"be of the kind of gate_up \(mxfp4\), got mxfp8"):
        replace(weights, down=other.down)
    with pytest.raises(TypeError, match="gate_up must be a QuantizedMatrix, got Tensor"):
        replace(weights, gate_up=weights.gate_up.values)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16, float32 or float64"):
        weights.to(torch.uint8)
    with pytest.raises(
        ValueError, match=r"x must have the dtype of the weights \(torch.bfloat16\)"
    ):
        experts(inputs.x.half(), inputs.routing, weights, Activation())
