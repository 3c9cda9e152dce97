"""Megatron-core's own fused activations as targets: forward, explicit backward, autograd.

Needs the package ``megatron`` (a wheel of megatron-core unpacks as plain Python). A function that
a version does not have is counted as not run: 0.19 has no clamped SwiGLU, 0.20 has.
"""

from importlib import import_module
from typing import Any

import torch
from stale_table import MENDED_CLAMP, Program

FORWARD = (None, MENDED_CLAMP)
BACKWARD = (MENDED_CLAMP, None)
# Compiled halves inside an autograd.Function: a plain loop of four values is right on 2.13, too.
NEVER = (None, None)


def _rows(*widths: int) -> list[torch.Tensor]:
    return [torch.randn(4, width) if width else torch.randn(8) for width in widths]


def y_clamp():
    return (*_rows(8), 0.5), {}


def y_bias_clamp():
    return (*_rows(8, 0), 0.5), {}


def y_weights_clamp():
    return (*_rows(8, 1), 0.5), {}


def g_y_clamp():
    return (*_rows(4, 8), 0.5), {}


def g_y_bias_clamp():
    return (*_rows(4, 8, 0), 0.5), {}


def g_y_weights_clamp():
    return (*_rows(4, 8, 1), 0.5), {}


def g_y_bias_weights_offset():
    return (*_rows(4, 8, 0, 1), 0.5), {}


def y_bias_weights_offset():
    return (*_rows(8, 0, 1), 0.5), {}


def module_bias():
    return tuple(_rows(8, 0)), {"clamp_value": 0.5}


def module_no_bias():
    return (*_rows(8), None), {"clamp_value": 0.5}


def module_weighted():
    y, weights = _rows(8, 1)
    return (y, None, weights), {"clamp_value": 0.5}


def module_weighted_bias():
    return tuple(_rows(8, 0, 1)), {"linear_offset": 0.5, "clamp_value": 0.5}


PROGRAMS = (
    Program("swiglu:clamped_swiglu", FORWARD, inputs=y_clamp),
    Program("swiglu:bias_clamped_swiglu", FORWARD, inputs=y_bias_clamp),
    Program("swiglu:clamped_weighted_swiglu", FORWARD, inputs=y_weights_clamp),
    Program("swiglu:clamped_swiglu_back", BACKWARD, inputs=g_y_clamp),
    Program("swiglu:bias_clamped_swiglu_back", BACKWARD, inputs=g_y_bias_clamp),
    Program("swiglu:clamped_weighted_swiglu_back", BACKWARD, inputs=g_y_weights_clamp),
    Program("swiglu:bias_swiglu_impl", NEVER, inputs=module_bias, only=("clamp_value",)),
    Program("swiglu:bias_swiglu_impl no bias", NEVER, inputs=module_no_bias, only=("clamp_value",)),
    Program(
        "swiglu:weighted_bias_swiglu_impl", NEVER, inputs=module_weighted, only=("clamp_value",)
    ),
    Program("geglu:quick_geglu", inputs=y_clamp),
    Program("geglu:weighted_quick_geglu", inputs=y_weights_clamp),
    Program("geglu:weighted_bias_quick_geglu", inputs=y_bias_weights_offset),
    Program("geglu:quick_geglu_back", inputs=g_y_clamp),
    Program("geglu:weighted_quick_geglu_back", inputs=g_y_weights_clamp),
    Program("geglu:weighted_bias_quick_geglu_back", inputs=g_y_bias_weights_offset),
    Program(
        "geglu:weighted_bias_quick_geglu_impl",
        inputs=module_weighted_bias,
        only=("linear_offset", "clamp_value"),
    ),
)


def version() -> str:
    """Return the version of the megatron-core that is imported."""
    info: Any = import_module("megatron.core.package_info")
    return str(info.__version__)
