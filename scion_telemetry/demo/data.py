"""Text that every machine has, cut into batches: the source of Python's own standard library, byte by byte.

    files of the standard library -> load_corpus -> Corpus -> batches, validation_batches -> (x, y) of int64

Nothing is downloaded. The text differs between Python versions, which is why a corpus carries a fingerprint: two runs
are comparable when their fingerprints agree.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are no part of the library: tests (large tables of cases) and whatever was installed beside it."""

HOLD_OUT = 16
"""Every 16th file, in order of its path, is kept for validation. Whole files: no function stands on both sides."""

EXCERPT = 16_384
"""At most this many bytes of each file, so that a few long ones do not make up most of the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on and bytes to validate on.

    Args:
        train: uint8, ``[train_bytes]``.
        validation: uint8, ``[validation_bytes]``, from files of which ``train`` holds nothing.
        train_files: Paths below the root, in the order of their bytes.
        validation_files: The same for ``validation``; the two share no file.
        fingerprint: First 12 hex digits of the SHA-256 of both texts.
    """

    train: torch.Tensor
    validation: torch.Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    fingerprint: str


def load_corpus(*, train_bytes: int = 2_000_000, validation_bytes: int = 65_536, root: Path | None = None) -> Corpus:
    """Read the text: the head of each ``.py`` file below ``root`` in order of their paths, until the sizes are reached.

    Args:
        train_bytes: Size of the training text, > 0.
        validation_bytes: Size of the validation text, > 0.
        root: Folder to read; None for the standard library of the running Python.

    Raises:
        ValueError: A size is not positive.
        RuntimeError: The folder does not hold that much readable source, as in a zipped or stripped Python.
    """
    for label, size in (("train_bytes", train_bytes), ("validation_bytes", validation_bytes)):
        if size <= 0:
            raise ValueError(f"{label} must be positive, got {size!r}")
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    paths = source_files(root)
    held_out = paths[::HOLD_OUT]
    kept = [path for index, path in enumerate(paths) if index % HOLD_OUT]
    train, train_files = _read(root, kept, train_bytes)
    validation, validation_files = _read(root, held_out, validation_bytes)
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + validation)
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        train_files=train_files,
        validation_files=validation_files,
        fingerprint=digest.hexdigest()[:12],
    )


def source_files(root: Path) -> list[str]:
    """Paths of the ``.py`` files below ``root``, relative, with ``/``, sorted; without ``SKIPPED_FOLDERS``.

    ``_sysconfigdata*`` is left out too: it lists how this Python was built and differs from machine to machine.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        # In place: os.walk then stays out of site-packages, which may hold a hundred times the library's files.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        below = Path(folder).relative_to(root)
        found += [
            (below / name).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(found)


def _read(root: Path, paths: list[str], size: int) -> tuple[bytes, tuple[str, ...]]:
    """First ``size`` bytes of the excerpts one after the other, and the files that they come from."""
    text, used = bytearray(), []
    for path in paths:
        if len(text) >= size:
            break
        try:
            text += (root / path).read_bytes()[:EXCERPT]
        except OSError as error:
            raise RuntimeError(_advice(root, f"{path!r} cannot be read")) from error
        used.append(path)
    if len(text) < size:
        raise RuntimeError(_advice(root, f"{len(text)} bytes found in {len(paths)} .py files, {size} needed"))
    return bytes(text[:size]), tuple(used)


def _advice(root: Path, what: str) -> str:
    return (
        f"no text to train on in {str(root)!r}: {what}. Use a Python whose standard library lies on disk as .py files "
        "(python.org, Debian, conda and pyenv do; zipped and source-less builds do not), or name another folder of "
        ".py files with load_corpus(root=...)"
    )


def batches(
    data: torch.Tensor, *, batch: int, context: int, rank: int = 0, world: int = 1, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random windows of the text: ``x`` and the same shifted by one byte, ``y``.

    Every rank draws the windows of all ranks from its own copy of one generator and keeps its share. So no two ranks
    see the same window for being seeded alike, and the step as a whole sees the same ``batch * world`` windows however
    many ranks share them.

    Args:
        data: uint8, ``[bytes]``, more than ``context`` of them.
        batch: Windows per rank, > 0.
        context: Length of a window, > 0.
        rank: This rank, in [0, world).
        world: Number of ranks that train on different data.
        seed: Seed of the stream, the same on every rank.

    Yields:
        ``x`` and ``y``, int64, both ``[batch, context]``.

    Raises:
        ValueError: A number is out of its range, or the text is too short.
    """
    _check(data, batch=batch, context=context, rank=rank, world=world)
    generator = torch.Generator().manual_seed(seed)
    return _draw(data, batch, context, rank, world, generator)


def _draw(
    data: torch.Tensor, batch: int, context: int, rank: int, world: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The generator behind ``batches``, which checks its arguments when it is called and not at the first step."""
    while True:
        starts = torch.randint(len(data) - context, (batch * world,), generator=generator)
        yield _windows(data, starts[rank * batch : (rank + 1) * batch], context)


def validation_batches(
    data: torch.Tensor, *, batch: int, context: int, count: int = 8, rank: int = 0, world: int = 1
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The same windows at every call, spread evenly over the text without overlap, as ``count`` batches.

    With ``world > 1`` each rank gets ``count / world`` of the same batches, so that the mean over the ranks is the mean
    over all.

    Args:
        data: uint8, ``[bytes]``, more than ``count * batch * context`` of them.
        batch: Windows per batch, > 0.
        context: Length of a window, > 0.
        count: Number of batches over all ranks, a positive multiple of ``world``.
        rank: This rank, in [0, world).
        world: Number of ranks that share the work.

    Returns:
        Pairs of ``x`` and ``y``, int64, both ``[batch, context]``.

    Raises:
        ValueError: A number is out of its range, or the text is too short.
    """
    _check(data, batch=batch, context=context, rank=rank, world=world)
    if count <= 0 or count % world:
        raise ValueError(f"count must be a positive multiple of world={world}, got {count!r}")
    stride = (len(data) - 1) // (count * batch)
    if stride < context:
        raise ValueError(
            f"the text has {len(data)} bytes, {count * batch * context + 1} are needed for count={count}, "
            f"batch={batch}, context={context}: lower one of them or load more text"
        )
    starts = torch.arange(count * batch).mul(stride).view(count, batch)
    return tuple(_windows(data, row, context) for row in starts[rank::world])


def _windows(data: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    window = data[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _check(data: torch.Tensor, *, batch: int, context: int, rank: int, world: int) -> None:
    for label, value in (("batch", batch), ("context", context), ("world", world)):
        if value <= 0:
            raise ValueError(f"{label} must be positive, got {value!r}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank!r}")
    if len(data) <= context:
        raise ValueError(f"the text has {len(data)} bytes, more than context={context} are needed")
