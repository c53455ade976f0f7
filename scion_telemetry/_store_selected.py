"""Which rows were selected, out of the text of ``selected.csv``."""

import base64
import binascii
from pathlib import Path

import pandas as pd


def unpacked(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The table with ``rows`` as bytes.

    Args:
        table: As it is read from ``path``: every line of it, ``rows`` in base64.
        path: For the message.

    Raises:
        ValueError: A line is damaged: ``rows`` is no base64 of a bit for each of its ``count`` rows.
    """
    found = []
    for line, (text, count) in enumerate(zip(table["rows"], table["count"], strict=True), start=2):
        wanted = -(-int(count) // 8)
        try:
            packed = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{path}, line {line} is damaged: its rows are no base64 ({error}); {_DO}") from error
        if count < 1 or len(packed) != wanted:
            raise ValueError(
                f"{path}, line {line} is damaged: {len(packed)} bytes of rows, and {count} rows take {wanted}; {_DO}"
            )
        found.append(packed)
    return table.assign(rows=pd.Series(found, index=table.index, dtype=object))


_DO = "take the line out, or restore the file, to read the rest"
