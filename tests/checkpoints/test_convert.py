"""Conversions are exact, and what they write means the same to the code that reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="needs safetensors")

from torch import Tensor
from torch.nn.functional import linear, silu

from checkpoint_files import (
    ROOT,
    SIZES,
    SQUARE,
    Sizes,
    hf_tensors,
    read,
    stacked,
    with_an_odd_nan,
    write,
)
from samebits import Activation, ExpertWeights, Layout, Routing, experts
from samebits.checkpoints import convert
from samebits.checkpoints.schemes import SCHEMES
from samebits.testing.numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.reference

BIASED = [s.name for s in SCHEMES.values() if ("down", "bias") in s.tails]


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert_bitwise_equal(actual[name], tensor, name)


@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["oblong", "square"])
@pytest.mark.parametrize("scheme", [*SCHEMES, "megatron:interleave=4", "stacked:interleave=2"])
def test_there_and_back_is_the_same(tmp_path: Path, scheme: str, sizes: Sizes) -> None:
    tensors = with_an_odd_nan(hf_tensors(sizes))
    source = write(tmp_path / "a", tensors)

    done = convert(source, tmp_path / "b", scheme)
    convert(tmp_path / "b", tmp_path / "c", "hf", num_experts=sizes.experts)

    _assert_same(read(tmp_path / "c"), tensors)
    assert done.elements_read == done.elements_written
    assert done.layers == 2


@pytest.mark.parametrize("scheme", BIASED)
def test_biases_follow_their_rows(tmp_path: Path, scheme: str) -> None:
    tensors = hf_tensors(SIZES, bias=True)
    source = write(tmp_path / "a", tensors)

    convert(source, tmp_path / "b", scheme)
    convert(tmp_path / "b", tmp_path / "c", "hf")

    _assert_same(read(tmp_path / "c"), tensors)


def test_every_pair_of_schemes_agrees(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    for scheme in SCHEMES:
        convert(source, tmp_path / scheme, scheme)

    for first, second in zip(SCHEMES, [*SCHEMES][1:], strict=False):
        across = tmp_path / f"{first}-{second}"
        convert(tmp_path / first, across, second, num_experts=SIZES.experts)
        _assert_same(read(across), read(tmp_path / second))


def _plain_loop(tensors: dict[str, Tensor], x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """The layer as an expert's matrices apart define it, in fp64."""
    root, out = ROOT.format(0), torch.zeros(x.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])):
        name = f"{root}.{ids[t, k]}"
        gate, up, down = (
            tensors[f"{name}.{p}_proj.weight"].double() for p in ("gate", "up", "down")
        )
        h = silu(linear(x[t].double(), gate)) * linear(x[t].double(), up)
        out[t] += probs[t, k].double() * linear(h, down)
    return out


def _inputs(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(sizes.experts)[:2] for _ in range(5)])
    return torch.randn(5, sizes.hidden).bfloat16(), ids, torch.rand(5, 2)


def _module(scheme: str, sizes: Sizes) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if scheme == "stacked":
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = transformers.MixtralConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.columns,
            num_local_experts=sizes.experts,
            experts_implementation="eager",
        )
        return MixtralExperts(config), "{}"
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    config = transformers.DbrxConfig(
        d_model=sizes.hidden,
        ffn_config={
            "hidden_size": sizes.hidden,
            "ffn_hidden_size": sizes.columns,
            "moe_num_experts": sizes.experts,
            "ffn_act_fn": {"name": "silu"},
        },
    )
    return DbrxExperts(config.ffn_config), "{}"


