"""Counts what ranks send to each other: every all-to-all and all-reduce of a step, which may use nothing else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


class Call(NamedTuple):
    """One all-to-all on one rank, in elements."""

    rank: int
    sent: int
    received: int
    dtype: torch.dtype


class Sums(NamedTuple):
    """One all-reduce on one rank: the scores of N matrices."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def count(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Call], list[Sums]]:
    """From now on, every transfer; other collectives fail."""
    calls: list[Call] = []
    sums: list[Sums] = []
    exchange: Callable[..., Any] = dist.all_to_all_single
    add_up: Callable[..., Any] = dist.all_reduce

    def exchanged(output: Tensor, input: Tensor, arriving: Any = None, leaving: Any = None, **kwargs: Any) -> Any:
        assert sum(leaving) == input.numel()
        assert sum(arriving) == output.numel()
        assert input.dtype == output.dtype
        calls.append(Call(dist.get_rank(), input.numel(), output.numel(), input.dtype))
        return exchange(output, input, arriving, leaving, **kwargs)

    def added_up(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sums.append(Sums(dist.get_rank(), tuple(tensor.shape), tensor.dtype))
        return add_up(tensor, *args, **kwargs)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective that is not counted")

    monkeypatch.setattr(dist, "all_to_all_single", exchanged)
    monkeypatch.setattr(dist, "all_reduce", added_up)
    others = ("all_gather", "all_gather_into_tensor", "all_to_all", "broadcast", "reduce_scatter_tensor", "reduce")
    for name in (*others, "send", "recv", "isend", "irecv", "batch_isend_irecv"):
        monkeypatch.setattr(dist, name, forbidden)
    return calls, sums
