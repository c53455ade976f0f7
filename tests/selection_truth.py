"""What a selection row should say, with Python's lists and sets on whole tensors."""

import math
from collections.abc import Iterable
from statistics import NormalDist

from torch import Tensor

FRACTIONS = (*(i / 64 for i in (1, 2, 4, 6)), *(i / 16 for i in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15)))
WORLDS = (2, 4, 8, 16, 32, 64)


class SelectionTruth:
    """Keeps the history of every parameter; every step is flushed, so that a window is one step."""

    def __init__(self) -> None:
        self.last: dict[str, list[int]] = {}
        self.before: dict[str, set[int]] = {}

    def values(
        self,
        name: str,
        scores: Tensor,
        selected: set[int],
        step: int,
        *,
        length: int,
        fraction: float,
        ef_decay: float,
        momentum: Tensor,
        gradient: Tensor,
    ) -> dict[str, float]:
        """Every column but those of the shards that there are.

        Args:
            name: The parameter.
            scores: ``[B, n]``.
            selected: Positions in ``scores`` when flat.
            step: The step.
            length: Entries of a slice.
            fraction: The option.
            ef_decay: The option.
            momentum: After the step, its slices ``[B, n, length]``.
            gradient: Likewise.
        """
        n, k = scores.numel(), len(selected)
        rows = scores.tolist()
        flags = [[b * len(r) + i in selected for i in range(len(r))] for b, r in enumerate(rows)]
        last = self.last.setdefault(name, [0] * n)
        for i in selected:
            last[i] = step
        ages = sorted(step - t for t in last)
        captured = _mean(
            sum(x for x, f in zip(r, fs, strict=True) if f) / sum(r) for r, fs in zip(rows, flags, strict=True)
        )
        cv = math.sqrt((math.pi / 2 - 1) / length)
        normal, share = NormalDist(), k / n
        flat = share + (normal.pdf(normal.inv_cdf(1 - share)) * cv if share < 1 else 0.0)
        least = [min(x for x, f in zip(r, fs, strict=True) if f) for r, fs in zip(rows, flags, strict=True)]
        often = [[float(f) for f in fs] for fs in flags]
        grads = gradient.abs().sum(-1).tolist()
        found = {
            "k": k,
            "fraction": share,
            "captured_mass": captured,
            "flat_mass": flat,
            "gini": _mean(map(_gini, rows)),
            "flat_gini": cv / math.sqrt(math.pi),
            "participation_ratio": _mean(sum(r) ** 2 / (len(r) * sum(x * x for x in r)) for r in rows),
            "threshold": min(least),
            "ties": sum(
                x == y and not f
                for r, fs, y in zip(rows, flags, least, strict=True)
                for x, f in zip(r, fs, strict=True)
            ),
            "age_p50": ages[math.ceil(n / 2) - 1],
            "age_p99": ages[math.ceil(0.99 * n) - 1],
            "age_max": ages[-1],
            "window": 1,
            "coverage": share,
            "starved": 1 - share,
            "always": share,
            "frequency_gini": _mean(map(_gini, often)),
            "horizon": 1 / ((1 - ef_decay) * share),
            "unselected_energy": _unselected(momentum, flags, ef_decay),
            "ef_growth": sum(map(sum, rows)) / sum(map(sum, grads)) * (1 - ef_decay) * share,
            "grad_gini": _mean(map(_gini, grads)),
        }
        for what, values in (("mass", rows), ("grad_mass", grads), ("frequency", often)):
            for f in FRACTIONS:
                found[f"{what}_at_{f:g}"] = _mean(
                    sum(sorted(r)[-max(1, math.ceil(f * len(r))) :]) / sum(r) for r in values
                )
        for world in WORLDS:
            if len(rows[0]) >= world:
                size = math.ceil(len(rows[0]) / world)
                cuts = [range(a, min(a + size, len(rows[0]))) for a in range(0, len(rows[0]), size)]
                found[f"regret_at_{world}"] = _mean(_regret(r, cuts, fraction) for r in rows)
        if share < 1:
            found["excess_mass"] = (captured - flat) / (1 - flat)
        if name in self.before:
            found["churn"] = 1 - len(self.before[name] & selected) / len(self.before[name] | selected)
        self.before[name] = selected
        return found


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _gini(r: list[float]) -> float:
    return sum((2 * i - len(r) - 1) * x for i, x in enumerate(sorted(r), 1)) / (len(r) * sum(r))


def _unselected(momentum: Tensor, flags: list[list[bool]], ef_decay: float) -> float:
    """‖M_unselected‖ / ‖M‖ before the selected slices decayed."""
    energy = momentum.double().square().sum(-1).tolist()
    kept = [
        [x / ef_decay**2 if f else x for x, f in zip(e, fs, strict=True)] for e, fs in zip(energy, flags, strict=True)
    ]
    rest = sum(x for e, fs in zip(energy, flags, strict=True) for x, f in zip(e, fs, strict=True) if not f)
    return math.sqrt(rest / sum(map(sum, kept)))


def _regret(r: list[float], shards: Iterable[range], fraction: float) -> float:
    """Every shard selects as many as the largest one does, as far as it has them."""
    shards = list(shards)
    k = max(1, math.ceil(fraction * max(map(len, shards))))
    best = [sorted((r[i] for i in s), reverse=True)[:k] for s in shards]
    count, mass = sum(map(len, best)), sum(map(sum, best))
    return max(0.0, 1 - mass / sum(sorted(r, reverse=True)[:count]))
