"""What Dion2 selects, from the scores that it has computed anyway: partial results and finishing formulas.

Scores r are the **L1** norms of the momentum's rows (or columns) before the selected ones decay. They travel as one
float64 number a row: positive where the row is selected, negative where it is not, so one vector carries both.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

AGE_EXACT = 64
"""Ages below are counted one by one; above, in eighths of an octave."""
AGE_BINS = AGE_EXACT + 8 * 16
"""Up to 64·2^16, four million steps."""


@dataclass(slots=True)
class History:
    """When each row that this rank holds was last selected. One int32 a row; no communication.

    Args:
        last: Step at which each row was last selected, ``[B, n]``; the step of attachment where it was not yet.
        step: The latest step seen.
        selected: How many were selected at that step; 0 before the first one seen.
    """

    last: Tensor
    step: int
    selected: int = 0

    @classmethod
    def start(cls, scores: Tensor, step: int) -> "History":
        """Nothing selected yet, as of ``step``."""
        return cls(last=torch.full(scores.shape, step, dtype=torch.int32, device=scores.device), step=step)

    def update(self, indices: Tensor, step: int) -> None:
        """Note a selection: ``indices`` is ``[B, k]``."""
        self.last.scatter_(-1, indices, step)
        self.step, self.selected = step, indices.numel()

    def repeated(self, indices: Tensor) -> Tensor:
        """How many of ``indices`` were selected at the step before; to be asked before ``update``."""
        if not self.selected:
            return torch.zeros((), dtype=torch.float64, device=indices.device)
        return (self.last.gather(-1, indices) == self.step).sum(dtype=torch.float64)

    def ages(self) -> Tensor:
        """Steps since each row was last selected."""
        return self.step - self.last


def signed_scores(scores: Tensor, indices: Tensor) -> Tensor:
    """Scores in float64, positive where selected and negative where not."""
    signed = -scores.double()
    return signed.scatter_(-1, indices, scores.double().gather(-1, indices))


def age_histogram(ages: Tensor) -> Tensor:
    """Counts of ages in ``AGE_BINS`` bins, float64; mergeable by sum."""
    clamped = ages.flatten().clamp(min=0).double()
    octave = AGE_EXACT + 8 * torch.log2(clamped.clamp(min=AGE_EXACT) / AGE_EXACT)
    bins = torch.where(clamped < AGE_EXACT, clamped, octave).long().clamp(max=AGE_BINS - 1)
    counts = torch.zeros(AGE_BINS, dtype=torch.float64, device=ages.device)
    return counts.index_add_(0, bins, torch.ones_like(clamped))


def age_quantile(counts: Tensor, q: float) -> float:
    """The age below or at which a share ``q`` of the rows lies: exact below 64 steps, then at most 9 % low."""
    total = float(counts.sum())
    if total == 0:
        return math.nan
    reached = counts.cumsum(0) >= q * total * (1 - 1e-12)
    bin_index = int(reached.to(torch.int8).argmax())
    return float(bin_index) if bin_index < AGE_EXACT else AGE_EXACT * 2.0 ** ((bin_index - AGE_EXACT) / 8)


def captured_mass(signed: Tensor) -> float:
    """Σ selected r / Σ r, the mean over stacked matrices; ``signed`` is ``[B, n]``. NaN where nothing has mass."""
    return _mean(signed.clamp(min=0).sum(-1) / signed.abs().sum(-1))


def gini(signed: Tensor) -> float:
    """Σ (2i - n - 1) r_(i) / (n Σ r) over ascending r: 0 for equal rows, towards 1 for one row that holds all."""
    r = signed.abs().sort(dim=-1).values
    n = r.size(-1)
    weights = 2 * torch.arange(1, n + 1, dtype=r.dtype) - n - 1
    return _mean((r * weights).sum(-1) / (n * r.sum(-1)))


def participation_ratio(signed: Tensor) -> float:
    """(Σ r)² / (n Σ r²), in (0, 1]: the share of rows that carry the mass; 1 for equal rows."""
    r = signed.abs()
    return _mean(r.sum(-1).square() / (r.size(-1) * r.square().sum(-1)))


def threshold(signed: Tensor, selected: float) -> float:
    """The smallest selected score; 0 where a selected row has no mass, NaN where any score is."""
    if bool(signed.isnan().any()):
        return math.nan
    positive = signed > 0
    if float(positive.sum()) < selected:
        return 0.0
    return float(torch.where(positive, signed, torch.inf).min())


def churn(both: float, now: float, before: float) -> float:
    """Jaccard distance of the selections of this step and the one before: 1 - |∩| / |∪|; 0 the same, 1 disjoint."""
    union = now + before - both
    return 1 - both / union if union > 0 else math.nan


def _mean(values: Tensor) -> float:
    return float(values.mean())