@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["oblong", "square"])
@pytest.mark.parametrize("scheme", ["stacked", "dbrx"])
def test_the_code_that_reads_it_computes_the_layer(
    tmp_path: Path, scheme: str, sizes: Sizes
) -> None:
    tensors = hf_tensors(sizes, layers=1)
    x, ids, probs = _inputs(sizes)
    module, _ = _module(scheme, sizes)

    convert(write(tmp_path / "a", tensors), tmp_path / "b", scheme)

    root = ROOT.format(0) + "."
    held = {n.removeprefix(root): t for n, t in read(tmp_path / "b").items() if n.startswith(root)}
    module.load_state_dict(held)
    with torch.no_grad():
        theirs = module.double()(x.double(), ids, probs.double())
    exact = _plain_loop(tensors, x, ids, probs)
    assert relative_error(theirs.reshape(exact.shape), exact) < 2.0**-40


@pytest.mark.parametrize("sizes", [SIZES, SQUARE], ids=["oblong", "square"])
def test_gpt_oss_code_computes_the_layer(tmp_path: Path, sizes: Sizes) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    tensors = hf_tensors(sizes, layers=1, bias=True)
    x, ids, probs = _inputs(sizes)
    config = transformers.GptOssConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.columns,
        num_local_experts=sizes.experts,
        experts_implementation="eager",
    )
    module = GptOssExperts(config)

    convert(write(tmp_path / "a", tensors), tmp_path / "b", "gpt-oss")

    root = ROOT.format(0) + "."
    held = {n.removeprefix(root): t for n, t in read(tmp_path / "b").items() if n.startswith(root)}
    module.load_state_dict(held)
    with torch.no_grad():
        theirs = module.double()(x.double(), ids, probs.double())
    halves = ExpertWeights(
        gate_up=torch.cat([stacked(tensors, 0, part) for part in ("gate", "up")], 1).double(),
        down=stacked(tensors, 0, "down").double(),
        gate_up_bias=torch.cat(
            [stacked(tensors, 0, p, "bias") for p in ("gate", "up")], 1
        ).double(),
        down_bias=stacked(tensors, 0, "down", "bias").double(),
    )
    ours = experts(
        x.double(),
        Routing(ids, probs.double()),
        halves,
        Activation(alpha=1.702, limit=7.0, linear_offset=1.0),
    )
    assert relative_error(ours, theirs) < 2.0**-40


