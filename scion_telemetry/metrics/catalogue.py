"""Every metric of a weight, gradient, momentum or update, declared once: partial results, formula, unit, source."""

import numpy as np

from scion_telemetry.metrics import relations as r
from scion_telemetry.metrics.declare import Array, HistogramMetric, Measured, Metric, Partial
from scion_telemetry.metrics.declare import Merge as M
from scion_telemetry.rows import column

PARTIALS = {
    p.name: p
    for p in (
        Partial(name="pieces"),  # pieces that were measured; 0: nobody had the quantity
        Partial(name="elements"),
        Partial(name="squares"),
        Partial(name="row_squares", size=lambda s: s.batch * s.rows),
        Partial(name="column_squares", size=lambda s: s.batch * s.columns),
        Partial(name="nonfinite"),
        Partial(name="largest", merge=M.MAX),
        Partial(name="magnitudes"),
        Partial(name="zeros"),
        Partial(name="sigma", size=lambda s: s.batch),  # each matrix measured by `sigma_ranks` ranks
        Partial(name="sigma_upper", size=lambda s: s.batch),
        Partial(name="sigma_second", size=lambda s: s.batch),
        Partial(name="sigma_ranks", size=lambda s: s.batch),
        Partial(name="coherence", size=lambda s: s.batch),
        Partial(name="polar", merge=M.MAX),
        Partial(name="gram_rank", merge=M.MAX),
        Partial(name="gram_lower", merge=M.MAX),
        Partial(name="gram_upper", merge=M.MAX),
        Partial(name="with_weight"),
        Partial(name="with_grad"),
        Partial(name="with_previous"),
        Partial(name="previous_squares"),
        Partial(name="lr", merge=M.MAX),
        Partial(name="decay", merge=M.MAX),
        Partial(name="radius", merge=M.MAX),
    )
}
"""Partial results of the quantities of a parameter. -inf, the neutral element of MAX, says that nobody had it."""

SIGMA = ("sigma", "sigma_upper", "sigma_second", "sigma_ranks")
_SCION = "Large et al. arXiv 2405.14813; Pethick et al. arXiv 2502.07529"
_GRAM = "first Newton-Schulz iteration; Schatten norms bracket σ₁"


def _known(partial: str) -> "r.Where":
    return lambda m, q: m.merged(q, partial) > -np.inf


def _largest(m: Measured, q: str) -> Array:
    # MAX may lose a NaN on its way; the sum of squares keeps it.
    return np.where(np.isnan(m.frobenius(q)), np.nan, m.merged(q, "largest"))


