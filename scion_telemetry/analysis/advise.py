"""Which fraction, and why: the smallest one that keeps rows fresh, holds the mass, and is worth having.

Dion2 ranks rows (or columns) of the momentum by **L1 norm**. For every candidate fraction the distribution of selection
frequencies is predicted from the growth rates that one run at one fraction reveals (:func:`~.theory.water_fill`), and
held to :class:`~.records.Limits`. It says how many rows wait and how long, not which: another training waits for other
rows. No number here says that the loss will be as good: that takes an A/B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from scion_telemetry.store import Run

from . import theory
from .changes import changes
from .decay import longest_kept, mended_decay
from .evidence import gather
from .limits import SMALLEST_KNOWN, LimitOptions, Limits, limits_of
from .notes import note_on_flat
from .records import CANDIDATES, Advice, Candidate, Evidence, GroupAdvice, MatrixAdvice
from .refusals import refuse_arguments

SEED_SD = 0.0013
"""Standard deviation over seeds of the final validation loss of a 124 M GPT, measured on public runs."""

_BURSTS = 3.0
"""Measured ages over those by chance, of frequencies predicted from fraction 1, in the median of 18 matrices, 3 seeds:
2.8 at .5, 3.0 at .25, 3.1 at .125, 3.5 at .0625; scaled by it, one matrix is off by a factor of 1.6 to 1.8."""

_CHANCE = 4 / 3
"""The same of frequencies that were counted at .25: 1.2 at .5, 1.6 at .125, 1.3 at .0625; off by 1.7 to 1.8."""

_GAPS = (0.001, 0.002, 0.005, 0.01)


def advise(
    run: Run,
    *,
    calibration: Run | None = None,
    seed_sd: float = SEED_SD,
    candidates: Sequence[float] = CANDIDATES,
    **limits: Unpack[LimitOptions],
) -> Advice:
    """The smallest fraction that a run's telemetry supports, per matrix and per role. The top-k is by L1 norm.

    Args:
        run: A run of Dion2 or Dion3 of at least 200 steps at a fraction below 1; or at 1 throughout, from which advice
            is coarser.
        calibration: A run at fraction 1; not needed where ``run`` itself has a window at 1.
        seed_sd: Standard deviation of the final loss over seeds, for the table of how many seeds an A/B takes.
        candidates: Fractions to try; 1 is always among them.
        limits: Fields of :class:`Limits`: ``age_horizons``, ``overdue``, ``mass``, ``regret``, ``total_steps``, ...

    Raises:
        ValueError: The run cannot support advice, a limit is out of range, or a candidate is.
        TypeError: An argument is of another kind, or no limit has this name.
    """
    refuse_arguments(run, calibration, seed_sd, candidates)
    kept = limits_of(limits)
    tried = tuple(sorted({1.0, *candidates}, reverse=True))
    found, notes = gather(run, calibration)
    if kept.mass > 0:
        notes += note_on_flat([e for e in found if _flat_everywhere(e, kept.flat)], len(found))
    roles = dict.fromkeys(e.role for e in found)
    told = [_advise_role([e for e in found if e.role == role], kept, tried) for role in roles]
    by_name = {m.evidence.param: m for _, matrices in told for m in matrices}
    return Advice(
        run=str(run.path),
        limits=kept,
        total_steps=kept.total_steps or max(e.total_steps for e in found),
        total_steps_from="given" if kept.total_steps else "run",
        groups=tuple(group for group, _ in told),
        matrices=tuple(by_name[e.param] for e in found),
        notes=tuple(notes),
        caveat=_caveat(seed_sd),
        seeds={gap: theory.seeds_per_arm(gap, seed_sd) for gap in _GAPS},
    )


def _caveat(seed_sd: float) -> str:
    whose = "as told"
    if seed_sd == SEED_SD:
        whose = "that of a 124 M GPT, where the study had .0009 to .019; give yours as seed_sd, --seed-sd"
    return (
        "This is about rows and costs, not about the loss. Before a fraction is called as good as another, compare "
        f"both over seeds: with a standard deviation of {seed_sd:g} over seeds ({whose}), a gap of .002 in the mean "
        f"loss takes {theory.seeds_per_arm(0.002, seed_sd)} seeds per arm (two-sided 5 %, power 80 %)."
    )


def predicted_frequency(
    evidence: Evidence, fraction: float, steps: int | None = None, *, sharpness: float = theory.SHARPNESS
) -> np.ndarray:
    """Selection frequencies ``[matrices, n]`` at a fraction; with local scope within every shard for itself.

    In another training only their distribution can be relied on. Sorted, they were right within .014 at .125 and .06 at
    .5, from .25; row by row they correlate by .56 to .67 with those of the other training, because its gradients take
    another path. From the very same gradients the correlation is above .9.

    Args:
        evidence: Of the matrix.
        fraction: As an option; what counts is the realised one.
        steps: Counted over a training of so many steps from the start; None: in the long run, once all rows had a turn.
        sharpness: p of :func:`~.theory.water_fill`.
    """

    def fill(rates: np.ndarray, k: int) -> np.ndarray:
        realised = min(1.0, k / rates.shape[1])
        # Only rates that were counted have a unit, in which what a row saves up can be told.
        if steps is None or evidence.source != "slices":
            return theory.water_fill(rates, realised, sharpness=sharpness)
        return theory.cold_fill(rates, realised, steps, evidence.ef_decay, sharpness=sharpness)

    if evidence.scope == "global" or evidence.shards == 1 or evidence.source == "curve":
        return fill(evidence.rates, theory.selected_count(evidence.n, fraction, evidence.shards, evidence.scope))
    sizes = theory.shard_sizes(evidence.n, evidence.shards)
    quota = theory.selected_count(sizes[0], fraction)
    pieces = np.split(evidence.rates, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([fill(p, quota) if p.shape[1] else p for p in pieces], axis=1)


def predicted_age(
    evidence: Evidence, fraction: float, q: float = 0.99, *, sharpness: float = theory.SHARPNESS
) -> float:
    """Quantile of the age at a fraction: (measured + 1) · (periodic(α') + 1) / (periodic(α) + 1) - 1.

    In real training gradients come in bursts, and rows get several times as old as their period, older than chance has
    it even, by about the same factor at every fraction. From .25, the median matrix was predicted at 1.2 times what
    came at .5, .95 at .125 and 1.1 at .0625 (18 matrices, 3 seeds; one matrix is off by a factor of 1.4 to 1.6), where
    the period alone says a quarter. Where no age was logged, or so many rows wait for their first selection that the
    measured quantile is theirs, it is 4/3 of the age by chance, and from a run at fraction 1 three times that age, as
    was measured. Where the tail is only known as a curve, the measured age is moved by the level of the water.
    """
    if fraction == 1:
        return 0.0
    if evidence.source == "curve" and evidence.age_p99 is not None:
        own, there = (
            float(theory.fill_level(evidence.rates, f, sharpness=sharpness).mean())
            for f in (evidence.fraction, fraction)
        )
        return max(0.0, (evidence.age_p99 + 1) * there / own - 1)
    frequency = predicted_frequency(evidence, fraction, sharpness=sharpness)
    if evidence.source == "calibration":
        return _BURSTS * (theory.geometric_age(frequency, q) + 1) - 1
    period = theory.periodic_age(predicted_frequency(evidence, evidence.fraction, sharpness=sharpness), q)
    if evidence.age_p99 is None or evidence.never > (1 - q) / 2 or not np.isfinite(period):
        return _CHANCE * (theory.geometric_age(frequency, q) + 1) - 1
    return max(0.0, (evidence.age_p99 + 1) * (theory.periodic_age(frequency, q) + 1) / (period + 1) - 1)


def advise_matrix(
    evidence: Evidence, limits: Limits, tried: Sequence[float] = CANDIDATES, *, scope: str | None = None
) -> MatrixAdvice:
    """Try every fraction on one matrix.

    Args:
        evidence: What was measured.
        limits: What a fraction has to keep to.
        tried: Fractions, descending.
        scope: Selection scope to predict with; None: that of the run.
    """
    flat = _flat_everywhere(evidence, limits.flat)
    asked = evidence if scope is None else replace(evidence, scope=scope)
    candidates: list[Candidate] = []
    for fraction in tried:
        candidate = _candidate(asked, limits, fraction, flat)
        before = candidates[-1].cost if candidates else float("inf")
        candidates.append(replace(candidate, saving=1 - candidate.cost / before if before < float("inf") else 0.0))
    costs = [c.cost for c in candidates]
    best, binding = _smallest([c.failed for c in candidates], costs, limits.saving)
    without = [{name: v for name, v in c.failed.items() if name != "regret"} for c in candidates]
    best_global, _ = _smallest(without, costs, limits.saving)
    return MatrixAdvice(
        evidence=evidence,
        scope=asked.scope,
        candidates=tuple(candidates),
        fraction=candidates[best].fraction,
        binding=binding,
        global_fraction=candidates[best_global].fraction,
    )


def _smallest(failed: Sequence[Mapping[str, float]], costs: Sequence[float], saving: float) -> tuple[int, str]:
    """Go down until something fails, resting where enough is saved: where that ends, and what stands against less."""
    best, binding = 0, "none"
    for i in range(1, len(failed)):
        if breaks := failed[i]:
            return best, max(breaks, key=breaks.__getitem__)
        if costs[i] <= (1 - saving) * costs[best]:
            best, binding = i, "none"
        else:
            binding = "saving"
    return best, binding


def _candidate(e: Evidence, limits: Limits, fraction: float, flat: bool) -> Candidate:
    frequency = predicted_frequency(e, fraction, sharpness=limits.sharpness)
    age = predicted_age(e, fraction, sharpness=limits.sharpness)
    k = theory.selected_count(e.n, fraction, e.shards, e.scope)
    mass, excess = _mass(e, fraction)
    horizon = theory.horizon(fraction, e.ef_decay)
    limit = limits.oldest(horizon)
    mended = mended_decay(e, fraction, limits.mu)
    flops = theory.newton_schulz_flops(k, e.width) / theory.newton_schulz_flops(e.n, e.width)
    cut = e.shards > 1
    made = Candidate(
        fraction=fraction,
        k=k,
        age_p99=age,
        age_limit=limit,
        overdue=theory.overdue_share(frequency, limit),
        always=float((frequency >= 0.99).mean()),
        drift=0.0 if e.decays_selected else theory.decay_drift(e.lr, e.weight_decay, age),
        mass=mass,
        excess=excess,
        regret=None if not cut or e.scope == "global" or e.regret is None else e.regret if fraction < 1 else 0.0,
        horizon=horizon,
        ef_decay=e.ef_decay if mended is None else mended,
        flops=flops,
        bytes=e.matrices * theory.transport_bytes(k, e.width, e.shards),
        cost=(flops + k / e.n) / 2 if cut else flops,
        saving=0.0,
        failed={},
        warned={},
    )
    share = limits.horizon_share * (limits.total_steps or e.total_steps)
    # What is wanted of the momentum is never too long, whatever the length of the training.
    longest = max(share, theory.horizon(1.0, e.ef_decay), longest_kept(limits.mu))
    failed = _failed(made, limits, flat, longest if mended is None else float("inf"))
    return replace(made, failed=failed, warned=_broken({"drift": _over(made.drift, limits.drift)}))


def _mass(e: Evidence, fraction: float) -> tuple[float | None, float | None]:
    if not e.mass:
        return None, None
    at, share = [0.0, *e.mass], [0.0, *e.mass.values()]
    if at[-1] < 1:
        at, share = [*at, 1.0], [*share, 1.0]
    mass = float(np.interp(fraction, at, share))
    return mass, theory.excess_mass(mass, theory.flat_mass(fraction, e.width))


def _flat_everywhere(evidence: Evidence, limit: float) -> bool:
    """Whether the mass curve is as flat as noise at every fraction: there any fraction holds its own share."""
    pairs = [(c, theory.flat_mass(f, evidence.width)) for f, c in evidence.mass.items() if f < 1]
    return bool(pairs) and max((c - null) / (1 - null) for c, null in pairs) < limit


def _failed(c: Candidate, limits: Limits, flat: bool, longest: float) -> dict[str, float]:
    """Limits that are broken, with value over limit; a captured mass that is too small counts as limit over value."""
    lost = 0.0 if c.mass is None else _over(limits.mass, c.mass)
    # A flat curve is no more evidence for a fraction below the published ones than none is.
    unknown = SMALLEST_KNOWN / c.fraction
    return _broken(
        {
            "age": c.age_p99 / c.age_limit,
            "overdue": _over(c.overdue, limits.overdue),
            "mass": 0.0 if flat else lost,
            "flat": unknown if flat and lost > 1 else 0.0,
            "unmeasured": unknown if c.mass is None and limits.mass > 0 else 0.0,
            "regret": 0.0 if c.regret is None else _over(c.regret, limits.regret),
            "horizon": c.horizon / longest,
        }
    )


def _broken(ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: ratio for name, ratio in ratios.items() if ratio > 1 + 1e-9}


def _over(value: float, limit: float) -> float:
    return value / limit if limit > 0 else float("inf") if value > 0 else 0.0


def _advise_role(
    found: Sequence[Evidence], limits: Limits, tried: Sequence[float]
) -> tuple[GroupAdvice, list[MatrixAdvice]]:
    """Advice on one role; with global scope where local selection loses too much: a larger fraction is no cure for it.

    The regret at other fractions than the run's is not known, so that local scope leaves nothing but fraction 1.
    """
    matrices = [advise_matrix(e, limits, tried) for e in found]
    group = _group(found[0].role, matrices, limits)
    losing = [e for e in found if e.scope == "local" and (e.regret or 0.0) > limits.regret]
    if sum(e.parameters for e in losing) <= (1 - limits.coverage) * sum(e.parameters for e in found):
        return group, matrices
    worst = max(losing, key=lambda e: e.regret or 0.0)
    matrices = [advise_matrix(e, limits, tried, scope="global") for e in found]
    change = (
        f'selection_scope="global" for the sake of mass: local selection loses more than {limits.regret:.0%} of the '
        f"mass in {len(losing)} of {len(found)} matrices ({worst.regret:.0%} in {worst.param}); in the study no "
        "difference in loss could be claimed"
    )
    return _group(found[0].role, matrices, limits, change), matrices


def _group(role: str, matrices: Sequence[MatrixAdvice], limits: Limits, scope: str = "") -> GroupAdvice:
    weights = np.array([m.evidence.parameters for m in matrices], dtype=float)
    tried = [c.fraction for c in matrices[0].candidates]
    share = [float(weights @ [m.candidates[i].accepted for m in matrices] / weights.sum()) for i in range(len(tried))]
    costs = [float(weights @ [m.candidates[i].cost for m in matrices]) for i in range(len(tried))]
    failed = [{} if s >= limits.coverage else _failing(matrices, i) for i, s in enumerate(share)]
    best, binding = _smallest(failed, costs, limits.saving)
    worst, value = _worst(matrices, binding, best + 1)
    return GroupAdvice(
        role=role,
        matrices=len(matrices),
        scope=matrices[0].scope,
        current=(min(m.evidence.fraction for m in matrices), max(m.evidence.fraction for m in matrices)),
        fraction=tried[best],
        binding=binding,
        worst=worst,
        worst_value=value,
        accepted=dict(zip(tried, share, strict=True)),
        changes=tuple(changes(matrices, best, binding, limits, scope)),
    )


def _failing(matrices: Sequence[MatrixAdvice], i: int) -> dict[str, float]:
    """Parameters that the limits which are broken most hold back at candidate ``i``."""
    held: dict[str, float] = {}
    for m in matrices:
        if breaks := m.candidates[i].failed:
            name = max(breaks, key=breaks.__getitem__)
            held[name] = held.get(name, 0.0) + m.evidence.parameters
    return held


def _worst(matrices: Sequence[MatrixAdvice], binding: str, start: int) -> tuple[str, float]:
    """The matrix that breaks a limit most at the first fraction where the group stops."""
    for i in range(start, len(matrices[0].candidates)):
        broken = {m.evidence.param: m.candidates[i].failed.get(binding, 0.0) for m in matrices}
        name = max(broken, key=broken.__getitem__)
        if broken[name] > 0:
            return name, broken[name]
    return "", float("nan")
