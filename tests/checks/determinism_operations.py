"""Say what our operations launch on a GPU, without one: a process of its own for test_determinism.

The operators' implementations for GPUs are registered for CPU tensors, and run interpreted. Prints
the name of each variant with how its launches differ from what the registry says, and what it asks
of the host, as JSON.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from triton.runtime.interpreter import InterpretedFunction

register = torch.library.impl
OPERATORS = ("activation", "permute", "combine", "sort_slots")


def swapped(name, kinds, *rest, **options):
    other = {"cpu": "cuda", "cuda": "cpu"}
    ours = isinstance(name, str) and name.partition("::")[2].startswith(OPERATORS)
    return register(name, other.get(kinds, kinds) if ours else kinds, *rest, **options)


torch.library.impl = swapped
torch.set_num_threads(1)

from host_reads import HostReads  # noqa: E402

from samebits.checks.determinism import operations  # noqa: E402
from samebits.checks.determinism.launches import mismatch, observed  # noqa: E402
from samebits.checks.determinism.memory import filled  # noqa: E402
from samebits.checks.determinism.replay import run  # noqa: E402
from samebits.ops.activation import contract as activation_contract  # noqa: E402
from samebits.ops.permute import contract as permute_contract  # noqa: E402

for contract in (activation_contract, permute_contract):
    contract._device_of = lambda tensor: nullcontext()

VARIANTS = [
    operations.sort(64, 8, 16),
    operations.move(5, 130, 2, "fp16"),
    operations.activation("plain", 20, 64, "fp16"),
    operations.activation("weighted", 20, 64, "fp16"),
    operations.activation("bias", 20, 64, "fp32"),
]


def main(root: str) -> None:
    found = {}
    calls = {}
    for variant in VARIANTS:
        calls[variant.name] = variant.prepare(torch.device("cpu"))
        with observed(Path(root)) as seen:
            run(calls[variant.name])
        found[variant.name] = [mismatch(variant, seen)]
    # The interpreter itself reads: nothing is computed.
    InterpretedFunction.run = lambda *args, **kwargs: None
    for name, call in calls.items():
        with filled(0), HostReads() as reads:
            call()
        found[name] += reads.found
    sys.stdout.write(json.dumps(found))


main(sys.argv[1])
