"""Plug this library into transformers.

``register()`` and ``attach(model)`` use its experts interface, ``pack_experts(model, format)``
packs their weights, ``replace_experts(model)`` serves classes that the interface does not reach.
Importing this package imports nothing of transformers; the first three functions do, and raise
``ImportError`` where it is absent or too old.
"""

from samebits.integrations.transformers.packing import pack_experts as pack_experts
from samebits.integrations.transformers.plugin import Row as Row
from samebits.integrations.transformers.plugin import Table as Table
from samebits.integrations.transformers.plugin import attach as attach
from samebits.integrations.transformers.plugin import register as register
from samebits.integrations.transformers.replace import Replaced as Replaced
from samebits.integrations.transformers.replace import replace_experts as replace_experts
