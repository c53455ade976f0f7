"""Settings of all tests."""

import os

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
