"""Run a function on several ranks of one machine, for tests: as threads (fast) or as forked processes with gloo (real).

results = run_forked(lambda rank, world: ..., 4)        # one result a rank
"""

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

T = TypeVar("T")
RankFunction = Callable[[int, int], T]


def run_threads(function: RankFunction[T], world: int, *, timeout: float = 60.0) -> list[T]:
    """Call ``function(rank, world)`` on ``world`` threads that see each other as ranks; returns their results.

    Costs 0.02 to 0.1 s at 4 ranks. The threads share the global random generator: use generators of your own. What
    passes here may still fail on a real backend, so keep some tests for ``run_forked``.

    Raises:
        RuntimeError: With the trace of the first rank that failed.
    """
    # Imported here: a private module of torch that a production import must not depend on.
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    _isolate_threads(True)
    threaded._install_threaded_pg()  # type: ignore[no-untyped-call]
    store = dist.HashStore()  # type: ignore[attr-defined]
    threaded.ProcessLocalGroup.reset()  # type: ignore[no-untyped-call]
    results: dict[int, T] = {}
    errors: list[tuple[int, str]] = []

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = function(rank, world)
        except BaseException as error:  # reported to the caller below
            errors.append((rank, traceback.format_exc()))
            threaded.ProcessLocalGroup.exception_handle(error)  # type: ignore[no-untyped-call]
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
    finally:
        threaded._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
        _isolate_threads(False)
    if errors:
        raise RuntimeError(f"rank {errors[0][0]} failed:\n{errors[0][1]}")
    if len(results) < world:
        raise RuntimeError(f"ranks {sorted(set(range(world)) - set(results))} did not finish in {timeout} s")
    return [results[rank] for rank in range(world)]


def run_forked(function: RankFunction[T], world: int, *, timeout: float = 60.0) -> list[T]:
    """Call ``function(rank, world)`` on ``world`` forked processes with gloo; returns their results.

    Costs 0.1 to 0.3 s where the caller has imported ``torch.distributed.fsdp`` before.

    Raises:
        Exception: Of the first rank that failed, with its trace.
        RuntimeError: When the ranks do not finish in ``timeout`` seconds; they are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _forked, args=(function, world, folder, timeout), nprocs=world, join=False, start_method="fork"
        )
        assert context is not None
        deadline = time.monotonic() + timeout
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):  # returns whenever one rank ends
            if time.monotonic() >= deadline:
                for process in context.processes:
                    process.kill()
                raise RuntimeError(f"{world} ranks did not finish in {timeout} s")
        return [torch.load(os.path.join(folder, f"result{r}"), weights_only=False) for r in range(world)]


def _isolate_threads(on: bool) -> None:
    torch._C._distributed_c10d._set_thread_isolation_mode(on)  # type: ignore[attr-defined]


def _forked(rank: int, function: RankFunction[Any], world: int, folder: str, timeout: float) -> None:
    # A forked child leaves through os._exit, which spares it the gloo threads' race with the dying interpreter.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    result = function(rank, world)
    torch.save(result, os.path.join(folder, f"result{rank}"))
    dist.barrier()
    dist.destroy_process_group()
