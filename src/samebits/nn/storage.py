"""A ``state_dict`` says how its tensors are stored: read in another way they would be nonsense."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from samebits.errors import must


class Stored(Protocol):
    """A module that says how it is stored."""

    @property
    def storage(self) -> str:
        """Spelling; equal where the tensors mean the same."""


def guard_storage(module: nn.Module, parameter: str, hint: str = "") -> None:
    """Have ``module.state_dict()`` say the storage, and ``load_state_dict`` refuse another.

    Args:
        module: A ``Stored``.
        parameter: The tensor that errors name.
        hint: What errors end with.
    """
    module.register_state_dict_post_hook(_save)
    check = partial(_check, parameter, hint)
    module.register_load_state_dict_pre_hook(check)


def _save(
    module: Stored, _state_dict: dict[str, Any], _prefix: str, local_metadata: dict[str, Any]
) -> None:
    local_metadata["samebits_storage"] = module.storage


def _check(
    parameter: str,
    hint: str,
    module: Stored,
    _state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    _strict: bool,
    _missing_keys: Sequence[str],
    _unexpected_keys: Sequence[str],
    error_msgs: list[str],
) -> None:
    saved, own = local_metadata.get("samebits_storage", module.storage), module.storage
    if saved != own:
        error_msgs.append(must(f"{prefix}{parameter}", f"be stored as {own}", f"{saved}{hint}"))
