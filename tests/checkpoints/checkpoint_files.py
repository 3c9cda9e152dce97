"""Small checkpoints, written by the safetensors library, and what they hold."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class Sizes(NamedTuple):
    experts: int
    hidden: int
    columns: int


# No two numbers equal, and every matrix square.
SIZES = Sizes(3, 20, 12)
SQUARE = Sizes(3, 16, 16)
ROOT = "model.layers.{}.mlp.experts"
ODD = 0x7FA5


def hf_tensors(sizes: Sizes, *, layers: int = 2, bias: bool = False) -> dict[str, Tensor]:
    """Tensors of a model with an expert's matrices apart; one element is a NaN with a payload."""
    experts, hidden, columns = sizes
    tensors = {"model.embed_tokens.weight": torch.randn(7, hidden).bfloat16()}
    for layer in range(layers):
        root = ROOT.format(layer)
        tensors[f"{root.removesuffix('experts')}gate.weight"] = torch.randn(experts, hidden)
        for expert in range(experts):
            shapes = {"gate": (columns, hidden), "up": (columns, hidden), "down": (hidden, columns)}
            for part, shape in shapes.items():
                name = f"{root}.{expert}.{part}_proj"
                tensors[f"{name}.weight"] = torch.randn(shape).mul(0.2).bfloat16()
                if bias:
                    tensors[f"{name}.bias"] = torch.randn(shape[0]).bfloat16()
    return tensors


def with_an_odd_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = f"{ROOT.format(0)}.1.up_proj.weight"
    odd = tensors[name].view(torch.int16).clone()
    odd[0, 0] = ODD
    return tensors | {name: odd.view(torch.bfloat16)}


def write(folder: Path, tensors: dict[str, Tensor], files: int = 2) -> Path:
    folder.mkdir(parents=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for index in range(files):
        file_name = f"model-{index + 1:05}-of-{files:05}.safetensors"
        held = {name: tensors[name].contiguous() for name in names[index::files]}
        save_file(held, folder / file_name)
        weight_map |= dict.fromkeys(held, file_name)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def stacked(tensors: dict[str, Tensor], layer: int, part: str, kind: str = "weight") -> Tensor:
    """One part of every expert, ``(E, …)``, of what ``hf_tensors`` returned."""
    root = ROOT.format(layer)
    names = [n for n in tensors if n.startswith(f"{root}.") and n.endswith(f"{part}_proj.{kind}")]
    return torch.stack([tensors[name] for name in sorted(names)])
