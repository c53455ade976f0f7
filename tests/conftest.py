"""Settings of all tests."""

import os
import resource
import signal
from collections.abc import Callable, Iterator

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # tests that compile say so themselves
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch._dynamo  # imported before any fork, so that forked ranks need not
import torch.distributed.fsdp
import torch.distributed.tensor


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Files of at most 4 KiB; returns a function that lifts the limit."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old)
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)
