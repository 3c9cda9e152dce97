"""Two functions of rows for `samebits check invariance`, and the inputs that it makes for them.

samebits check invariance examples.row_functions:linear
samebits check invariance examples.row_functions:rms_norm
"""

import torch
from torch import Tensor
from torch.nn import functional

WEIGHT = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)) * 256**-0.5


def linear(x: Tensor) -> Tensor:
    """Project rows: torch chooses its matrix product by the number of rows."""
    return functional.linear(x, WEIGHT)


def rms_norm(x: Tensor) -> Tensor:
    """Normalise each row by itself."""
    return functional.rms_norm(x, (256,))


def make_inputs() -> tuple[tuple[Tensor, ...], dict[str, object]]:
    """Return the rows."""
    return (torch.randn(64, 256),), {}
