"""A run of Dion2's selection, and every column that should be told of it, in Python's lists and sets.

The gradients of these tests do not depend on the weights, so the momentum can be followed beside the optimizer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

CURVE = (*(i / 64 for i in (1, 2, 4, 6)), *(i / 16 for i in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15)))
SHARDS = (2, 4, 8, 16, 32, 64)
ALWAYS_THERE = (
    *("k", "fraction", "captured_mass", "flat_mass", "gini", "flat_gini", "participation_ratio"),
    *("threshold", "ties", "age_p50", "age_p99", "age_max", "window", "coverage", "starved", "always"),
    *("frequency_gini", "horizon", "unselected_energy", "rows_communicated"),
    *(f"{what}_at_{f:g}" for what in ("mass", "frequency") for f in CURVE),
)
GRADIENT_SIDE = ("ef_growth", "grad_gini", *(f"grad_mass_at_{f:g}" for f in CURVE))
SOMETIMES = ("excess_mass", "churn", "hill", "regret", "overlap", "imbalance", *(f"regret_at_{w}" for w in SHARDS))
COLUMNS = {*ALWAYS_THERE, *GRADIENT_SIDE, *SOMETIMES}

Floats = list[list[float]]
Pieces = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One step of a parameter: its B matrices with n slices each.

    Args:
        scores: L1 norms of the momentum's slices before they decay.
        energies: Their squares.
        gradient: L1 norms of the gradient's slices.
        selected: Indices by matrix.
        fraction: The option.
    """

    scores: Floats
    energies: Floats
    gradient: Floats
    selected: list[set[int]]
    fraction: float


def count(fraction: float, n: int) -> int:
    """k = max(1, ⌈fraction n⌉)."""
    return min(n, max(1, math.ceil(round(fraction * n, 9))))


def largest(scores: Sequence[float], among: Iterable[int], k: int) -> set[int]:
    """The k largest, of equal ones the first."""
    return set(sorted(among, key=lambda i: (-scores[i], i))[:k])


def largest_of_shards(scores: Sequence[float], shards: Pieces, fraction: float) -> set[int]:
    """What every shard selects for itself: as many as the largest of them should."""
    k = count(fraction, max(map(len, shards)))
    return set().union(*(largest(scores, shard, k) for shard in shards))


def follow(
    gradients: Sequence[Tensor], fractions: Sequence[float], ef_decay: float, shards: Pieces | None = None
) -> list[Moment]:
    """The steps of one parameter.

    Args:
        gradients: Of every step, ``[B, n, length]`` with what is selected from in the middle.
        fractions: Of every step.
        ef_decay: The option.
        shards: Indices of every shard, if each selects for itself.
    """
    momentum, moments = torch.zeros_like(gradients[0]), []
    for gradient, fraction in zip(gradients, fractions, strict=True):
        momentum += gradient
        wide = momentum.double()
        scores = wide.abs().sum(-1).tolist()
        n = len(scores[0])
        selected = [largest_of_shards(r, shards or [range(n)], fraction) for r in scores]
        energies, of_gradient = wide.square().sum(-1).tolist(), gradient.double().abs().sum(-1).tolist()
        moments.append(
            Moment(scores=scores, energies=energies, gradient=of_gradient, selected=selected, fraction=fraction)
        )
        for b, chosen in enumerate(selected):
            for i in chosen:
                momentum[b, i] *= ef_decay
    return moments


