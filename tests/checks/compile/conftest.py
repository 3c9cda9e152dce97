"""Targets of the audit are modules beside the tests and of the battery; workers find them so."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
