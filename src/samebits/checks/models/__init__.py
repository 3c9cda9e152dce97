"""Which experts implementations compute what the model says?

The classes, the implementations and the ways to run them come from a `ModelProvider`
(``protocol``); ``command`` names the only one there is, transformers. ``experts`` and ``language``
judge, ``report`` shows. docs/verdicts.md explains every verdict and number.
"""

from samebits.checks.models.command import add_arguments as add_arguments
from samebits.checks.models.command import main as main
