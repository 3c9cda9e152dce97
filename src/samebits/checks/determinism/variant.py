"""What is replayed: variants of kernels, and the registry file that lists them."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from samebits.checks.result import FOREIGN_ERRORS
from samebits.errors import must

# Makes the inputs of a call on a device once, and returns the call.
Prepare = Callable[[torch.device], Callable[[], Any]]
# same: every replay must have the same bytes. different: a planted fault, which the replays must
# see. either: recorded and judged by no one.
Expected = Literal["same", "different", "either"]


class RegistryError(ValueError):
    """A registry, its evidence or its debts cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One call and the kernels that it launches, for one tile configuration, dtype and options."""

    # Unique in its registry.
    name: str
    # "folder/file.py:function" from the registry's root, every kernel that the call launches.
    kernels: Sequence[str]
    # What decides the launches besides the code, by name: JSON. Where a name is also a keyword of a
    # launch of the first kernel (whatever the case), the launch must have this value. Under the
    # name of a kernel: the same for that kernel, or a list of them, one for each of its launches.
    config: Mapping[str, Any]
    # Imports what it needs when it is called: the registry itself must load without Triton.
    prepare: Prepare = field(compare=False)
    expected: Expected = "same"
    # Kinds of replay that must see a planted fault; only for ``expected="different"``.
    seen_by: Sequence[str] = ()
    # False where the call cannot be captured in a CUDA graph.
    graph: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Kernels of one folder, their variants, and where evidence and debts lie."""

    # The registry file.
    file: Path
    # Every ``@triton.jit`` function below it must be in a variant.
    root: Path
    variants: tuple[Variant, ...]
    # A folder of JSON files.
    evidence: Path
    # JSON: kernel -> why it has no evidence yet.
    debts: Path


def load(file: Path, faults: Iterable[Variant] = ()) -> Registry:
    """Return the registry that a Python file describes, the planted faults added to it.

    The file has a function ``variants()``, and may name, relative to itself, ``ROOT`` (default: its
    folder), ``EVIDENCE`` (default: evidence) and ``DEBTS`` (default: debts.json in EVIDENCE).

    Args:
        file: The registry.
        faults: Variants that every registry has: ``samebits.checks.determinism.planted``.

    Raises:
        RegistryError: The file does not load, or does not describe variants.
    """
    module = _module(file)
    if not callable(getattr(module, "variants", None)):
        raise RegistryError(must(str(file), "have a function variants()", "none"))
    try:
        variants = tuple(module.variants())
    except FOREIGN_ERRORS as error:
        raise RegistryError(f"variants() of {file}: {type(error).__name__}: {error}") from error
    _check(file, variants)
    variants += tuple(faults)
    folder = file.resolve().parent
    root = folder / getattr(module, "ROOT", ".")
    if not root.is_dir():
        raise RegistryError(must(f"ROOT of {file}", "be a folder", root))
    evidence = folder / getattr(module, "EVIDENCE", "evidence")
    debts = folder / module.DEBTS if hasattr(module, "DEBTS") else evidence / "debts.json"
    return Registry(
        file=file.resolve(),
        root=root.resolve(),
        variants=variants,
        evidence=evidence.resolve(),
        debts=debts.resolve(),
    )


def _module(file: Path) -> Any:
    if not file.is_file():
        raise RegistryError(must("--registry", "be a Python file", file))
    name = f"samebits_registry_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RegistryError(must("--registry", "be a Python file", file))
    module = importlib.util.module_from_spec(spec)
    # Its neighbours can be imported by name, as from a script; ours are a package.
    folder = str(file.resolve().parent)
    if folder not in (*sys.path, str(Path(__file__).parent)):
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except FOREIGN_ERRORS as error:
        raise RegistryError(f"{file} does not load: {type(error).__name__}: {error}") from error
    return module


def _check(file: Path, variants: Iterable[Any]) -> None:
    names: set[str] = set()
    for variant in variants:
        if not isinstance(variant, Variant):
            raise RegistryError(
                must(f"variants() of {file}", "yield Variants", type(variant).__name__)
            )
        if variant.name in names:
            raise RegistryError(must("names of variants", "be unique", repr(variant.name)))
        names.add(variant.name)
        if isinstance(variant.kernels, str) or not variant.kernels:
            rule = "list the kernels that its call launches"
            raise RegistryError(must(f"variant {variant.name!r}", rule, repr(variant.kernels)))
        if (variant.expected == "different") != bool(variant.seen_by):
            rule = "name in seen_by what must see it, if it is a planted fault, and only then"
            raise RegistryError(must(f"variant {variant.name!r}", rule, repr(variant.seen_by)))
    if not names:
        raise RegistryError(must(f"variants() of {file}", "yield at least one", 0))
