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
        "spectral": ("spectral norm", "largest singular value σ₁"),
        "spectral_upper": ("upper bound of the spectral norm", "σ₁ is at most this"),
        "max_abs": ("largest magnitude", "max |entry|"),
        "nonfinite": ("non-finite entries", "number of NaN and infinite entries"),
        "rms_to_rms": ("RMS→RMS norm", "σ₁ · √(d_in / d_out)"),
        "l1_to_rms": ("ℓ₁→RMS norm", "largest column L2 norm / √d_out"),
        "rms_to_inf": ("RMS→∞ norm", "√d_in · largest row L2 norm"),
    }
)

_WHOLE: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "update_weight_ratio": ("update / weight", "Frobenius norm of the update / that of the weight"),
        "k": ("selected rows or columns k", "number of rows or columns orthonormalised in this step"),
        "fraction": ("realised fraction", "selected / all rows or columns"),
        "captured_mass": ("captured mass", "share of the momentum's L1 mass in the selected rows or columns"),
        "gini": ("Gini coefficient of the L1 scores", "0: all rows alike, 1: one row holds everything"),
        "participation_ratio": ("participation ratio", "share of rows that count: (Σr)² / (n Σr²)"),
        "threshold": ("selection threshold", "smallest selected L1 score"),
        "churn": ("churn of the selection", "1 - selected in both / in either, this step and the one before"),
        "age_p50": ("age since last selected, median", "steps"),
        "age_p99": ("age since last selected, 99th percentile", "steps"),
        "age_max": ("age since last selected, oldest", "steps"),
    }
)


def quantity(column: str) -> str | None:
    """The quantity that a column measures: ``update`` for ``update_weight_ratio``, None for ``gini``."""
    head = column.partition("_")[0]
    return head if head in QUANTITIES else None


def title(column: str) -> str:
    """A column in a few words: ``weight RMS→RMS norm``."""
    return _describe(column)[0]


def formula(column: str) -> str:
    """The formula of a column in words, empty for a column that is unknown here."""
    return _describe(column)[1]


def _describe(column: str) -> tuple[str, str]:
    if column in _WHOLE:
        return _WHOLE[column]
    head, _, metric = column.partition("_")
    if head in QUANTITIES and metric in _METRICS:
        words, how = _METRICS[metric]
        return f"{head} {words}", how
    return column, ""
