"""Damaged files, killed runs and wrong arguments: a clear error, and nothing that looks whole."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="needs safetensors")

from safetensors.torch import save_file
from torch import Tensor

import samebits
from checkpoint_files import ROOT, SIZES, Sizes, hf_tensors, read, write
from samebits import UnsupportedError, cli, env
from samebits.checkpoints import BadFileError, convert
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

SOURCE = str(Path(samebits.__file__).parent.parent)
CHILD = env.for_child(PYTHONPATH=SOURCE)
FIRST = f"{ROOT.format(0)}.0"


def _convert_fails(tmp_path: Path, tensors: dict[str, Tensor], to: str = "stacked") -> str:
    source = write(tmp_path / "a", {name: t.contiguous() for name, t in tensors.items()})
    with pytest.raises((BadFileError, UnsupportedError, ValueError)) as caught:
        convert(source, tmp_path / "b", to)
    assert not (tmp_path / "b").exists()
    return str(caught.value)


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without(f"{FIRST}.up_proj.weight"), "0.up_proj.weight is missing"),
        (_without(f"{ROOT.format(0)}.1.down_proj.weight"), "1.down_proj.weight is missing"),
        (_put(f"{FIRST}.up_proj.weight", torch.zeros(11, 20)), "up_proj.weight must be BF16"),
        (_put(f"{FIRST}.up_proj.bias", torch.zeros(12)), "0.gate_proj.bias is missing"),
        (_put(f"{ROOT.format(0)}.999999999.up_proj.weight", torch.zeros(12, 20)), "is missing"),
        (
            _put(f"{FIRST}.up_proj.qweight", torch.zeros(3)),
            "up_proj.qweight belongs to the experts",
        ),
        (_put(f"{ROOT.format(0)}.gate_up_proj", torch.zeros(3, 24, 20)), "mixes schemes: gpt-oss/"),
    ],
)
def test_a_tensor_that_is_not_right_is_named(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = hf_tensors(SIZES)
    damage(tensors)

    assert message in _convert_fails(tmp_path, tensors)


def test_a_down_of_another_orientation_is_found(tmp_path: Path) -> None:
    tensors = hf_tensors(SIZES, layers=1)
    for name in [n for n in tensors if "down" in n]:
        tensors[name] = tensors[name].T.contiguous()

    message = _convert_fails(tmp_path, tensors)

    assert "down weight" in message
    assert "must have shape (20, 12)" in message


@pytest.mark.parametrize("dtype", ["F32", "E8M0"])
def test_a_scale_that_is_nan_is_named(tmp_path: Path, dtype: str) -> None:
    tensors = hf_tensors(Sizes(2, 8, 16), layers=1)
    for name in [n for n in tensors if "experts" in n]:
        scale = torch.ones(tensors[name].shape[0] // 4, tensors[name].shape[1] // 4)
        if dtype == "E8M0":
            scale = scale.to(torch.uint8).view(torch.float8_e8m0fnu)
        tensors[f"{name}_scale_inv"] = scale
    bad = tensors[f"{ROOT.format(0)}.1.up_proj.weight_scale_inv"]
    if dtype == "E8M0":
        bad.view(torch.uint8)[2, 1] = 255
    else:
        bad[2, 1] = float("nan")

    assert "a scale of up of expert 1" in _convert_fails(tmp_path, tensors)


def test_scales_of_blocks_that_hold_both_are_refused(tmp_path: Path) -> None:
    tensors = hf_tensors(Sizes(2, 8, 12), layers=1)
    for name in [n for n in tensors if "experts" in n]:
        rows, columns = tensors[name].shape
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 8), -(-columns // 8))

    assert "a block must not hold rows of gate and of up" in _convert_fails(tmp_path, tensors)


@pytest.mark.parametrize("lost", [1, 100, 5000])
def test_a_truncated_file_is_named(tmp_path: Path, lost: int) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    path = sorted(source.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-lost])

    with pytest.raises(BadFileError, match=r"model-00002-of-00002\.safetensors.*truncated"):
        convert(source, tmp_path / "b", "stacked")

    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    (source / "model.safetensors").write_bytes(content)

    with pytest.raises(BadFileError, match=r"model\.safetensors is no safetensors file"):
        convert(source, tmp_path / "b", "stacked")


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    index = source / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"][f"{FIRST}.up_proj.weight"] = "model-00001-of-00002.safetensors"
    said["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(said))

    with pytest.raises(BadFileError, match="which it does not"):
        convert(source, tmp_path / "b", "stacked")

    sorted(source.glob("*.safetensors"))[0].unlink()
    with pytest.raises(BadFileError, match=r"model-00001-of-00002\.safetensors, which is missing"):
        convert(source, tmp_path / "b", "stacked")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors.index.json", "{", "index.json is no JSON"),
        ("model.safetensors.index.json", "[]", "index.json has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "has no weight_map"),
        ("config.json", "{", r"config\.json is no JSON"),
    ],
)
def test_a_damaged_json_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    convert(source, tmp_path / "b", "stacked")
    plain = write(tmp_path / "c", read(tmp_path / "b"), files=1)
    (plain / name).write_text(content)

    with pytest.raises(BadFileError, match=message):
        convert(plain, tmp_path / "d", "hf")
    assert not (tmp_path / "d").exists()


def test_a_folder_of_other_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"x")

    with pytest.raises(BadFileError, match="holds no safetensors file"):
        convert(tmp_path / "a", tmp_path / "b", "hf")


def test_one_name_in_two_files_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    save_file({f"{FIRST}.up_proj.weight": torch.zeros(12, 20)}, source / "more.safetensors")

    with pytest.raises(BadFileError, match="is in two files"):
        convert(source, tmp_path / "b", "stacked")


def test_a_lost_rank_and_ranks_that_disagree_are_found(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES, bias=True))
    convert(source, tmp_path / "b", "stacked", tensor_parallel=2)
    second = tmp_path / "b" / "rank-tp1of2-ep0of1"
    (path,) = second.glob("*.safetensors")
    held = read(second)

    name = f"{ROOT.format(1)}.down_proj_bias"
    save_file(held | {name: held[name] + 1}, path)
    with pytest.raises(BadFileError, match="the ranks disagree on the down bias"):
        convert(tmp_path / "b", tmp_path / "c", "hf", source_scheme="stacked")
    assert not (tmp_path / "c" / "model.safetensors").exists()

    path.unlink()
    second.rmdir()
    with pytest.raises(BadFileError, match="lacks rank-tp1of2-ep0of1"):
        convert(tmp_path / "b", tmp_path / "d", "hf")


STOPPED = """
import os, sys
from pathlib import Path
from samebits.checkpoints import convert, files
write, left = files.Writer.write, [int(sys.argv[3])]
def counted(self, content):
    write(self, content)
    left[0] -= 1
    if not left[0]:
        self._file.flush()
        os.kill(os.getpid(), 9)
