"""The routing of a rollout, in few bytes, and its file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samebits.arguments import require_int
from samebits.checkpoints.files import bytes_of
from samebits.errors import must
from samebits.routing import Routing

_KEY = "samebits_routing"
# Elements that a digest copies at once.
_PART = 2**20


class RecordError(RuntimeError):
    """A record is damaged, or is not of the run that replays it."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """The routing of T tokens in one layer, in few bytes.

    Raises:
        ValueError: Shapes disagree.
        TypeError: A dtype is not what it must be.
    """

    # (T, K), the smallest of uint8, int16 and int32 that holds N; a dropped slot is N.
    topk_ids: Tensor
    # (T, K), fp32.
    topk_probs: Tensor
    # N.
    num_experts: int

    def __post_init__(self) -> None:
        require_int("num_experts", self.num_experts, minimum=1)
        dtype = compact_dtype(self.num_experts)
        if self.topk_ids.dtype != dtype:
            raise TypeError(must("topk_ids", f"be {dtype}", self.topk_ids.dtype))
        if self.topk_probs.dtype != torch.float32:
            raise TypeError(must("topk_probs", "be float32", self.topk_probs.dtype))
        if self.topk_ids.dim() != 2 or self.topk_ids.shape != self.topk_probs.shape:
            shapes = f"{tuple(self.topk_ids.shape)} and {tuple(self.topk_probs.shape)}"
            raise ValueError(must("topk_ids and topk_probs", "have one shape (T, K)", shapes))

    def routing(self, device: torch.device | str = "cpu") -> Routing:
        """Return the routing, with ids as int64, on ``device``.

        Determinism: exact.
        """
        ids = self.topk_ids.to(device=device, dtype=torch.int64)
        return Routing(ids, self.topk_probs.to(device), self.num_experts)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRecord:
    """The routing of the same T tokens in every layer, by the name of the layer's router.

    Raises:
        ValueError: There is no layer, or the layers' T differ.
    """

    layers: Mapping[str, LayerRecord]

    def __post_init__(self) -> None:
        counts = {name: layer.topk_ids.shape[0] for name, layer in self.layers.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(must("layers", "hold one number of tokens", counts))

    @property
    def tokens(self) -> int:
        """T."""
        return next(iter(self.layers.values())).topk_ids.shape[0]

    def select(self, rows: Tensor | slice) -> "RoutingRecord":
        """Return the record of some tokens, in the order of ``rows``.

        Determinism: exact.
        """
        return RoutingRecord(
            {
                name: LayerRecord(layer.topk_ids[rows], layer.topk_probs[rows], layer.num_experts)
                for name, layer in self.layers.items()
            }
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: ids and probabilities of each layer, and their digests.

        Raises:
            ImportError: safetensors is absent.
            OSError: The file cannot be written.

        Determinism: exact; the same bytes each time.
        """
        from safetensors.torch import save_file

        path = Path(path)
        tensors, said = {}, {}
        for name, layer in self.layers.items():
            tensors[f"{name}.topk_ids"] = layer.topk_ids.cpu().contiguous()
            tensors[f"{name}.topk_probs"] = layer.topk_probs.cpu().contiguous()
            said[name] = {"num_experts": layer.num_experts, "sha256": _digest(layer)}
        partial_path = path.with_name(path.name + ".partial")
        save_file(tensors, partial_path, {_KEY: json.dumps(said)})
        partial_path.replace(path)

    @staticmethod
    def load(path: str | Path, *, verify: bool = True) -> "RoutingRecord":
        """Return the record in a file, its tensors mapped from it.

        Args:
            path: What ``save`` wrote.
            verify: Compare every layer with its digest, which reads all of it once.

        Raises:
            RecordError: The file is damaged or no record, or a digest is not its tensors'.
            ImportError: safetensors is absent.
            OSError: The file cannot be read.

        Determinism: exact.
        """
        from safetensors import SafetensorError, safe_open

        layers = {}
        try:
            with safe_open(path, "pt") as file:
                said = (file.metadata() or {}).get(_KEY)
                if said is None:
                    raise RecordError(f"{path} is no record of routings")
                for name, about in dict(json.loads(said)).items():
                    layers[name] = LayerRecord(
                        file.get_tensor(f"{name}.topk_ids"),
                        file.get_tensor(f"{name}.topk_probs"),
                        about["num_experts"],
                    )
                    if verify and _digest(layers[name]) != about["sha256"]:
                        raise RecordError(f"{path}: layer {name} is not what was recorded")
                return RoutingRecord(layers)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path} is damaged: {error}") from error


def compact_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype that holds 0 … N.

    Determinism: a function of its argument.
    """
    for dtype in (torch.uint8, torch.int16):
        if num_experts <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def _digest(layer: LayerRecord) -> str:
    digest = hashlib.sha256(f"{tuple(layer.topk_ids.shape)} {layer.num_experts}".encode())
    ids = layer.topk_ids.cpu()
    if ids.numel() and not bool(((ids >= 0) & (ids <= layer.num_experts)).all()):
        raise ValueError(must("topk_ids", f"be in [0, {layer.num_experts}]", "another id"))
    for tensor in (ids, layer.topk_probs.cpu().view(torch.int32)):
        for part in tensor.reshape(-1).split(_PART):
            digest.update(bytes_of(part))
    return digest.hexdigest()
