"""The environment of this process: its variables, versions and devices. The only reader of them.

Samebits has no variable of its own. ``VARIABLES`` lists those of others that decide what is
computed, or how a command shows it; ``samebits env`` prints the ones in effect.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata

import torch

from samebits._version import __version__

# Name -> what it changes.
VARIABLES: Mapping[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": "whether cuBLAS repeats its bits (torch)",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are (CUDA)",
    "HF_HUB_OFFLINE": "no downloads (huggingface_hub)",
    "MKL_NUM_THREADS": "threads of CPU matrix products (MKL)",
    "NO_COLOR": "plain output (samebits, rich)",
    "NVIDIA_TF32_OVERRIDE": "TF32 in fp32 products, whatever torch says (CUDA libraries)",
    "OMP_NUM_THREADS": "threads of CPU operators (torch)",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing (torch)",
    "TORCHINDUCTOR_CACHE_DIR": "where compiled graphs are kept between processes (torch)",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "no compiled graph is kept (torch)",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "TF32 in fp32 products (torch)",
    "TRITON_CACHE_DIR": "where compiled kernels are kept between processes (Triton)",
    "TRITON_INTERPRET": "kernels run in the interpreter, on CPU (Triton)",
}

_PACKAGES = ("triton", "transformers", "safetensors", "numpy", "rich", "matplotlib")


def variables() -> dict[str, str]:
    """Return the variables of ``VARIABLES`` that are set, with their values, by name."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def no_color() -> bool:
    """Return whether the user asked for output without colour (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def for_child(**changes: str | None) -> dict[str, str]:
    """Return the environment for a child process: this one's, with ``changes``.

    Args:
        changes: New values by name; None removes the variable.
    """
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@contextmanager
def changed(**changes: str) -> Iterator[None]:
    """Set variables of this process for a while; for processes that belong to a check."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def version_of(package: str) -> str | None:
    """Return the installed version of ``package``, without importing it; None where absent."""
    # Nightly builds of torch bring Triton under another name.
    for distribution in (package, f"pytorch-{package}"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def versions() -> dict[str, str | None]:
    """Return the versions that decide results, by package; None where one is not installed."""
    found = {"samebits": __version__, "python": platform.python_version()}
    return found | {"torch": str(torch.__version__)} | {p: version_of(p) for p in _PACKAGES}


def architecture(device: torch.device) -> str:
    """Return "sm_90" and so on for a CUDA device, else the device's type.

    Determinism: a function of the hardware.
    """
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def default_device() -> torch.device:
    """Return the first CUDA device, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def system() -> str:
    """Return the operating system and the machine's architecture, without names or versions."""
    return f"{platform.system()} {platform.machine()}"


def devices() -> list[str]:
    """Return one line for the CPU, and one for each CUDA device."""
    lines = [f"cpu: {platform.machine()}, {_cpu()}"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name = torch.cuda.get_device_name(index)
        lines.append(f"cuda:{index}: {name}, {architecture(torch.device('cuda', index))}")
    return lines


def bits_key() -> str:
    """Return what bits are promised for, together with the dtype: one line without secrets.

    Two machines with one key compute the same bits. On CPU the vector instructions and the number
    of threads belong to it, because torch's matrix products depend on both.

    Determinism: a function of versions and hardware.
    """
    where = f"cpu-{platform.machine()}-{_cpu().replace(' ', '-')}"
    if torch.cuda.is_available():
        indices = range(torch.cuda.device_count())
        where = "+".join(sorted({architecture(torch.device("cuda", i)) for i in indices}))
    parts = {"samebits": __version__, "torch": str(torch.__version__)}
    parts |= {"triton": version_of("triton") or "none", "device": where}
    return " ".join(f"{name}={value}" for name, value in parts.items())


def _cpu() -> str:
    return f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}-threads"
