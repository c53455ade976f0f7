"""Numbers that the reference optimizers gave; see tests/golden/README.md."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "golden"


@cache
def index() -> dict[str, Any]:
    return json.loads((FOLDER / "index.json").read_text())


@cache
def _arrays(file: str) -> dict[str, Any]:
    with np.load(FOLDER / file) as arrays:  # read whole: forked ranks must not share an open file
        return dict(arrays)


class Case:
    """One golden case: parameters, inputs, expected outputs and tolerances."""

    def __init__(self, file: str, raw: dict[str, Any]) -> None:
        self.file, self.raw = file, raw
        self.id: str = raw["id"]
        self.params: dict[str, Any] = raw["params"]

    def _get(self, kind: str, role: str) -> Tensor:
        name = self.raw[kind][role]
        dtype = index()["files"][self.file]["arrays"][name]
        return torch.from_numpy(np.array(_arrays(self.file)[name])).to(getattr(torch, dtype))

    def input(self, role: str) -> Tensor:
        return self._get("inputs", role)

    def output(self, role: str) -> Tensor:
        return self._get("outputs", role)

    def outputs(self) -> list[str]:
        return list(self.raw["outputs"])

    def has(self, role: str) -> bool:
        return role in self.raw["outputs"]

    def close(self, role: str, actual: Tensor, level: str = "other_cpu") -> None:
        """Assert equality within the tolerance that the case states for this role."""
        tol = self.raw["tol"]
        number = tol.get(role, tol.get(role.split("/")[0] + "/*", tol.get("*")))
        bound = index()["tolerances"][number][level]
        if bound is None:  # deliberately undetermined, such as a tie
            return
        expected = self.output(role)
        torch.testing.assert_close(
            actual.detach().to(expected.dtype),
            expected,
            equal_nan=True,
            msg=lambda m: f"{self.id} {role}: {m}",
            **bound,
        )

    def __repr__(self) -> str:
        return self.id


def cases(file: str, prefix: str = "", op: str = "") -> list[Case]:
    return [
        Case(file, raw)
        for raw in index()["files"][file]["cases"]
        if raw["id"].startswith(prefix) and (not op or raw["op"] == op)
    ]
