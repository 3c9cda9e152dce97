"""Checks: each proves one thing, of our code and of anyone's, and says so with four verdicts.

``pass | fail | unsupported | not_run``; ``not_run`` is never a pass. A check is a module with

* a docstring whose first line is the question that it answers,
* ``add_arguments(parser)``, which adds its arguments to an ``argparse`` parser,
* ``main(arguments) -> int``, which prints results to stdout, everything else to stderr, and returns
  the exit code: 0 all passed, 1 something failed, 2 usage, 3 nothing could be run.

It needs torch only; what else it uses it imports when it runs.
"""

from collections.abc import Mapping

# Name on the command line -> module, imported when it is chosen.
CHECKS: Mapping[str, str] = {
    "models": "samebits.checks.models",
    "compile": "samebits.checks.compile",
    "parity": "samebits.checks.parity",
    "logprobs": "samebits.checks.logprobs",
    "determinism": "samebits.checks.determinism",
    "invariance": "samebits.checks.invariance",
}
