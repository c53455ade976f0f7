"""What a column says, in the words of the documentation: titles and formulas for figures and dashboards.

Columns are spelled ``{quantity}_{metric}`` (:func:`scion_telemetry.rows.column`). A column that is unknown here keeps
its own name as its title, so new metrics appear without a change in this module.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

QUANTITIES: Final = ("weight", "grad", "momentum", "update")
"""What is measured, in the order in which people look."""

_METRICS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "rms": ("RMS", "Frobenius norm / √numel"),
        "frobenius": ("Frobenius norm", "root of the sum of squares"),
        "max_abs": ("largest magnitude", "max |entry|"),
        "mean_abs": ("mean magnitude", "mean |entry|"),
        "nonfinite": ("non-finite entries", "number of NaN and infinite entries"),
        "zero_share": ("share of zeros", "entries that are exactly 0 / all entries"),
        "missing": ("pieces missing", "pieces of the parameter, of those measured, without one"),
        "spectral": ("spectral norm", "largest singular value σ₁"),
        "spectral_upper": ("upper bound of the spectral norm", "σ₁ is at most this"),
        "sigma_ratio": ("σ₂ / σ₁", "second / largest singular value"),
        "stable_rank": ("stable rank", "squared Frobenius norm / σ₁²"),
        "rms_to_rms": ("RMS→RMS norm", "σ₁ · √(d_in / d_out)"),
        "l1_to_rms": ("ℓ₁→RMS norm", "largest column L2 norm / √d_out"),
        "rms_to_inf": ("RMS→∞ norm", "√d_in · largest row L2 norm"),
        "row_rms_max": ("RMS of the largest row", "largest row L2 norm / √columns, rows as stored"),
        "row_rms_min": ("RMS of the smallest row", "smallest row L2 norm / √columns, rows as stored"),
        "row_rms_median": ("RMS of the median row", "median row L2 norm / √columns, rows as stored"),
        "dead_rows": ("share of dead rows", "rows of at most 1 % of the median row's L2 norm / all rows"),
        "row_magnitude": ("row magnitude", "largest L2 norm of a row as stored"),
        "coherence": ("coherence of the rows", "σ₁ after every row is scaled to length 1"),
        "decay": ("decay", "decoupled λ in effect: W ← (1 - lr λ) W"),
        "radius_share": ("norm / radius", "norm in which its rule measures a step / radius it settles at"),
        "participation_rank": ("participation rank", "(Σσ²)² / Σσ⁴ of the part that is orthonormalised"),
        "gram_lower": ("lower bound of σ₁ from the Gram matrix", "of the part that is orthonormalised"),
        "gram_upper": ("upper bound of σ₁ from the Gram matrix", "of the part that is orthonormalised"),
        "grad_cosine": ("cosine with the gradient", "inner product / both Frobenius norms"),
        "weight_cosine": ("cosine with the weight", "inner product / both Frobenius norms, weight after the step"),
        "previous_cosine": ("cosine with the previous one", "inner product / both Frobenius norms"),
        "lr": ("learning rate", "in effect at this step"),
        "row_weight_ratio": ("/ weight of the worst row", "largest row L2 norm of the update / that of the weight"),
        "polar_error": ("distance from orthonormal", "‖UUᵀ - I‖_F / √k of the orthonormalised k rows or columns"),
    }
)

_WHOLE: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"update_weight_ratio": ("update / weight", "Frobenius norm of the update / that of the weight")}
)

_SELECTION: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "k": ("selected rows or columns k", "number of rows or columns orthonormalised in this step"),
        "fraction": ("realised fraction", "selected / all rows or columns"),
        "captured_mass": ("captured mass", "share of the momentum's L1 mass in the selected rows or columns"),
        "flat_mass": ("captured mass of flat rows", "what Gaussian rows without structure would show"),
        "excess_mass": ("captured mass beyond flat", "(captured - flat) / (1 - flat)"),
        "gini": ("Gini coefficient of the L1 scores", "0: all rows alike, 1: one row holds everything"),
        "flat_gini": ("Gini coefficient of flat rows", "what Gaussian rows without structure would show"),
        "participation_ratio": ("participation ratio", "share of rows that count: (Σr)² / (n Σr²)"),
        "hill": ("tail index of the L1 scores", "of the largest tenth; small: heavy tail, 80 and more: none"),
        "threshold": ("selection threshold", "smallest selected L1 score"),
        "ties": ("ties at the threshold", "not selected, with the smallest selected score"),
        "churn": ("churn of the selection", "1 - selected in both / in either, this step and the one before"),
        "age_p50": ("age since last selected, median", "steps"),
        "age_p99": ("age since last selected, 99th percentile", "steps"),
        "age_max": ("age since last selected, oldest", "steps"),
        "window": ("steps since selections were measured last", "over which they are counted"),
        "coverage": ("rows selected in the window", "share selected at least once in it"),
        "starved": ("starved rows", "share selected less than a tenth as often as the mean"),
        "always": ("always selected rows", "share selected in at least 99 % of the steps"),
        "frequency_gini": ("Gini coefficient of selection frequencies", "0: all alike, 1: always the same few"),
        "horizon": ("steps that a row averages", "1 / ((1 - ef_decay) · fraction)"),
        "unselected_energy": ("momentum left unselected", "Frobenius norm of the unselected part / of the momentum"),
        "ef_growth": (
            "growth of the momentum",
            "L1 norm / the gradient's, over that of a constant gradient; .07 in real training",
        ),
        "grad_gini": ("Gini coefficient of the gradient's rows", "of their L1 norms"),
        "rows_communicated": ("rows communicated", "selected rows or columns that travel between ranks"),
        "regret": ("mass lost to selecting in shards", "1 - mass selected shard by shard / over all"),
        "overlap": ("overlap of shard-wise and global selection", "selected in both / selected"),
        "imbalance": ("imbalance of shards", "most of the global selection in one shard / its share - 1"),
    }
)

_AT: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "mass": ("momentum mass in the largest {at}", "share of its L1 mass in that fraction of the rows"),
        "grad_mass": ("gradient mass in the largest {at}", "share of its L1 mass in that fraction of the rows"),
        "frequency": ("selections of the most selected {at}", "share of the window's selections"),
        "regret": ("mass lost to selecting in {at} shards", "as if cut so at this step; training so loses more"),
    }
)
"""Columns that say where: ``mass_at_0.25``."""


def quantity(column: str) -> str | None:
    """The quantity that a column measures: ``update`` for ``update_weight_ratio``, None for ``gini``."""
    head = column.partition("_")[0]
    return head if head in QUANTITIES and _selection(column) is None else None


def title(column: str) -> str:
    """A column in a few words: ``weight RMS→RMS norm``."""
    return _describe(column)[0]


def formula(column: str) -> str:
    """The formula of a column in words, empty for a column that is unknown here."""
    return _describe(column)[1]


def _describe(column: str) -> tuple[str, str]:
    if column in _WHOLE:
        return _WHOLE[column]
    if (found := _selection(column)) is not None:
        return found
    head, _, metric = column.partition("_")
    if head in QUANTITIES and metric in _METRICS:
        words, how = _METRICS[metric]
        return f"{head} {words}", how
    return column, ""


def _selection(column: str) -> tuple[str, str] | None:
    """Words of a column of selections, None for another one."""
    if column in _SELECTION:
        return _SELECTION[column]
    name, _, at = column.rpartition("_at_")
    if name not in _AT:
        return None
    words, how = _AT[name]
    return words.format(at=at), how
