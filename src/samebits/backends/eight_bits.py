"""Activations in 8 bits (W8A8): what no backend has of them."""

from samebits.problem import Problem


def why_not(problem: Problem) -> str | None:
    """Return why the activations of ``problem`` cannot be in 8 bits, or None.

    Determinism: pure function of the problem.
    """
    if problem.row_format is None:
        return None
    if problem.grad:
        return "activations in 8 bits have no gradient (torch.no_grad() asks for none)"
    if problem.dtype == "fp64":
        return "activations in 8 bits are those of bf16, fp16 and fp32"
    return None
