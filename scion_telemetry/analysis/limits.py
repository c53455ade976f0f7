"""What a fraction has to keep to, and what says so."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypedDict

from .theory import SHARPNESS

SMALLEST_KNOWN = 0.25
"""The smallest fraction that has been published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a fraction has to keep to. Proposals, not laws: the literature only anchors .25 and .5.

    Numbers are from one study, 39 trainings of a small GPT of 18 matrices (1000 steps, fractions 1 to .0625, 3 seeds,
    4 learning rates): examples/tune_fraction.md. No limit there foretold the loss, which rose at every halving of the
    fraction; they say where rows wait, or the mass is, as in none of the trainings that went well.

    - ``age_horizons`` 3: a limit in steps means nothing across fractions and decays. At the best learning rate the
      99th percentile of the age was .7 to 1.7 horizons in the mean over matrices, at every fraction and ``ef_decay``
      tried; above 3 were at most 10 % of the parameters. At 2 and 4 times that rate it was a tenth to two fifths of
      them, in runs long enough to tell: look at the learning rate first.
    - ``overdue`` .01: of rows rarer than once in 3 horizons there were .1 % at .5, .4 % at .25, 1.5 % at .125 and 4 %
      at .0625 (2 times the best rate, 3 seeds).
    - ``mass`` .3: draws a line between .25, where matrices held .30 to .45 of the mass, and .125, where they held .21;
      there the loss rose most with one halving (.075) at one of two rates. .5 is the careful choice, about a fraction
      of .375: 3 seeds show a loss of .25 but none of .5.
    - ``drift`` .05 only warns: it went up with the learning rate, and the gap in the loss did not.

    Args:
        age_horizons: Oldest 99th percentile of the steps since a row was selected, in momentum horizons
            1 / ((1 - ef) α) of the fraction with the run's ``ef_decay``, with which ages shrink and grow.
        max_age: The same in steps, for those who want one; None: there is none. The stricter of both counts.
        overdue: Largest share of rows that come less often than once in the oldest age allowed. Not the logged
            ``starved``, which is rarer than a tenth of the mean.
        drift: lr · λ · age_p99, shrinkage by weight decay between two steps of a row, above which is warned.
        mass: Smallest share of unequalised L1 mass in the selected rows. Of a flat matrix it says nothing, and where it
            was not measured neither; nothing but ages would speak against a small fraction, so that none below .25 is
            accepted then. 0 switches all of this off.
        flat: A matrix whose excess mass stays below this at every fraction is flat.
        regret: Largest mass that a selection within every shard loses against one over all of them.
        horizon_share: Longest momentum horizon, as a share of all steps of the training, at fractions below 1 - mu,
            where no ``ef_decay`` gives back that of ``mu``; it bars nothing elsewhere.
        total_steps: Of the training that the fraction is for; None: as long as the run is. Counts for
            ``horizon_share`` alone.
        mu: Momentum whose horizon 1 / (1 - µ) a changed ``ef_decay`` shall give back.
        coverage: Share of the parameters whose matrices have to accept a fraction.
        saving: Smallest relative saving over the next larger fraction for which a smaller one is taken.
        sharpness: p of :func:`~.theory.water_fill` by which frequencies are predicted, measured in real training;
            infinite for gradients that hardly vary from step to step.

    Raises:
        ValueError: A limit is out of range.
        TypeError: A limit is no number.
    """

    age_horizons: float = 3.0
    max_age: float | None = None
    overdue: float = 0.01
    drift: float = 0.05
    mass: float = 0.3
    flat: float = 0.05
    regret: float = 0.05
    horizon_share: float = 0.02
    total_steps: int | None = None
    mu: float = 0.95
    coverage: float = 0.95
    saving: float = 0.05
    sharpness: float = SHARPNESS

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.default is None
            if isinstance(value, bool) or not (isinstance(value, Real) or (value is None and optional)):
                raise TypeError(f"{field.name} must be a number{' or None' * optional}, got {value!r}")
        if not self.age_horizons > 0:
            raise ValueError(f"age_horizons must be > 0, got {self.age_horizons!r}; inf leaves max_age alone")
        if self.max_age is not None and not self.max_age >= 1:
            raise ValueError(f"max_age must be None or >= 1 step, got {self.max_age!r}")
        for name in ("overdue", "drift", "mass", "flat", "regret", "horizon_share", "coverage", "saving"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)!r}")
        if not self.sharpness > 0:
            raise ValueError(f"sharpness must be > 0, got {self.sharpness!r}; inf lets a row be full at once")
        if not 0 <= self.mu < 1:
            raise ValueError(f"mu must be in [0, 1), got {self.mu!r}")
        steps: Any = self.total_steps
        if steps is not None and not (isinstance(steps, Integral) and int(steps) >= 1):
            raise ValueError(f"total_steps must be None or a whole number >= 1, got {steps!r}")

    def oldest(self, horizon: float) -> float:
        """Steps that ``age_horizons`` and ``max_age`` allow at a momentum horizon."""
        steps = self.age_horizons * horizon
        return steps if self.max_age is None else min(steps, self.max_age)


class LimitOptions(TypedDict, total=False):
    """The fields of ``Limits`` as keyword arguments."""

    age_horizons: float
    max_age: float | None
    overdue: float
    drift: float
    mass: float
    flat: float
    regret: float
    horizon_share: float
    total_steps: int | None
    mu: float
    coverage: float
    saving: float
    sharpness: float


_RENAMED: Mapping[str, str] = {"starved": "overdue"}


def limits_of(options: Mapping[str, Any]) -> Limits:
    """Limits from keyword arguments.

    Raises:
        ValueError: One is out of range.
        TypeError: One is no number, or there is no limit of this name.
    """
    known = [field.name for field in fields(Limits)]
    for name in options:
        if name not in known:
            close = [_RENAMED[name]] if name in _RENAMED else get_close_matches(name, known, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise TypeError(f"advise() has no limit {name!r}; {guess}Limits are {', '.join(known)}")
    return Limits(**options)
