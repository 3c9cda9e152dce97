"""Numbers to codes and back, elementwise: E2M1 two in a byte, E4M3, E8M0."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# By code; the sign is bit 3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Halfway between neighbours; a tie goes to the even code.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)
E8M0_BIAS = 127
E8M0_NAN = 255
_E8M0_LARGEST = 254
# fp32 bits of 2**-127 and of NaN, which are no shifted exponent.
_BITS_OF_DENORMAL = 0x00400000
_BITS_OF_NAN = 0x7FC00000


def together(join: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return ``join`` of tensors of one dtype (``torch.stack``, ``torch.cat``).

    Autocast refuses to join 8-bit floats: they are joined as bytes.

    Determinism: exact.
    """
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return join(list(tensors))
    return join([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)


def decode_e2m1(packed: Tensor, columns: int) -> Tensor:
    """Return the fp32 numbers of ``(…, ⌈columns/2⌉)`` bytes, ``(…, columns)``.

    Determinism: exact.
    """
    table = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :columns]
    return table[codes.int()]


def encode_e2m1(values: Tensor) -> Tensor:
    """Return fp32 ``values`` ``(…, K)`` rounded to nearest even and packed, ``(…, ⌈K/2⌉)`` uint8.

    Saturates at ±6; keeps the sign of zero; a NaN becomes 0 (its block's scale has to say NaN).

    Determinism: exact.
    """
    size = values.abs()
    codes = torch.signbit(values).to(torch.uint8) * 8
    for tie in _TIES_DOWN:
        codes += size > tie
    for tie in _TIES_UP:
        codes += size >= tie
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def encode_e4m3(values: Tensor) -> Tensor:
    """Return fp32 ``values`` as E4M3: to nearest even, saturating at ±448, NaN stays.

    Determinism: exact.
    """
    # torch before 2.12 makes NaN of what is too large.
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def decode_e8m0(scales: Tensor) -> Tensor:
    """Return the fp32 powers of two that uint8 ``scales`` stand for; 255 is NaN.

    Determinism: exact.
    """
    bits = scales.int()
    bits = torch.where(bits == 0, _BITS_OF_DENORMAL, bits << 23)
    return torch.where(scales == E8M0_NAN, _BITS_OF_NAN, bits).view(torch.float32)


def encode_e8m0(exponents: Tensor) -> Tensor:
    """Return integers ``exponents`` of two as uint8, saturating at 2**-127 and 2**127.

    Determinism: exact.
    """
    return (exponents + E8M0_BIAS).clamp(0, _E8M0_LARGEST).to(torch.uint8)
