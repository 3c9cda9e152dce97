"""`samebits check determinism`: Is there proof, for every kernel as it is now, that it repeats?

A *registry* (a Python file, ours or anyone's) lists variants: calls, each with the kernels that it
launches, for one tile configuration, dtype and family of options. ``--replay`` repeats each on a
GPU and writes *evidence*; without it the check compares evidence with the code as it is, by syntax
alone; see docs/determinism.md.
"""

from samebits.checks.determinism.command import add_arguments, main
from samebits.checks.determinism.variant import Registry, RegistryError, Variant

__all__ = ["Registry", "RegistryError", "Variant", "add_arguments", "main"]
