"""Pack the dense experts of an attached model into a format: MXFP4 of gpt-oss without a kernel hub.

transformers keeps gpt-oss' weights packed only in the order of a kernel library that it downloads.
Loaded dequantised they are as exact, at four times the memory; here they are packed again, bit for
bit, and run by ``samebits.experts`` as they are stored.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samebits.arguments import require_bool, require_type
from samebits.errors import UnsupportedError
from samebits.formats import QuantizedWeights, WeightFormat, dequantize, quantize
from samebits.integrations.transformers import fp8
from samebits.integrations.transformers.interface import is_decorated, load
from samebits.integrations.transformers.plugin import attach
from samebits.integrations.transformers.translation import (
    ATTRIBUTE,
    PACKED,
    Translation,
    weights_of,
)
from samebits.nn.quantized import QuantizedExperts


def pack_experts(
    model: nn.Module, weight_format: WeightFormat, *, exact: bool = True
) -> tuple[str, ...]:
    """Attach ``model`` and pack the matrices of its experts, in place; biases stay as they are.

    Where one module cannot be packed nothing is changed but what ``attach`` changes. The dense
    parameters are gone afterwards (None under their names), and the packed ones have no gradient;
    modules that are packed already are left. ``save_pretrained`` saves bytes that only this library
    reads: save before.

    Args:
        model: A transformers model with dense experts, or a module that holds some.
        weight_format: For gpt-oss' checkpoints ``samebits.formats.MXFP4``.
        exact: True refuses weights that are not those of the format already, to the last bit.

    Returns:
        The paths of the packed modules.

    Raises:
        TypeError: An argument has the wrong type.
        UnsupportedError: See ``attach``; or a weight would change, or a parameter is a DTensor.
        ValueError: See ``attach``.

    Determinism: exact.
    """
    require_type("model", model, nn.Module)
    require_type("weight_format", weight_format, WeightFormat)
    require_bool("exact", exact)
    attach(model)
    interface = load()
    found: dict[str, Any] = {
        path: module
        for path, module in model.named_modules()
        if is_decorated(module, interface) and getattr(module, PACKED, None) is None
    }
    packed = {path: _packed(path, m, weight_format, exact=exact) for path, m in found.items()}
    for path, module in found.items():
        first = "gate_up_proj" if module.has_gate else "up_proj"
        module.add_module(PACKED, QuantizedExperts(packed[path]))
        for name in (first, "down_proj"):
            module._parameters[name] = None
    return tuple(found)


@torch.no_grad()
def _packed(
    path: str, module: Any, weight_format: WeightFormat, *, exact: bool
) -> QuantizedWeights:
    translation: Translation = getattr(module, ATTRIBUTE)
    if fp8.is_quantized(module):
        raise UnsupportedError(f"{path or 'the module'} holds quantised weights already")
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{name} of {path or 'the module'} is a DTensor: packed tensors are not spread"
            )
    held = weights_of(module, translation)
    bare = replace(held, gate_up_bias=None, down_bias=None, norm=None, norm_scale=None)
    packed = quantize(bare, weight_format)
    if exact:
        again = dequantize(packed)
        for name in ("gate_up", "down"):
            changed = getattr(again, name) != getattr(held, name)
            if bool(changed.any()):
                raise UnsupportedError(
                    f"{name} of {path or 'the module'}: {int(changed.sum())} of {changed.numel()} "
                    f"weights are no numbers of {weight_format}\nhint: exact=False rounds them"
                )
    return packed
