"""What a compiled kernel uses, and the table of all of them; for the scripts ``cubins_<op>.py``."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import triton

TARGETS = (80, 86, 89, 90, 100, 120)

_Case = TypeVar("_Case")


def measure(compiled: Any) -> list[int]:
    """Return ``[registers, stack, shared, vector]`` of a compiled kernel.

    Registers and stack bytes per thread, shared bytes, and the widest global access in bytes.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    ptx = compiled.asm["ptx"]
    accesses = re.findall(r"(?:ld|st)\.global(?:\.[a-z0-9_:]+)*?(\.v\d)?\.b(\d+)", ptx)
    widths = [int(many[2:] or 1) * int(bits) // 8 for many, bits in accesses]
    # A box is stored in one piece.
    widths += [16] * ("cp.async.bulk.tensor" in ptx and ".global.shared::cta" in ptx)
    registers, stack = (int(group) for group in found.groups())
    return [registers, stack, compiled.metadata.shared, max(widths)]


def main(
    script: str,
    cases: Mapping[str, _Case],
    build: Callable[[_Case, int], Any],
    arguments: list[str],
    *,
    measure: Callable[[Any], list[int]] = measure,
    targets: Callable[[_Case], tuple[int, ...]] = lambda _: TARGETS,
) -> None:
    """Print the table of ``cases`` as JSON; ``--record`` writes this Triton version's beside it."""
    names = [name for name in arguments if not name.startswith("--")] or list(cases)
    table = {
        name: {f"sm_{sm}": measure(build(cases[name], sm)) for sm in targets(cases[name])}
        for name in names
    }
    record = Path(script).with_suffix(".json")
    if "--record" in arguments:
        known = json.loads(record.read_text()) if record.exists() else {}
        known[triton.__version__] = table
        text = json.dumps(known, indent=1, sort_keys=True)
        # One line per cubin.
        text = re.sub(r"\[\s+([^\]]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
        record.write_text(text + "\n")
    sys.stdout.write(json.dumps(table) + "\n")