METRICS: tuple[Metric, ...] = (
    Metric(
        name="rms",
        needs=("squares",),
        finish=lambda m, q: m.frobenius(q) / np.sqrt(m.shapes.numel),
        total=lambda m, q, mask: r.total_frobenius(m, q, mask) / float(np.sqrt(m.shapes.numel[mask].sum())),
        unit="entry",
        formula="‖X‖_F / √numel",
        source="definition",
    ),
    Metric(
        name="frobenius",
        needs=("squares",),
        finish=lambda m, q: m.frobenius(q),
        total=r.total_frobenius,
        unit="entry",
        formula="√Σ x²",
        source="definition",
    ),
    Metric(
        name="max_abs",
        needs=("largest", "squares"),
        finish=_largest,
        total=lambda m, q, mask: float(_largest(m, q)[mask].max()),
        unit="entry",
        formula="max |x|",
        source="definition",
    ),
    Metric(
        name="mean_abs",
        needs=("magnitudes",),
        finish=lambda m, q: m.merged(q, "magnitudes") / m.shapes.numel,
        total=lambda m, q, mask: float(m.merged(q, "magnitudes")[mask].sum() / m.shapes.numel[mask].sum()),
        unit="entry",
        formula="Σ |x| / numel",
        source="definition",
    ),
    Metric(
        name="nonfinite",
        needs=("nonfinite",),
        finish=lambda m, q: m.merged(q, "nonfinite"),
        total=lambda m, q, mask: float(m.merged(q, "nonfinite")[mask].sum()),
        unit="entries",
        formula="number of NaN and infinite entries",
        source="definition",
    ),
    Metric(
        name="zero_share",
        needs=("zeros",),
        finish=lambda m, q: m.merged(q, "zeros") / m.shapes.numel,
        total=lambda m, q, mask: float(m.merged(q, "zeros")[mask].sum() / m.shapes.numel[mask].sum()),
        unit="1",
        formula="share of entries that are exactly 0",
        source="definition",
    ),
    Metric(
        name="missing",
        quantities=("grad",),
        needs=(),
        finish=lambda m, q: m.shapes.measurers - m.pieces(q),
        unit="pieces",
        formula="pieces of the parameter, of those that are measured, without a gradient",
        source="definition",
    ),
    Metric(
        name="spectral",
        needs=("row_squares", *SIGMA),
        finish=lambda m, q: m.sigma(q),
        present=lambda m, q: m.has_sigma(q),
        unit="gain",
        formula="σ₁, from below",
        source="Golub and Kahan 1965; block Lanczos with full reorthogonalisation",
    ),
    Metric(
        name="spectral_upper",
        needs=("row_squares", *SIGMA),
        finish=lambda m, q: m.sigma(q, "sigma_upper"),
        present=lambda m, q: m.has_sigma(q),
        unit="gain",
        formula="√(‖X‖_F² - Σ_{j≥2} θ_j) >= σ₁",
        source="Cauchy interlacing",
    ),
    Metric(
        name="sigma_ratio",
        needs=("row_squares", *SIGMA),
        finish=lambda m, q: r.ratio(m.sigma(q, "sigma_second"), m.sigma(q)),
        present=lambda m, q: m.has_sigma(q) & r.is_single(m, q),
        unit="1",
        formula="σ₂ / σ₁, both from below",
        source="definition",
    ),
    Metric(
        name="stable_rank",
        needs=("squares", "row_squares", *SIGMA),
        finish=lambda m, q: r.ratio(m.merged(q, "squares"), m.sigma(q) ** 2),
        present=lambda m, q: m.has_sigma(q) & r.is_single(m, q),
        unit="1",
        formula="‖X‖_F² / σ₁²",
        source="Rudelson and Vershynin 2007",
    ),
    Metric(
        name="rms_to_rms",
        needs=("row_squares", *SIGMA),
        finish=r.rms_to_rms,
        present=lambda m, q: m.has_sigma(q),
        unit="gain",
        formula="σ₁ √(d_in / d_out)",
        source=_SCION,
    ),
    Metric(
        name="l1_to_rms",
        needs=("row_squares", "column_squares"),
        finish=r.l1_to_rms,
        unit="gain",
        formula="max column L2 norm / √d_out",
        source=_SCION,
    ),
    Metric(
        name="rms_to_inf",
        needs=("row_squares", "column_squares"),
        finish=r.rms_to_inf,
        unit="gain",
        formula="√d_in · max row L2 norm",
        source=_SCION,
    ),
    Metric(
        name="row_rms_max",
        needs=("row_squares",),
        present=r.is_matrix,
        finish=lambda m, q: np.sqrt(m.merged(q, "row_squares", np.maximum) / m.shapes.columns),
        unit="entry",
        formula="largest RMS of a row as stored",
        source="Muown arXiv 2605.10797; Aurora arXiv 2606.27715",
    ),
    Metric(
        name="row_rms_min",
        needs=("row_squares",),
        present=r.is_matrix,
        finish=lambda m, q: np.sqrt(m.merged(q, "row_squares", np.minimum) / m.shapes.columns),
        unit="entry",
        formula="smallest RMS of a row as stored",
        source="Muown arXiv 2605.10797; Aurora arXiv 2606.27715",
    ),
    Metric(
        name="row_rms_median",
        needs=("row_squares",),
        present=r.is_matrix,
        finish=lambda m, q: r.row_median(m, q) / np.sqrt(m.shapes.columns),
        unit="entry",
        formula="median RMS of the rows as stored",
        source="Muown arXiv 2605.10797; Aurora arXiv 2606.27715",
    ),
    Metric(
        name="dead_rows",
        needs=("row_squares",),
        present=r.is_matrix,
        finish=r.dead_rows,
        unit="1",
        formula="share of rows whose L2 norm is at most 1 % of the median row's",
        source="Aurora arXiv 2606.27715",
    ),
    Metric(
        name="row_magnitude",
        needs=("row_squares",),
        present=r.is_matrix,
        finish=lambda m, q: np.sqrt(m.merged(q, "row_squares", np.maximum)),
        unit="entry",
        formula="largest L2 norm of a row as stored; σ₁ <= row magnitude · coherence",
        source="Muown arXiv 2605.10797",
    ),
    Metric(
        name="coherence",
        quantities=("weight",),
        needs=("row_squares", "coherence"),
        finish=lambda m, q: m.merged(q, "coherence", np.maximum),
        present=lambda m, q: r.is_matrix(m, q) & (m.merged(q, "coherence", np.minimum) != 0),
        unit="1",
        formula="σ₁ of the matrix with rows of length 1, from below",
        source="Muown arXiv 2605.10797",
    ),
    Metric(
        name="decay",
        quantities=("weight",),
        needs=("decay",),
        finish=lambda m, q: m.merged(q, "decay"),
        present=_known("decay"),
        unit="1/step/lr",
        formula="decoupled weight decay λ in effect: W <- (1 - lr λ) W",
        source="the optimizer's group at the step",
    ),
    Metric(
        name="radius_share",
        quantities=("weight",),
        needs=("radius", "squares", "row_squares", "column_squares", "largest", *SIGMA),
        finish=lambda m, q: r.natural_norm(m, q) / m.merged(q, "radius"),
        present=lambda m, q: _known("radius")(m, q) & np.isfinite(r.natural_norm(m, q)),
        unit="1",
        formula="weight norm in the norm of its rule / radius (scale / λ; scale for constrained Scion)",
        source="Pethick et al. arXiv 2502.07529; arXiv 2506.15054",
    ),
    Metric(
        name="participation_rank",
        quantities=("momentum",),
        needs=("gram_rank",),
        finish=lambda m, q: m.merged(q, "gram_rank"),
        present=_known("gram_rank"),
        unit="1",
        formula="(Σσ²)² / Σσ⁴ of the momentum that is orthonormalised (Dion2: its selected part)",
        source=_GRAM,
    ),
    Metric(
        name="gram_lower",
        quantities=("momentum",),
        needs=("gram_lower",),
        finish=lambda m, q: m.merged(q, "gram_lower"),
        present=_known("gram_lower"),
        unit="gain",
        formula="‖M‖_F √(tr A⁴ / tr A³) <= σ₁ of the same, A = MMᵀ / ‖M‖_F²",
        source=_GRAM,
    ),
    Metric(
        name="gram_upper",
        quantities=("momentum",),
        needs=("gram_upper",),
        finish=lambda m, q: m.merged(q, "gram_upper"),
        present=_known("gram_upper"),
        unit="gain",
        formula="‖M‖_F (tr A⁴)^⅛ >= σ₁ of the same",
        source=_GRAM,
    ),
    Metric(
        name="grad_cosine",
        quantities=("momentum",),
        needs=("squares", "with_grad"),
        also=(("grad", "squares"),),
        finish=lambda m, q: r.cosine(m, q, "with_grad", m.frobenius("grad")),
        unit="1",
        formula="<momentum, grad> / (‖momentum‖_F ‖grad‖_F)",
        source="definition",
    ),
    Metric(
        name="lr",
        quantities=("update",),
        needs=("lr",),
        finish=lambda m, q: m.merged(q, "lr"),
        present=_known("lr"),
        unit="1",
        formula="learning rate in effect",
        source="the optimizer's group at the step",
    ),
    Metric(
        name="weight_ratio",
        quantities=("update",),
        needs=("squares",),
        also=(("weight", "squares"),),
        finish=lambda m, q: r.ratio(m.frobenius(q), m.frobenius("weight")),
        total=lambda m, q, mask: float(
            r.ratio(np.array(r.total_frobenius(m, q, mask)), np.array(r.total_frobenius(m, "weight", mask)))
        ),
        unit="1",
        formula="‖update‖_F / ‖weight‖_F",
        source="modded-nanogpt; Kosson et al. arXiv 2305.17212",
    ),
    Metric(
        name="row_weight_ratio",
        quantities=("update",),
        needs=("row_squares",),
        also=(("weight", "row_squares"),),
        finish=r.worst_row_ratio,
        present=r.is_matrix,
        unit="1",
        formula="largest ‖row of update‖ / ‖row of weight‖, over rows as stored",
        source="modded-nanogpt",
    ),
    Metric(
        name="weight_cosine",
        quantities=("update",),
        needs=("squares", "with_weight"),
        also=(("weight", "squares"),),
        finish=lambda m, q: r.cosine(m, q, "with_weight", m.frobenius("weight")),
        unit="1",
        formula="<update, weight> / (‖update‖_F ‖weight‖_F), the weight after the step: the radial part",
        source="Kosson et al. arXiv 2305.17212; modded-nanogpt",
    ),
    Metric(
        name="previous_cosine",
        quantities=("update",),
        needs=("squares", "with_previous", "previous_squares"),
        finish=lambda m, q: r.cosine(m, q, "with_previous", np.sqrt(m.merged(q, "previous_squares"))),
        present=lambda m, q: m.merged(q, "previous_squares") > 0,
        unit="1",
        formula="<update, update of the step before> / (their Frobenius norms)",
        source="definition",
    ),
    Metric(
        name="polar_error",
        quantities=("update",),
        needs=("polar",),
        finish=lambda m, q: m.merged(q, "polar"),
        present=_known("polar"),
        unit="1",
        formula="‖UUᵀ - I‖_F / √k of the orthonormalised k rows or columns, U = direction √(d_in / d_out)",
        source="Moonlight arXiv 2502.16982",
    ),
)
"""In the order of the columns of one quantity."""

