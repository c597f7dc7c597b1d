# SPDX-License-Identifier: Apache-2.0
"""A pool of processes with a gloo group between them, kept for many tests because importing the trainers is slow."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BOOT_SECONDS = 600
_CALL_SECONDS = 300


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


class RankPool:
    """``world_size`` processes; :meth:`run` calls one function on all of them and returns the list of results."""

    def __init__(self, world_size: int, *, trainers: bool = True) -> None:
        """trainers: whether ms-swift and Megatron are imported. ms-swift patches transformers, for one."""
        context = multiprocessing.get_context("forkserver" if trainers else "spawn")
        if trainers:
            _preload()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.world_size = world_size
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(_BOOT_SECONDS)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = _CALL_SECONDS, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank. Raises RankError, and ends the pool, when one fails or hangs."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        return self._collect(timeout)

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._processes = []

    @property
    def alive(self) -> bool:
        return bool(self._processes)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                # Once one rank has failed, its peers may wait for it in a collective: give them little time.
                patience = max(0.0, deadline - time.monotonic()) if not failures else 2.0
                if not pipe.poll(patience):
                    failures.append(f"rank {rank} did not answer within {timeout} s")
                    continue
                ok, value = pipe.recv()
            except EOFError:
                failures.append(f"rank {rank} died")
                continue
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank} raised\n{value}")
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return results


def _preload() -> None:
    """Has processes forked from one that has imported the trainers."""
    folder = str(Path(__file__).parents[1])
    path = os.environ.get("PYTHONPATH", "")
    if folder not in path.split(os.pathsep):  # Python 3.11's fork server does not get sys.path
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, path]))
    multiprocessing.set_forkserver_preload(["harness.preload"])


def _serve(rank: int, world_size: int, port: int, pipe: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    pipe.send((True, None))
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
