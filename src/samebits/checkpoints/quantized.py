"""Quantised parameters in a safetensors file of ours, and back: every bit, every option."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.arguments import Reader, read_options, require_name, require_type
from samebits.checkpoints.files import BadFileError, Entry, Shape, Writer, bytes_of, entries_of
from samebits.errors import must
from samebits.formats.descriptor import FormatPair
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.problem import DTYPE_NAMES, DTYPES
from samebits.weights import Layout, PostExpertNorm

# Key of the metadata that marks a file of ours, and the version of what follows.
_MARK, _VERSION = "samebits.quantized", "1"
_NAMES = (
    *(f"{n}.{part}" for n in ("gate_up", "down") for part in ("values", "scales", "global_scale")),
    *("gate_up_bias", "down_bias", "norm_scale"),
)
_STORED: Mapping[torch.dtype, str] = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPE_OF = {name: dtype for dtype, name in _STORED.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def save_quantized(layers: Mapping[str, QuantizedWeights], path: str | Path) -> None:
    """Write the parameters of layers into one file, which gets its name when it is whole.

    Args:
        layers: Name of a layer → its parameters; tensors are called ``<layer>.gate_up.values`` and
            so on. Formats, dtype, layout and norm are in the file's metadata.
        path: Where to write.

    Raises:
        TypeError: ``layers`` is no mapping of names to ``QuantizedWeights``.
        ValueError: A layer has the name that marks a file.
        OSError: The file cannot be written.

    Determinism: exact.
    """
    tensors: dict[str, Tensor] = {}
    metadata = {_MARK: _VERSION}
    require_type("layers", layers, Mapping)
    for layer, weights in layers.items():
        require_type("the name of a layer", layer, str)
        require_type(f"layers[{layer!r}]", weights, QuantizedWeights)
        if layer == _MARK:
            raise ValueError(must("the name of a layer", f"not be {_MARK}", repr(layer)))
        metadata[layer] = _spell(weights)
        tensors |= {f"{layer}.{name}": tensor for name, tensor in weights.named_tensors().items()}
    shapes = [Shape(name, _STORED[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    with Writer(Path(path), shapes, metadata) as writer:
        for tensor in tensors.values():
            elements = tensor.detach().cpu().contiguous()
            writer.write(bytes_of(elements.view(_INTEGERS[tensor.element_size()])))


def load_quantized(path: str | Path) -> dict[str, QuantizedWeights]:
    """Return what ``save_quantized`` wrote, by the names of the layers, on the CPU.

    Raises:
        BadFileError: The file is damaged, or is none of ours.
        OSError: It cannot be read.

    Determinism: exact.
    """
    entries, metadata = entries_of(Path(path))
    if metadata.get(_MARK) != _VERSION:
        rule = f"say {_MARK} = {_VERSION} in its metadata"
        raise BadFileError(must(str(path), rule, metadata.get(_MARK)))
    layers = {name: text for name, text in metadata.items() if name != _MARK}
    known = {f"{layer}.{name}" for layer in layers for name in _NAMES}
    if strangers := sorted(set(entries) - known):
        raise BadFileError(must(str(path), "hold tensors of its layers only", strangers[0]))
    try:
        return {layer: _read(entries, layer, text) for layer, text in layers.items()}
    except (TypeError, ValueError) as error:
        raise BadFileError(f"{path}: {error}") from error


def _spell(weights: QuantizedWeights) -> str:
    """Return everything about a layer that is no tensor."""
    words = [
        f"format={weights.format}",
        f"dtype={DTYPE_NAMES[weights.dtype]}",
        f"layout={weights.layout}",
        f"H={weights.gate_up.columns}",
        f"F={weights.down.columns}",
    ]
    if weights.norm is not None:
        words.append(f"norm_eps={weights.norm.key}")
    return " ".join(words)


def _dtype(name: str) -> torch.dtype:
    require_name("dtype", name, DTYPES)
    return DTYPES[name]


_READERS: dict[str, Reader] = {
    "format": FormatPair.parse,
    "dtype": _dtype,
    "layout": Layout.parse,
    "H": int,
    "F": int,
    "norm_eps": float,
}


def _read(entries: Mapping[str, Entry], layer: str, text: str) -> QuantizedWeights:
    said = read_options(f"word of {layer}", text.split(), _READERS)
    tensors = {
        name: _tensor(entry)
        for name in _NAMES
        if (entry := entries.get(f"{layer}.{name}")) is not None
    }
    needed = {f"{name}.{part}" for name in ("gate_up", "down") for part in ("values", "scales")}
    missing = ({"format", "dtype", "layout", "H", "F"} - set(said)) | (needed - set(tensors))
    if missing:
        raise ValueError(must(layer, f"state {', '.join(sorted(missing))}", repr(text)))
    parts: dict[str, Any] = {
        name: QuantizedMatrix(
            format=getattr(said["format"], name),
            columns=said[columns],
            values=tensors.pop(f"{name}.values"),
            scales=tensors.pop(f"{name}.scales"),
            global_scale=tensors.pop(f"{name}.global_scale", None),
        )
        for name, columns in (("gate_up", "H"), ("down", "F"))
    }
    parts |= tensors
    if "norm_eps" in said:
        parts["norm"] = PostExpertNorm(eps=said["norm_eps"])
    return QuantizedWeights(dtype=said["dtype"], layout=said["layout"], **parts)


def _tensor(entry: Entry) -> Tensor:
    require_name("dtype", entry.dtype, _DTYPE_OF)
    return entry.read().view(_DTYPE_OF[entry.dtype])
