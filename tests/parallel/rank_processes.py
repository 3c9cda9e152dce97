"""Ranks of a gloo group that live as long as a test session, and run one function after another."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported once, before the ranks are forked.
_PRELOADED = ["samebits.parallel", "torch._dynamo", "torch.distributed.checkpoint"]
PATIENCE = 120.0
Program = Callable[..., Any]


class Processes:
    """Hold W processes, each a rank of one group."""

    def __init__(self, size: int, *, timeout: float = PATIENCE) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self.timeout, self.pipes, self.processes = timeout, [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, store, timeout), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, program: Program, *arguments: Any) -> list[Any]:
        """Return what ``program(*arguments)`` returns on each rank; raise if it raises on one."""
        results = self.outcomes(program, *arguments)
        failed = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(results) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def outcomes(self, program: Program, *arguments: Any) -> list[tuple[bool, Any]]:
        """Return for each rank whether ``program`` returned, and its value or its traceback."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((program, arguments)))
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        if not wait([pipe], 2 * self.timeout):
            return False, "no answer in time"
        try:
            ok, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, "the process is gone"
        return ok, value

    def close(self) -> None:
        """End every process."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            program, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = True, program(*arguments)
        except BaseException:  # noqa: BLE001 - the test is told, whatever it is
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
