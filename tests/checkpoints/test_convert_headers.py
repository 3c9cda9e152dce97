"""Headers and counts that lie: each is an error that names the file, and nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="needs safetensors")

from safetensors.torch import save_file
from torch import Tensor

from checkpoint_files import ROOT, SIZES, Sizes, hf_tensors, read, stacked, write
from samebits import UnsupportedError
from samebits.checkpoints import BadFileError, convert

pytestmark = pytest.mark.reference

UP, GATE = (f"{ROOT.format(0)}.0.{part}_proj.weight" for part in ("up", "gate"))
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_experts": 3,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 12,
    "intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def _refused(source: Path, to: str = "stacked", **options: Any) -> str:
    destination = source.with_name("refused")
    with pytest.raises(BadFileError) as caught:
        convert(source, destination, to, **options)
    assert not destination.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(__metadata__=None), "__metadata__ is no object of texts"),
        (lambda h: h.update(__metadata__={"samebits_scheme": 3}), "__metadata__ is no object"),
        (lambda h: h[UP].update(shape=[float("inf"), 20]), "does not describe"),
        (lambda h: h[UP].update(shape=[12.5, 20]), "does not describe"),
        (lambda h: h[UP].update(shape=["12", "20"]), "does not describe"),
        (lambda h: h[UP].update(shape=[-12, -20]), "does not describe"),
        (lambda h: h[UP].update(data_offsets=h[GATE]["data_offsets"]), "shares bytes with"),
        (lambda h: h.pop(UP), "leaves bytes unused after"),
    ],
)
def test_a_header_that_lies_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    _rewrite_header(source / "model.safetensors", change)

    assert message in _refused(source)


def test_a_note_of_another_scheme_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    note = {"samebits_scheme": "dbrx"}
    _rewrite_header(source / "model.safetensors", lambda h: h.update(__metadata__=note))

    with pytest.raises(ValueError, match="must hold names of scheme dbrx"):
        convert(source, tmp_path / "b", "stacked")


def test_a_header_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    text = b"[" * 50_000
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)

    assert "its header is no JSON" in _refused(source)


@pytest.mark.parametrize("sizes", [Sizes(2, 0, 12), Sizes(2, 20, 0)])
def test_matrices_without_elements_are_named(tmp_path: Path, sizes: Sizes) -> None:
    assert "have no dimension of 0" in _refused(write(tmp_path / "a", hf_tensors(sizes), files=1))


def test_scales_without_elements_are_named(tmp_path: Path) -> None:
    tensors = hf_tensors(SIZES, layers=1)
    scales = {f"{n}_scale_inv": torch.ones(0, 0) for n in tensors if "experts" in n}

    assert "have no dimension of 0" in _refused(write(tmp_path / "a", tensors | scales, files=1))


def _without_last_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if ".2." not in name.partition("experts")[2]}


def test_an_expert_that_is_missing_as_a_whole_is_found(tmp_path: Path) -> None:
    source = write(tmp_path / "a", _without_last_expert(hf_tensors(SIZES)), files=1)

    assert "must hold 3 experts, got 2" in _refused(source, num_experts=3)
    (source / "config.json").write_text(json.dumps(CONFIG))
    assert "must hold 3 experts, got 2" in _refused(source)

    assert convert(source, tmp_path / "b", "stacked", num_experts=2).layers == 2


def test_a_number_of_experts_that_is_not_that_of_the_file_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    convert(source, tmp_path / "b", "stacked")

    assert "must hold 4 experts, got 3" in _refused(tmp_path / "b", "hf", num_experts=4)


def test_flattened_experts_are_counted_by_the_configuration(tmp_path: Path) -> None:
    tensors = hf_tensors(SIZES)
    convert(write(tmp_path / "a", tensors), tmp_path / "b", "dbrx")
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps(CONFIG | {"num_experts": 0}))
    with pytest.raises(UnsupportedError, match="does not say how many"):
        convert(tmp_path / "b", tmp_path / "c", "hf")
    config.write_text(json.dumps(CONFIG))

    convert(tmp_path / "b", tmp_path / "c", "hf")

    assert torch.equal(stacked(read(tmp_path / "c"), 1, "up"), stacked(tensors, 1, "up"))


def test_a_flattened_matrix_of_broken_experts_is_named(tmp_path: Path) -> None:
    parts = {"w1": (6, 4), "v1": (6, 4), "w2": (7, 4)}
    (tmp_path / "a").mkdir()
    held = {f"experts.mlp.{name}": torch.zeros(shape) for name, shape in parts.items()}
    save_file(held, tmp_path / "a" / "model.safetensors")

    message = _refused(tmp_path / "a", "hf", num_experts=2)

    assert "mlp.w2 must have a multiple of 2 rows" in message


def test_an_index_that_is_left_beside_one_file_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors.index.json").write_text('{"weight_map": {}}')

    with pytest.raises(ValueError, match=r"hold only files of this conversion.*index\.json"):
        convert(source, tmp_path / "b", "stacked")


def test_a_rank_that_lost_its_files_is_named(tmp_path: Path) -> None:
    convert(write(tmp_path / "a", hf_tensors(SIZES)), tmp_path / "b", "hf", expert_parallel=3)
    for path in (tmp_path / "b" / "rank-tp0of1-ep1of3").iterdir():
        path.unlink()

    assert "rank-tp0of1-ep1of3 must hold model.layers.0.mlp.experts" in _refused(tmp_path / "b")
