"""One matrix product for each expert over rows sorted by expert: the default on CPU.

The stages are separate calls (permute, product, activation, product, combine), so this is also the
path for rows that arrive sorted, and the check on the fused backend.
"""

from collections.abc import Mapping

from torch import Tensor

from samebits.backends import device_gradients
from samebits.backends.call import Call, Gradients
from samebits.backends.grouped import device, eight_bits, host, host_gradients
from samebits.problem import Problem
from samebits.weight_gradients import Buffer

NAME = "grouped"


def why_not(problem: Problem) -> str | None:
    """Return why this backend cannot run ``problem``, or None.

    Determinism: pure function of the problem.
    """
    if problem.device != "cpu":
        return device.why_not(problem) or eight_bits.why_not(problem)
    if problem.row_format is not None:
        return "it has activations in 8 bits on a GPU, not on cpu"
    return None


def notes(problem: Problem) -> str | None:
    """Return what is not promised: on CPU, bits may depend on T through torch's matrix products."""
    if problem.device != "cpu":
        return None
    return (
        "row independence is not promised, nor equal bits for (E, 2F, H) and (E, H, 2F) storage: "
        "torch chooses its matrix product by row count and strides"
    )


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; rounding points and combine order of the contract.
    """
    if problem.device == "cpu":
        return host.forward(problem, call, save=save)
    if problem.row_format is not None:
        return eight_bits.forward(problem, call)
    return device.forward(problem, call, save=save)


def recomputed(problem: Problem, call: Call) -> Tensor:
    """Return z alone, as ``forward`` saves it.

    Determinism: that of ``forward``.
    """
    if problem.device == "cpu":
        return host.forward(problem, call, save=True)[1]
    return device.first_projection(problem, call).z


def backward(
    problem: Problem,
    call: Call,
    z: Tensor,
    dout: Tensor,
    wanted: tuple[bool, ...],
    into: Mapping[str, Buffer],
    *,
    spend: bool = False,
) -> Gradients:
    """Return the wanted gradients from ``z``; recomputes h.

    ``spend``: z is not needed again, its memory may be given back before the end.

    Determinism: repeatable; rows ascend in every sum over rows.
    """
    if problem.device == "cpu":
        return host_gradients.backward(problem, call, z, dout, wanted, into)
    return device_gradients.backward(problem, call, z, dout, wanted, into, spend=spend)
