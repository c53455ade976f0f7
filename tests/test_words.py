"""The words of figures and dashboards against the catalogue of metrics, which they must cover without importing it."""

import pytest

from scion_telemetry import words
from scion_telemetry.dashboards.wandb_workspace import DEFAULT_COLUMNS
from scion_telemetry.metrics.catalogue import METRICS, PRESETS
from scion_telemetry.metrics.declare import QUANTITIES
from scion_telemetry.metrics.selection_columns import SELECTION_METRICS
from scion_telemetry.rows import column

LAYERS = [(column(q, m.name), q) for m in METRICS for q in m.quantities]
SELECTION = [m.name for m in SELECTION_METRICS]


def test_every_metric_has_its_own_words() -> None:
    columns = [name for name, _ in LAYERS] + SELECTION
    assert all(words.title(name) != name and words.formula(name) for name in columns)
    assert len({words.title(name) for name in columns}) == len(columns)


@pytest.mark.parametrize(("name", "quantity"), LAYERS)
def test_the_quantity_is_read_off_the_column(name: str, quantity: str) -> None:
    assert words.quantity(name) == quantity
    assert words.title(name).startswith(quantity)


def test_a_selection_measures_no_quantity() -> None:
    assert {words.quantity(name) for name in SELECTION} == {None}
    assert set(words.QUANTITIES) == set(QUANTITIES)


def test_an_unknown_column_keeps_its_name() -> None:
    assert (words.title("weight_novelty"), words.formula("weight_novelty")) == ("weight_novelty", "")
    assert (words.title("angle"), words.formula("angle")) == ("angle", "")


def test_the_default_dashboard_shows_what_a_default_run_logs() -> None:
    assert set(DEFAULT_COLUMNS) <= {name for name, _ in LAYERS} | {f"selection_{name}" for name in SELECTION}
    settings = {"update_lr", "weight_decay", "weight_radius_share"}  # a column each, where a run says that it has them
    bounds = {"weight_spectral_upper", "update_spectral_upper"}
    assert set(PRESETS["basic"]) - set(DEFAULT_COLUMNS) == bounds | settings
    first = (
        "captured_mass",
        "fraction",
        "k",
        "gini",
        "participation_ratio",
        "threshold",
        "churn",
        "age_p50",
        "age_max",
    )
    assert {f"selection_{name}" for name in first} <= set(DEFAULT_COLUMNS)
