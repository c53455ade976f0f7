"""An append-only CSV file that never holds half a line for longer than it takes to notice.

No buffer stands between the caller and the file: a killed process loses nothing that ``append`` has returned from,
and a forked child has no copy of a buffer to write a second time.
"""

import os
import weakref
from collections.abc import Iterable
from pathlib import Path


def csv_lines(rows: Iterable[Iterable[str]]) -> bytes:
    """Rows of text as CSV with ``\n`` line ends, quoted where needed."""
    return "".join([",".join(map(quoted, row)) + "\n" for row in rows]).encode()


def quoted(cell: str) -> str:
    """A cell as it stands in CSV. A line break in it becomes a blank: one row is one line."""
    if not cell.isprintable():
        cell = " ".join(cell.splitlines())
    if '"' in cell or "," in cell:
        return '"' + cell.replace('"', '""') + '"'
    return cell


def header_differs(path: Path, columns: tuple[str, ...]) -> bool:
    """Whether the file has a whole first line and that line is not the header of ``columns``."""
    with path.open("rb") as file:
        first = file.readline()
    return first.endswith(b"\n") and first != csv_lines([columns])


def trim(path: Path, last_step: int) -> int:
    """Cut a torn last line, and from the first row of a step after ``last_step`` on. Steps in a file ascend.

    Returns:
        Number of whole rows that were cut.

    Raises:
        ValueError: A whole line does not begin with a step.
    """
    with path.open("r+b") as file:
        header = file.readline()
        good = len(header) if header.endswith(b"\n") else 0
        cut = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            if cut or _step(line, path) > last_step:
                cut += 1
            else:
                good += len(line)
        file.truncate(good)
    return cut


def _step(line: bytes, path: Path) -> int:
    try:
        return int(line.split(b",", 1)[0])
    except ValueError as error:
        raise ValueError(f"{path} cannot be resumed: {line[:60]!r} does not begin with a step") from error


class TableFile:
    """Appends whole lines. A line that could not be written to its end is taken back.

    Args:
        path: The file. Created with a header when it does not exist or is empty.
        columns: Its header.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._fd = os.open(path, flags, 0o666)
        self._close = weakref.finalize(self, os.close, self._fd)  # also of a sink that nobody closed
        self._size = os.fstat(self._fd).st_size  # up to here every line is whole
        if self._size == 0:
            self.append(csv_lines([columns]))

    def append(self, lines: bytes) -> None:
        """Write ``lines`` whole or not at all.

        Raises:
            OSError: The file could not take them; the message names it. It ends with a whole line all the same,
                or the next call sees to that before it writes.
        """
        try:
            self._take_back()
            rest = memoryview(lines)
            while rest:  # a full disk first shows as a short write
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._try_take_back()
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size += len(lines)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._close()

    def _take_back(self) -> None:
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)

    def _try_take_back(self) -> None:
        try:
            self._take_back()
        except OSError:
            return  # the next append tries again before it writes
