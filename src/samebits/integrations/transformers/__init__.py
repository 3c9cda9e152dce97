"""Plug this library into transformers' experts interface: ``register()`` and ``attach(model)``.

Importing this package imports nothing of transformers; both functions do, and raise ``ImportError``
where it is absent or too old.
"""

from samebits.integrations.transformers.plugin import Row as Row
from samebits.integrations.transformers.plugin import Table as Table
from samebits.integrations.transformers.plugin import attach as attach
from samebits.integrations.transformers.plugin import register as register
