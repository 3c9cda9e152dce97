"""Backends: modules with three names, ``NAME``, ``why_not(problem)`` and ``forward(…)``.

A named backend is strict: it runs the problem or raises with its reason. ``"auto"`` takes the first
without an objection. Backends never import one another. A backend with gradients has ``backward``.
"""

from types import ModuleType

from samebits.arguments import require_name
from samebits.backends import fused, grouped, reference
from samebits.errors import UnsupportedError
from samebits.problem import Problem

# In the order in which "auto" asks them.
BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (fused, grouped, reference)}


def check_name(backend: str) -> None:
    """Raise unless ``backend`` is "auto" or a key of ``BACKENDS``; see ``require_name``."""
    require_name("backend", backend, ["auto", *BACKENDS])


def explain(problem: Problem) -> dict[str, str | None]:
    """Return, for each backend, the reason why it cannot run ``problem``, or None where it can.

    Determinism: pure function of the problem.
    """
    return {name: module.why_not(problem) for name, module in BACKENDS.items()}


def choose(backend: str, problem: Problem) -> ModuleType:
    """Return the module that runs ``problem``: the named one, or the first without an objection.

    Args:
        backend: "auto" or a key of ``BACKENDS``.
        problem: The call.

    Raises:
        ValueError: The name is unknown.
        UnsupportedError: The named backend, or every backend, cannot run the problem.

    Determinism: pure function of its arguments; nothing is timed.
    """
    check_name(backend)
    reasons = explain(problem)
    if backend == "auto":
        for name, reason in reasons.items():
            if reason is None:
                return BACKENDS[name]
        lines = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no backend can run Problem({problem})\n{lines}")
    if reasons[backend] is not None:
        able = [name for name, reason in reasons.items() if reason is None]
        hint = f"hint: {', '.join(able)} can" if able else "hint: no other backend can either"
        raise UnsupportedError(
            f"backend {backend!r} cannot run Problem({problem}) because {reasons[backend]}\n{hint}"
        )
    return BACKENDS[backend]