def with_scores(moment: Moment, scores: Tensor) -> Moment:
    """The same with the scores that an optimizer saw, to the last bit of float32."""
    torch.testing.assert_close(scores.double(), torch.tensor(moment.scores, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    return replace(moment, scores=scores.double().tolist())


def truth(
    moments: Sequence[Moment],
    flushed: int,
    *,
    length: int,
    ef_decay: float,
    shards: Pieces = (),
    travels: bool = False,
    gradient: bool = True,
) -> dict[str, float]:
    """Every column at the last of ``moments``, which are all steps from the first on.

    Args:
        moments: The steps.
        flushed: Steps that the flush before had seen.
        length: Entries of a slice.
        ef_decay: The option.
        shards: Indices of every shard.
        travels: Selected slices travel between ranks.
        gradient: The gradient's side is measured.
    """
    now = moments[-1]
    n, k = sum(map(len, now.scores)), sum(map(len, now.selected))
    found = {"k": float(k), "fraction": k / n, "rows_communicated": float(k if travels else 0)}
    found |= _of_scores(now, k / n, length) | _of_time(moments, flushed, k / n) | _of_shards(now, shards)
    found["horizon"] = _over(1.0, (1 - ef_decay) * k / n)
    if ef_decay:
        rest = sum(e for b, i, e in _each(now.energies) if i not in now.selected[b])
        found["unselected_energy"] = math.sqrt(rest / sum(e for _, _, e in _each(now.energies)))
    if gradient:
        mass, of_gradient = (sum(map(sum, x)) for x in (now.scores, now.gradient))
        found["ef_growth"] = mass / of_gradient * (1 - ef_decay) * k / n
        found["grad_gini"] = _mean(map(gini, now.gradient))
        found |= _curve("grad_mass", now.gradient)
    return found


def gini(values: Sequence[float]) -> float:
    """Mean difference of all pairs, over twice the mean."""
    pairs = sum(abs(a - b) for a in values for b in values)
    return pairs / (2 * len(values) * sum(values))


def _of_scores(now: Moment, share: float, length: int) -> dict[str, float]:
    found: dict[str, float] = _curve("mass", now.scores)
    pairs = list(zip(now.scores, now.selected, strict=True))
    found["captured_mass"] = _mean(sum(r[i] for i in s) / sum(r) for r, s in pairs)
    spread, normal = math.sqrt((math.pi / 2 - 1) / length), NormalDist()
    found["flat_gini"] = spread / math.sqrt(math.pi)
    found["flat_mass"] = share
    if share < 1:
        found["flat_mass"] += normal.pdf(normal.inv_cdf(1 - share)) * spread
        found["excess_mass"] = (found["captured_mass"] - found["flat_mass"]) / (1 - found["flat_mass"])
    found["gini"] = _mean(map(gini, now.scores))
    found["participation_ratio"] = _mean(sum(r) ** 2 / (len(r) * sum(x * x for x in r)) for r in now.scores)
    found["threshold"] = min(r[i] for r, s in pairs for i in s)
    found["ties"] = float(sum(r[i] == min(r[j] for j in s) for r, s in pairs for i in range(len(r)) if i not in s))
    if len(now.scores[0]) >= 1024:
        found["hill"] = _mean(map(_hill, now.scores))
    return found


def _hill(scores: Sequence[float]) -> float:
    k = len(scores) // 10
    top = sorted(scores, reverse=True)[: k + 1]
    return k / sum(math.log(x / top[k]) for x in top[:k])


def _of_time(moments: Sequence[Moment], flushed: int, share: float) -> dict[str, float]:
    now, step = moments[-1], len(moments)
    window = step - flushed
    ages, times = [], []
    for b, row in enumerate(now.scores):
        for i in range(len(row)):
            steps = [t for t, m in enumerate(moments, 1) if i in m.selected[b]]
            ages.append(step - max(steps, default=0))
            times.append(sum(t > flushed for t in steps))
    ages.sort()
    found = {f"age_p{q}": float(ages[math.ceil(q * len(ages) / 100) - 1]) for q in (50, 99)}
    found |= {"age_max": float(ages[-1]), "window": float(window), "coverage": _mean(t > 0 for t in times)}
    found["starved"] = _mean(10 * t < share * window - 1e-9 for t in times)
    found["always"] = _mean(t >= 0.99 * window for t in times)
    n = len(now.scores[0])
    often = [[times[b * n + i] / window for i in range(n)] for b in range(len(now.scores))]
    found["frequency_gini"] = _mean(map(gini, often))
    found |= _curve("frequency", often)
    if len(moments) > 1:
        one, other = ({(b, i) for b, s in enumerate(m.selected) for i in s} for m in moments[-2:])
        found["churn"] = 1 - len(one & other) / len(one | other)
    return found


def _of_shards(now: Moment, shards: Pieces) -> dict[str, float]:
    found: dict[str, float] = {}
    if len(shards) > 1:
        each = [shard_truth(r, shards, now.fraction) for r in now.scores]
        found |= {name: _mean(e[name] for e in each) for name in each[0]}
    n = len(now.scores[0])
    for world in SHARDS:
        if n >= world:
            size = -(-n // world)
            cuts = [range(a, min(a + size, n)) for a in range(0, n, size)]
            found[f"regret_at_{world}"] = _mean(shard_truth(r, cuts, now.fraction)["regret"] for r in now.scores)
    return found


def shard_truth(scores: Sequence[float], shards: Pieces, fraction: float) -> dict[str, float]:
    """What selecting within every shard loses."""
    n = len(scores)
    local = largest_of_shards(scores, shards, fraction)
    everywhere, best = largest(scores, range(n), len(local)), largest(scores, range(n), count(fraction, n))
    most = max(len(best & set(s)) / len(s) for s in shards if s)
    return {
        "regret": 1 - sum(scores[i] for i in local) / sum(scores[i] for i in everywhere),
        "overlap": len(local & everywhere) / len(local),
        "imbalance": most / (len(best) / n) - 1,
    }


def compare(row: Mapping[str, float], expected: Mapping[str, float], where: object = "") -> None:
    """All columns, and no others; what is made of float32 scores to twelve digits."""
    assert set(row) == set(expected), (where, set(row) ^ set(expected))
    for name, value in expected.items():
        tolerance = 1e-12
        if name == "unselected_energy":  # of sums in float32, and the root of their difference
            tolerance = 2e-5
        elif name in GRADIENT_SIDE:  # L1 norms in float32
            tolerance = 3e-7
        elif name in ("flat_mass", "excess_mass"):  # two ways to the normal quantile
            tolerance = 1e-10
        close = row[name] == value or abs(row[name] - value) <= tolerance * max(1.0, abs(value))
        assert close, (where, name, row[name], value)


def _curve(name: str, values: Floats) -> dict[str, float]:
    return {
        f"{name}_at_{f:g}": _mean(sum(sorted(r, reverse=True)[: count(f, len(r))]) / sum(r) for r in values)
        for f in CURVE
    }


def _each(values: Floats) -> Iterable[tuple[int, int, float]]:
    return ((b, i, x) for b, row in enumerate(values) for i, x in enumerate(row))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _over(over: float, under: float) -> float:
    return over / under if under else math.inf