def test_megatron_code_finds_the_halves(tmp_path: Path) -> None:
    """Its own way of undoing an interleave, on the rows that were written."""
    tensors = hf_tensors(SIZES, layers=1)
    convert(write(tmp_path / "a", tensors), tmp_path / "b", "megatron:interleave=4")

    fc1 = read(tmp_path / "b")[f"{ROOT.format(0)}.linear_fc1.weight2"]

    blocks = fc1.T.reshape(-1, fc1.shape[0] // 8, 2, 4).transpose(1, 2).reshape(fc1.T.shape)
    gate, up = blocks.chunk(2, -1)
    assert_bitwise_equal(gate.T, tensors[f"{ROOT.format(0)}.2.gate_proj.weight"])
    assert_bitwise_equal(up.T, tensors[f"{ROOT.format(0)}.2.up_proj.weight"])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("scheme", ["hf", "stacked", "megatron:interleave=3", "gpt-oss"])
def test_cut_for_ranks_and_put_together_again(
    tmp_path: Path, scheme: str, tp: int, ep: int
) -> None:
    tensors = hf_tensors(SIZES, bias=True)

    done = convert(
        write(tmp_path / "a", tensors),
        tmp_path / "b",
        scheme,
        tensor_parallel=tp,
        expert_parallel=ep,
    )
    convert(tmp_path / "b", tmp_path / "c", "stacked", tensor_parallel=2)
    convert(tmp_path / "c", tmp_path / "d", "hf")

    _assert_same(read(tmp_path / "d"), tensors)
    # The bias of the second projection is held by every tensor-parallel rank, the rest once.
    again = (tp - 1) * 2 * SIZES.experts * SIZES.hidden
    assert done.elements_written == done.elements_read + again


@pytest.mark.parametrize("tp", [2, 4])
def test_the_ranks_sum_is_the_layer(tmp_path: Path, tp: int) -> None:
    tensors = hf_tensors(SIZES, layers=1)
    x, ids, probs = _inputs(SIZES)

    convert(write(tmp_path / "a", tensors), tmp_path / "b", "interleaved", tensor_parallel=tp)

    total = torch.zeros(x.shape, dtype=torch.float64)
    for rank in range(tp):
        held = read(tmp_path / "b" / f"rank-tp{rank}of{tp}-ep0of1")
        weights = ExpertWeights(
            gate_up=held[f"{ROOT.format(0)}.gate_up_proj"].double(),
            down=held[f"{ROOT.format(0)}.down_proj"].double(),
            layout=Layout(interleave=1),
        )
        total += experts(x.double(), Routing(ids, probs.double()), weights)
    assert relative_error(total, _plain_loop(tensors, x, ids, probs)) < 2.0**-40


def test_a_rank_holds_its_rows_of_gate_and_of_up(tmp_path: Path) -> None:
    tensors = hf_tensors(SIZES, layers=1)

    convert(write(tmp_path / "a", tensors), tmp_path / "b", "stacked", tensor_parallel=2)

    second = read(tmp_path / "b" / "rank-tp1of2-ep0of1")[f"{ROOT.format(0)}.gate_up_proj"]
    gate, up = (stacked(tensors, 0, part)[:, 6:] for part in ("gate", "up"))
    assert_bitwise_equal(second, torch.cat([gate, up], 1))


def test_block_scales_follow_their_blocks(tmp_path: Path) -> None:
    tensors = hf_tensors(Sizes(2, 8, 16), layers=1)
    for name in [n for n in tensors if "experts" in n]:
        rows, columns = tensors[name].shape
        tensors[f"{name}_scale_inv"] = torch.rand(rows // 4, columns // 4)
    source = write(tmp_path / "a", tensors)

    convert(source, tmp_path / "b", "stacked:interleave=4")
    convert(tmp_path / "b", tmp_path / "c", "stacked", tensor_parallel=2)
    convert(tmp_path / "c", tmp_path / "d", "hf")

    _assert_same(read(tmp_path / "d"), tensors)
    root = ROOT.format(0)
    gate, up = (stacked(tensors, 0, part, "weight_scale_inv") for part in ("gate", "up"))
    mixed = torch.stack([gate, up], 2).flatten(1, 2)
    assert_bitwise_equal(read(tmp_path / "b")[f"{root}.gate_up_proj_scale_inv"], mixed)


def test_the_index_and_what_stands_beside_are_written(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}')

    convert(source, tmp_path / "b", "stacked", shard_bytes=3000)

    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    held = {n: p.name for p in sorted((tmp_path / "b").glob("*.safetensors")) for n in _names(p)}
    assert index["weight_map"] == held
    assert len(set(held.values())) > 2
    assert (tmp_path / "b" / "config.json").read_text() == (source / "config.json").read_text()


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def test_one_file_is_a_checkpoint(tmp_path: Path) -> None:
    tensors = hf_tensors(SIZES, layers=1)
    source = write(tmp_path / "a", tensors, files=1)

    convert(source / "model.safetensors", tmp_path / "b", "megatron")
    convert(tmp_path / "b", tmp_path / "c", "hf")

    _assert_same(read(tmp_path / "c"), tensors)


def test_a_configuration_tells_what_names_do_not(tmp_path: Path) -> None:
    tensors = hf_tensors(SIZES, layers=1, bias=True)
    convert(write(tmp_path / "a", tensors), tmp_path / "b", "gpt-oss")
    # As a file of someone else's: without what a conversion notes.
    plain = write(tmp_path / "c", read(tmp_path / "b"), files=1)
    config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 20}
    config |= {"intermediate_size": 12, "num_local_experts": 3, "num_experts_per_tok": 2}
    (plain / "config.json").write_text(json.dumps(config))

    done = convert(plain, tmp_path / "d", "hf")

    assert done.source == "gpt-oss"
    _assert_same(read(tmp_path / "d"), tensors)
