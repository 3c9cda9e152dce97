"""`samebits report`: What did all checks of a machine say, on one page?

``load`` reads what checks print with ``--json``, ``summary`` puts it together, ``page`` and
``markdown`` show it. docs/report.md explains the page.
"""

from samebits.checks.report.command import add_arguments as add_arguments
from samebits.checks.report.command import main as main