HISTOGRAMS: tuple[HistogramMetric, ...] = (
    HistogramMetric(
        name="row_norms",
        needs=("row_squares",),
        values=lambda m, q: [
            np.zeros(0) if v else np.sqrt(x) for v, x in zip(m.shapes.vector, m.parts(q, "row_squares"), strict=True)
        ],
        unit="entry",
        formula="L2 norms of the rows as stored, four bins an octave that carry counts and mass",
        source="mergeable by sum; Lorenz curves from it are within 0.005",
    ),
)

_COUNTED = ("rms", "max_abs", "nonfinite")
_OPERATOR = ("spectral", "spectral_upper", "rms_to_rms", "l1_to_rms", "rms_to_inf")
_SETTINGS = ("update_lr", "weight_decay")
_SPECTRA = ("spectral", "spectral_upper", "sigma_ratio", "stable_rank", "rms_to_rms")
_ALL = ("weight", "grad", "momentum", "update")

PRESETS = {
    "basic": (
        *(column(q, n) for q in ("weight", "update") for n in (*_COUNTED, *_OPERATOR)),
        *(column(q, n) for q in ("grad", "momentum") for n in _COUNTED),
        *("update_weight_ratio", "weight_radius_share", *_SETTINGS),
    ),
    "norms": (*(column(q, n) for q in _ALL for n in _COUNTED), "update_weight_ratio", *_SETTINGS),
    "spectral": (
        *(column(q, n) for q in _ALL for n in _SPECTRA),
        *("weight_row_magnitude", "weight_coherence", "weight_radius_share", "update_polar_error"),
        *(column("momentum", n) for n in ("participation_rank", "gram_lower", "gram_upper")),
    ),
    "full": tuple(column(q, m.name) for q in _ALL for m in METRICS if q in m.quantities),
}
"""Named choices of columns: ``norms`` needs no iteration; ``basic`` adds operator norms of weights and updates;
``spectral`` is about singular values of all four; ``full`` has every column. Histograms are chosen by name."""
