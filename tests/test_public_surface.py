"""The public names, and what importing them loads."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import samebits

pytestmark = pytest.mark.reference

# A name here is a promise: removing or renaming one is a line in CHANGELOG.md.
PUBLIC = [
    "Activation",
    "ExpertWeights",
    "Layout",
    "Permutation",
    "PostExpertNorm",
    "ProbPlacement",
    "Problem",
    "QuantizedWeights",
    "Routing",
    "RoutingRule",
    "UnsupportedError",
    "WeightFormat",
    "WeightGradients",
    "dequantize",
    "experts",
    "explain",
    "from_hf_config",
    "from_megatron_args",
    "grouped_experts",
    "quantize",
    "warmup",
]
# Loaded only by what uses them.
OPTIONAL = ["triton", "transformers", "rich", "matplotlib", "safetensors", "hypothesis", "pytest"]
# Written in Triton: imported when an operator runs.
TRITON_FILES = {"kernel.py", "tiles.py"}
SOURCE = Path(samebits.__file__).parent


def _modules() -> list[str]:
    """Every module that needs torch alone."""
    names = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if path.name in TRITON_FILES | {"__main__.py"} or "_triton" in parts:
            continue
        if parts[1] == "integrations" and path.name != "__init__.py":
            continue
        names.append(".".join(part for part in parts if part != "__init__"))
    return names


def _run(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names() -> None:
    found = [
        name
        for name, value in vars(samebits).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]

    assert sorted(found) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(samebits, name).__doc__


def test_importing_the_library_loads_no_framework() -> None:
    # What torch itself loads is torch's business.
    program = (
        "import sys, torch; before = set(sys.modules); import samebits, samebits.nn;"
        f"print(sorted(set({OPTIONAL}) & (set(sys.modules) - before)))"
    )

    assert _run(program) == "[]"


def test_every_module_is_importable_with_torch_alone() -> None:
    program = (
        "import sys, torch; from importlib import import_module\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
        f"for name in {_modules()}: import_module(name)"
    )

    assert _run(program) == ""


def test_importing_every_module_changes_nothing_of_torch() -> None:
    state = (
        "[torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),"
        " torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(),"
        # torch's own compiler names its cache folder in the environment once it is loaded.
        " torch.initial_seed(), {k: v for k, v in os.environ.items()"
        " if k != 'TORCHINDUCTOR_CACHE_DIR'}]"
    )
    program = (
        "import os, torch; from importlib import import_module; torch.manual_seed(0)\n"
        f"before = {state}\n"
        f"for name in {_modules()}: import_module(name)\n"
        f"print({state} == before)"
    )

    assert _run(program) == "True"
