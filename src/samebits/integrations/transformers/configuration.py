"""The problems that a configuration describes, without its weights.

The model is built on the meta device and attached, so what is said here is what ``attach`` says of
the loaded model. Names of K in configurations:

==============================  ======================
transformers                    samebits
==============================  ======================
``num_experts_per_tok``         ``Problem.K``
``num_experts_per_token``       ``Problem.K``
``top_k_experts``               ``Problem.K``
``moe_topk``, ``moe_k``         ``Problem.K``
==============================  ======================
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.errors import UnsupportedError, must
from samebits.formats import MXFP4, FormatPair, WeightFormat
from samebits.integrations.transformers.interface import is_decorated, load
from samebits.integrations.transformers.plugin import attach
from samebits.integrations.transformers.translation import ATTRIBUTE, Translation, weights_of
from samebits.problem import DTYPE_NAMES, Problem

_TOPK_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)


def problems_of_folder(folder: Path) -> dict[str, Problem]:
    """Return ``problems_of_config`` of the ``config.json`` in ``folder``; downloads nothing.

    Raises:
        OSError: There is no config.json.
        ValueError: transformers does not know such a model, or it has no experts.
        ImportError, UnsupportedError: See ``problems_of_config``.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(must("the folder", "hold a config.json", folder))
    load()
    from transformers import AutoConfig

    return problems_of_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def problems_of_config(config: Any) -> dict[str, Problem]:
    """Return the different problems of a model's layers, each by the path of its first layer.

    Args:
        config: A transformers configuration.

    Raises:
        ImportError: transformers is absent or has no experts interface.
        ValueError: The model has no experts.
        UnsupportedError: Its experts cannot be translated, or its weights are stored in a format
            that is not; the message says what to do instead.

    Determinism: a function of the configuration and of transformers' code.
    """
    interface = load()
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise UnsupportedError(f"transformers cannot build the model: {error!r}") from error
    attach(model)
    problems: dict[str, Problem] = {}
    for path, module in model.named_modules():
        if is_decorated(module, interface):
            problem = _problem_of(module, config)
            if problem not in problems.values():
                problems[path] = problem
    return _in_format(config, problems)


def _problem_of(module: nn.Module, config: Any) -> Problem:
    translation: Translation = getattr(module, ATTRIBUTE)
    weights = weights_of(module, translation)
    experts, hidden, columns = weights.down.shape
    own: Any = module.config
    dtype = DTYPE_NAMES.get(getattr(own, "dtype", None) or config.dtype, "bf16")
    return Problem(
        H=hidden,
        F=columns,
        E=experts,
        K=_topk(own),
        dtype=dtype,
        activation=translation.activation,
        layout=translation.layout,
        gate_up_bias=dtype if translation.biased else None,
        down_bias=dtype if translation.biased else None,
        norm_eps=None if translation.norm is None else translation.norm.eps,
    )


def _topk(config: Any) -> int:
    for name in _TOPK_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    names = ", ".join(_TOPK_NAMES)
    raise UnsupportedError(f"{type(config).__name__} has none of {names}, so K is not known")


def _in_format(config: Any, problems: dict[str, Problem]) -> dict[str, Problem]:
    """Return the problems of the weights as the configuration says that they are stored."""
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return problems
    said = stored if isinstance(stored, dict) else stored.to_dict()
    method = getattr(said.get("quant_method"), "value", said.get("quant_method"))
    block = said.get("weight_block_size")
    if said.get("dequantize"):
        return problems
    if method == "mxfp4" or (method == "fp8" and said.get("expert_dtype") == "fp4"):
        pair = FormatPair(gate_up=MXFP4, down=MXFP4)
        return {name: replace(problem, format=pair) for name, problem in problems.items()}
    if method == "fp8" and block and said.get("activation_scheme", "dynamic") == "dynamic":
        return {
            name: replace(problem, format=_fp8_blocks(problem, *block))
            for name, problem in problems.items()
        }
    first = next(iter(problems.values()))
    raise UnsupportedError(
        f"its weights are stored as {method}, in a way that samebits does not read\n"
        f'hint: load them dequantised; then it is samebits explain --problem "{first}"'
    )


def _fp8_blocks(problem: Problem, rows: int, columns: int) -> FormatPair:
    """Return the formats of a checkpoint whose gate and up were quantised apart."""
    first = math.gcd(rows, problem.F) if problem.activation.gated else rows
    return FormatPair(
        gate_up=WeightFormat(name="fp8", block=(first, columns)),
        down=WeightFormat(name="fp8", block=(rows, columns)),
    )