files.Writer.write = counted
convert(Path(sys.argv[1]), Path(sys.argv[2]), "stacked", shard_bytes=3000)
"""


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    command = [sys.executable, "-c", STOPPED, str(source), str(tmp_path / "b"), "7"]

    killed = subprocess.run(command, check=False, capture_output=True, env=CHILD)

    assert killed.returncode == -signal.SIGKILL
    whole = sorted((tmp_path / "b").glob("*.safetensors"))
    assert whole
    assert len(list((tmp_path / "b").glob("*.partial"))) == 1
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()
    times = {path: path.stat().st_mtime_ns for path in whole}

    done = convert(source, tmp_path / "b", "stacked", shard_bytes=3000)
    convert(source, tmp_path / "c", "stacked", shard_bytes=3000)

    assert done.kept == len(whole)
    assert {path: path.stat().st_mtime_ns for path in whole} == times
    assert not list((tmp_path / "b").glob("*.partial"))
    for name, tensor in read(tmp_path / "c").items():
        assert_bitwise_equal(read(tmp_path / "b")[name], tensor, name)


def test_an_error_on_the_way_leaves_no_partial_file(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))

    def stop(done: int, total: int) -> None:
        for path in source.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(BadFileError, match="truncated"):
        convert(source, tmp_path / "b", "stacked", shard_bytes=3000, progress=stop)

    assert not list((tmp_path / "b").glob("*.partial"))
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()


def test_another_conversion_is_not_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))
    convert(source, tmp_path / "b", "stacked")

    with pytest.raises(ValueError, match="files of the same conversion of the same source"):
        convert(source, tmp_path / "b", "transposed")
    with pytest.raises(ValueError, match="must hold only files of this conversion"):
        convert(source, tmp_path / "b", "transposed", shard_bytes=3000)
    with pytest.raises(ValueError, match="be another folder than source"):
        convert(source, source, "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "packed"}, "unknown scheme 'packed'"),
        ({"to": "hf:interleave=2"}, "scheme hf must have no layout"),
        ({"to": "stacked:pairs"}, "layout key must look like"),
        ({"to": "stacked:interleave=5"}, "interleave must divide F = 12"),
        ({"to": "stacked", "tensor_parallel": 0}, "tensor_parallel must be >= 1"),
        ({"to": "stacked", "expert_parallel": 4}, "expert_parallel must be <= 3, the experts"),
        ({"to": "stacked", "tensor_parallel": 8}, "must have a multiple of 8 in dimension 0"),
        ({"to": "stacked", "source_scheme": "dbrx"}, "must hold names of scheme dbrx"),
        ({"to": "dbrx", "source_scheme": "mixtral"}, "must hold names of scheme mixtral"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, options: dict[str, str], message: str) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))

    with pytest.raises((ValueError, UnsupportedError), match=message):
        convert(source, tmp_path / "b", **options)  # type: ignore[arg-type]


def test_biases_that_a_scheme_cannot_hold_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES, bias=True))

    with pytest.raises(UnsupportedError, match="for which scheme dbrx has no name"):
        convert(source, tmp_path / "b", "dbrx")


def test_schemes_with_the_same_names_must_be_stated(tmp_path: Path) -> None:
    convert(write(tmp_path / "a", hf_tensors(SIZES)), tmp_path / "b", "transposed")
    plain = write(tmp_path / "c", read(tmp_path / "b"), files=1)

    with pytest.raises(UnsupportedError, match="hint: say which one it is with --from"):
        convert(plain, tmp_path / "d", "hf")
    with pytest.raises(BadFileError, match="in scheme stacked"):
        convert(plain, tmp_path / "d", "hf", source_scheme="stacked")
    assert convert(plain, tmp_path / "d", "hf", source_scheme="transposed").layers == 2


PEAK = """
import resource, sys
from pathlib import Path
from samebits.checkpoints import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_is_that_of_an_expert_not_of_a_file(tmp_path: Path) -> None:
    sizes = Sizes(16, 512, 512)
    source = write(tmp_path / "a", hf_tensors(sizes, layers=4))
    shard = max(path.stat().st_size for path in source.glob("*.safetensors"))
    expert = 3 * sizes.hidden * sizes.columns * 2
    command = [sys.executable, "-c", PEAK, str(source), str(tmp_path / "b"), "transposed"]

    done = subprocess.run(command, check=True, capture_output=True, text=True, env=CHILD)

    # 100 MB in files of 50 MB; less than one file plus one expert is what is promised.
    assert shard > 45_000_000
    assert int(done.stdout) < min(shard + expert, 20 * expert)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))

    assert cli.main(["convert", str(source), str(tmp_path / "b"), "--to", "gpt-oss"]) == 0

    out, err = capsys.readouterr()
    assert "2 layers from hf to gpt-oss: 4580 elements read, 4580 written" in out
    assert err.endswith("files\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "packed"], 2, "unknown scheme 'packed'"),
        (["--to", "stacked", "--tp", "8"], 3, "must have a multiple of 8"),
        (["--to", "stacked", "--shard-size", "5T"], 2, "'5T' is no size"),
    ],
)
def test_exit_codes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES))

    assert cli.main(["convert", str(source), str(tmp_path / "b"), *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_damaged_source_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "a", hf_tensors(SIZES), files=1)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    assert cli.main(["convert", str(source), str(tmp_path / "b"), "--to", "stacked"]) == 1
    assert "truncated" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "no"), str(tmp_path / "b"), "--to", "hf"]) == 2
