"""Groups of ranks, one of each size for a whole session."""

from collections.abc import Iterator

import pytest

from rank_processes import Processes


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Processes]:
    """Two processes of one group."""
    processes = Processes(2)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Processes]:
    """Four processes of one group."""
    processes = Processes(4)
    yield processes
    processes.close()
