"""What advice consists of: limits, what was measured, what each candidate fraction would do, and the conclusion."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pandas as pd

from .estimators import Array
from .limits import Limits
from .theory import matched_ef

STATE = "ages and overdue rows are those of the settled state, once every row had its first turn"
"""Of when the predictions are."""

FLOPS = (
    "FLOPs of Newton-Schulz relative to fraction 1; the time of the optimizer falls less: in matrices 512 wide, "
    ".38, .23, .17 and .14 were measured at .5, .25, .125 and .0625, where FLOPs say .21, .047, .011 and .003"
)
"""What the predicted cost is, and what it is not."""

CANDIDATES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Fractions that are tried, descending."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """What a run says of one matrix (or stack of them).

    Args:
        param: Its name.
        role: hidden, expert, ...
        shape: As stored.
        matrices: Stacked matrices or heads, each of which selects for itself.
        n: Rows (or columns) that each selects from.
        width: Entries of one of them.
        shards: Pieces that the rows are cut into.
        scope: ``local`` or ``global``.
        fraction: Realised k / n at which the rest was measured.
        steps: For how long.
        total_steps: Last step of the run.
        ef_decay: What selected rows keep.
        lr: Largest learning rate seen.
        weight_decay: λ of the steps W ← (1 - lr λ) W.
        decays_selected: Only selected rows decay, so that waiting costs nothing.
        source: ``slices`` (every row counted), ``curve`` (read off the frequency curve, without single rows) or
            ``calibration`` (squares of the scores of a run at fraction 1, in no unit).
        rates: Growth of every row ``[matrices, n]``, in units of the score a step.
        late: Steps at the end of the run in which it was counted; 0: in the whole run, though it drifts (rates of the
            last half alone halve the error at .25 and below), or by no counts.
        never: Share of rows that were never selected; of a ``curve`` at most that many, and NaN where it is not known.
        age_p99: Median of the logged ``age_p99`` in the last quarter; None where it was not logged.
        regret: Mean of the logged ``regret``; None where rows are not cut.
        regret_at: Mean regret that W shards would have, by W, if the selection at hand were cut. Selecting in shards
            loses more, since each levels its rows to a threshold of its own: 15 times as much in the study (.0165 for
            .0011, 2 shards, .25).
        mass: Captured-mass curve of unequalised scores, by fraction; empty where there is none.
        mass_source: ``calibration``, ``gradient`` or ``none``.
    """

    param: str
    role: str
    shape: tuple[int, ...]
    matrices: int
    n: int
    width: int
    shards: int
    scope: str
    fraction: float
    steps: int
    total_steps: int
    ef_decay: float
    lr: float
    weight_decay: float
    decays_selected: bool
    source: str
    rates: Array
    late: int
    never: float
    age_p99: float | None
    regret: float | None
    regret_at: Mapping[int, float]
    mass: Mapping[float, float]
    mass_source: str

    @property
    def parameters(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What a fraction would do to one matrix.

    Args:
        fraction: α as an option.
        k: Rows or columns selected of every matrix, over all shards.
        age_p99: Predicted 99th percentile of the age in steps, settled: once every row had its first turn.
        age_limit: What is allowed of it, in steps.
        overdue: Predicted share of rows selected less often than once in ``age_limit`` steps, settled likewise.
        always: Predicted share of rows selected in 99 % of the steps or more.
        drift: lr · λ · age_p99.
        mass: Captured unequalised mass; None where it is not known.
        excess: Of that over flat rows, 0 to 1; None where it is not known.
        regret: Mass lost to local selection; None where nothing is cut or scope is global.
        horizon: Momentum horizon in steps with the run's ``ef_decay``.
        ef_decay: What to set with the fraction so that the momentum remembers no longer than ``mu`` does at fraction
            1; the run's own where it does not anyhow, or no decay can.
        flops: Newton-Schulz FLOPs relative to fraction 1. The time of the optimizer falls less: of matrices 512 wide
            it was .38, .23, .17 and .14 at .5, .25, .125 and .0625, and FLOPs say .21, .047, .011 and .003.
        bytes: Bytes a step between ranks, of the whole parameter.
        cost: FLOPs, or the mean of FLOPs and bytes where rows are cut, relative to fraction 1.
        saving: 1 - cost / cost of the next larger candidate, by the same count.
        failed: Names of the limits that it breaks, and how far: value over limit, above 1.
        warned: The same of limits that only warn.
    """

    fraction: float
    k: int
    age_p99: float
    age_limit: float
    overdue: float
    always: float
    drift: float
    mass: float | None
    excess: float | None
    regret: float | None
    horizon: float
    ef_decay: float
    flops: float
    bytes: float
    cost: float
    saving: float
    failed: Mapping[str, float]
    warned: Mapping[str, float]

    @property
    def accepted(self) -> bool:
        """Whether it breaks no limit."""
        return not self.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixAdvice:
    """One matrix.

    Args:
        evidence: What was measured.
        scope: Selection scope that it is predicted with, ``local`` or ``global``; that of the run unless another one
            is advised.
        candidates: Every fraction that was tried, descending.
        fraction: The smallest accepted one that also saves enough.
        binding: What stands against the next smaller one: a limit, ``saving``, or ``none`` where there is none.
        global_fraction: The same if ``selection_scope`` were ``global``.
    """

    evidence: Evidence
    scope: str
    candidates: tuple[Candidate, ...]
    fraction: float
    binding: str
    global_fraction: float

    @property
    def chosen(self) -> Candidate:
        """The candidate of ``fraction``."""
        return next(c for c in self.candidates if c.fraction == self.fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvice:
    """All matrices of a role.

    Args:
        role: hidden, expert, ...
        matrices: How many parameters.
        scope: Selection scope that is advised; the matrices are predicted with it.
        current: Realised fractions in the run, smallest and largest.
        fraction: The smallest one that matrices with ``coverage`` of the parameters accept.
        binding: What stands against the next smaller one.
        worst: The parameter that breaks that limit most, and the value there; empty and NaN where nothing does.
        worst_value: Value over limit.
        accepted: Share of the parameters that accept, by fraction.
        changes: What to change together with the fraction, in words. The decay that keeps the horizon, of the advised
            fraction and of the run's own, was worth most in the study and comes first.
    """

    role: str
    matrices: int
    scope: str
    current: tuple[float, float]
    fraction: float
    binding: str
    worst: str
    worst_value: float
    accepted: Mapping[float, float]
    changes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Which fraction, why, and what has to be tried before it is believed. The top-k is by L1 norm throughout.

    What is predicted are distributions: ages, shares of rows. Which rows come often differs from one training to the
    next (correlation .56 to .67 at another fraction, whatever the predictor).

    Args:
        run: Path of the run.
        limits: What was asked for.
        total_steps: Of the training that it is for. It only bars fractions below 1 - mu: :attr:`length_matters`.
        total_steps_from: ``given``, or ``run``: as many as the run has.
        groups: By role.
        matrices: By parameter, in model order.
        notes: What the run could not say, and how to have it said.
        caveat: That quality needs an A/B, and of how many seeds.
        seeds: Seeds per arm by the gap of the mean loss to be seen.
    """

    run: str
    limits: Limits
    total_steps: int
    total_steps_from: str
    groups: tuple[GroupAdvice, ...]
    matrices: tuple[MatrixAdvice, ...]
    notes: tuple[str, ...] = ()
    caveat: str = ""
    seeds: Mapping[float, int] = field(default_factory=dict)

    @property
    def length_matters(self) -> bool:
        """Whether a fraction was tried that is so small that no ``ef_decay`` gives back the horizon of ``mu``.

        Only there are the momentum horizon and the length of the training held against each other.
        """
        return any(matched_ef(c.fraction, self.limits.mu) < 0 for m in self.matrices[:1] for c in m.candidates)

    def to_frame(self) -> pd.DataFrame:
        """One row a parameter and candidate: param, role, the fields of ``Candidate``, ``accepted`` and ``chosen``."""
        rows = []
        for matrix in self.matrices:
            for candidate in matrix.candidates:
                facts = asdict(candidate)
                facts |= {name: ";".join(facts[name]) for name in ("failed", "warned")}
                rows.append(
                    {
                        "param": matrix.evidence.param,
                        "role": matrix.evidence.role,
                        **facts,
                        "accepted": candidate.accepted,
                        "chosen": candidate.fraction == matrix.fraction,
                    }
                )
        frame = pd.DataFrame(rows)
        numbers = ["mass", "excess", "regret"]
        return frame.astype(dict.fromkeys(numbers, "float64"))

    def to_json(self) -> str:
        """The whole as JSON; numbers that JSON has no word for are null. Growth rates of single rows are left out."""
        whole = {
            "run": self.run,
            "ranking": "L1 norm of the momentum's rows or columns",
            "limits": asdict(self.limits),
            "total_steps": self.total_steps,
            "total_steps_from": self.total_steps_from,
            "state": STATE,
            "flops": FLOPS,
            "groups": [asdict(group) for group in self.groups],
            "matrices": [_plain_matrix(matrix) for matrix in self.matrices],
            "notes": self.notes,
            "caveat": self.caveat,
            "seeds": self.seeds,
        }
        return json.dumps(_finite(whole), indent=2, allow_nan=False)


def _plain_matrix(matrix: MatrixAdvice) -> dict[str, object]:
    whole = asdict(matrix)
    del whole["evidence"]["rates"]
    return whole


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
