"""What `samebits explain --model` reads from a folder with a config.json."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from transformers import AutoConfig, GptOssConfig, MixtralConfig

from samebits import Activation, Layout, Problem, UnsupportedError, cli
from samebits.integrations.transformers.configuration import problems_of_config

pytestmark = pytest.mark.reference

GPT_OSS = Problem(
    H=64,
    F=48,
    E=6,
    K=3,
    dtype="bf16",
    activation=Activation(alpha=1.702, limit=7.0, linear_offset=1.0),
    layout=Layout(interleave=1),
    gate_up_bias="bf16",
    down_bias="bf16",
)


def _gpt_oss(**options: object) -> GptOssConfig:
    return GptOssConfig(
        hidden_size=64,
        intermediate_size=48,
        num_local_experts=6,
        num_experts_per_tok=3,
        num_hidden_layers=2,
        vocab_size=32,
        dtype="bfloat16",
        **options,
    )


def test_layers_with_one_problem_are_one() -> None:
    assert problems_of_config(_gpt_oss()) == {"layers.0.mlp.experts": GPT_OSS}


def test_options_of_another_model() -> None:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=1, vocab_size=32, dtype="float32"
    )

    (problem,) = problems_of_config(config).values()

    assert problem == Problem(H=32, F=56, E=8, K=2, dtype="fp32")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_official_sizes_need_no_memory(model_type: str) -> None:
    (problem,) = problems_of_config(AutoConfig.for_model(model_type)).values()

    assert problem.K <= problem.E


def test_a_model_without_experts_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)

    assert cli.main(["explain", "--model", str(tmp_path)]) == 2
    assert "model must hold an experts module, got LlamaModel" in capsys.readouterr().err


def test_a_model_that_is_refused_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model("llama4_text", num_hidden_layers=1).save_pretrained(tmp_path)

    assert cli.main(["explain", "--model", str(tmp_path)]) == 3

    out, err = capsys.readouterr()
    assert out == ""
    assert "the experts interface does not reach" in err.replace("transformers' ", "the ")
    assert "hint: docs/refused.md" in err


def test_the_command_explains_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _gpt_oss().save_pretrained(tmp_path)
    command = ["explain", "--model", str(tmp_path), "--device", "cpu"]

    assert cli.main([*command, "--grad"]) == 0
    with_gradients = capsys.readouterr().out
    assert cli.main(command) == 0

    assert f"layers.0.mlp.experts, on cpu: {GPT_OSS}\n" in capsys.readouterr().out
    assert f"layers.0.mlp.experts, on cpu: {GPT_OSS} grad=True\n" in with_gradients
    assert 'backend="auto" takes grouped' in with_gradients


def test_a_configuration_that_transformers_cannot_build_is_refused() -> None:
    config = AutoConfig.for_model("hunyuan_v1_moe", head_dim=None, num_hidden_layers=1)

    with pytest.raises(UnsupportedError, match="transformers cannot build the model"):
        problems_of_config(config)


@pytest.mark.parametrize(
    ("stored", "key"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "mxfp4", "dequantize": True}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_16x128/fp8_128x128"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "fp8_16x16"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "mxfp4"),
    ],
)
def test_a_stored_format_is_part_of_the_problem(stored: dict[str, Any], key: str | None) -> None:
    problems = problems_of_config(_gpt_oss(quantization_config=stored))

    formats = {None if p.format is None else p.format.key for p in problems.values()}
    assert formats == {key}


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "gptq"},
        {"quant_method": "fp8"},
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "static",
        },
    ],
)
def test_another_stored_format_is_refused_with_the_way_out(stored: dict[str, Any]) -> None:
    config = _gpt_oss(quantization_config=stored)

    with pytest.raises(UnsupportedError, match=f"stored as {stored['quant_method']}") as refusal:
        problems_of_config(config)

    assert f'samebits explain --problem "{GPT_OSS}"' in str(refusal.value)


def test_a_broken_config_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')

    assert cli.main(["explain", "--model", str(tmp_path)]) == 2
    assert "no_such_model" in capsys.readouterr().err
