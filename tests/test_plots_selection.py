"""Figures of selections against the tables they are drawn from, and their nulls against brute force."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from advise_run import Matrix, lognormal
from advise_run import write as write_simulated
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.figure import Figure
from selection_run import ALPHA, EVERY, FRACTIONS, KINDS, WIDTH, WORLDS, selection_run
from test_plots import assert_texts_apart, axes_of, one_column, texts, xs, ys
from typer.testing import CliRunner

from scion_telemetry import _plot_nulls as nulls
from scion_telemetry import plots
from scion_telemetry._plot_selection_data import groups
from scion_telemetry.analysis import advise, estimators, theory
from scion_telemetry.cli import app
from scion_telemetry.store import Run, load_run

NAMES = [f"layers.0.{kind}" for kind in KINDS[:4]]
SELECTION = (
    *("mass_curves", "mass_heatmap", "selection_ranks", "selection_raster", "frequencies_over_steps"),
    *("age_distribution", "churn_over_steps", "regret_by_shards"),
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return selection_run(tmp_path_factory.mktemp("runs") / "four", 4)


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return selection_run(tmp_path_factory.mktemp("runs") / "forty", 40)


def lines(ax: Axes, gid: str) -> list[Any]:
    return [line for line in ax.lines if line.get_gid() == gid]


def at(run: Run, name: str, step: int) -> "pd.Series[Any]":
    table = run.selection
    return table[(table["param"] == name) & (table["step"] == step)].iloc[0]


def late(run: Run, name: str) -> pd.DataFrame:
    """Rows of the second half: steps 50 to 80 of 10 to 80."""
    table = run.selection
    return table[(table["param"] == name) & (table["step"] >= 50)]


# Nulls


def test_flat_rows_capture_what_the_reference_says_and_what_gaussian_rows_do() -> None:
    assert nulls.flat_curve(np.array([0.25]), 768)[0] == pytest.approx(0.2587, abs=5e-5)
    scores = np.abs(np.random.default_rng(0).standard_normal((40_000, 64))).sum(1)
    truth = [float(estimators.captured_mass(scores, f)) for f in FRACTIONS]
    assert nulls.flat_curve(np.array(FRACTIONS), 64) == pytest.approx(truth, abs=1.5e-3)
    assert nulls.flat_curve(np.array(FRACTIONS), None).tolist() == list(FRACTIONS)


def test_the_width_of_rows_is_read_back_from_the_gini_coefficient_as_it_is_written() -> None:
    for width in (*range(1, 300), 768, 4096, 53248):
        assert nulls.width_of(float(f"{theory.flat_gini(width):.9g}")) == width


@pytest.mark.parametrize(("steps", "share"), [(1, 0.25), (10, 0.25), (37, 0.9), (400, 1 / 64), (5, 1.0), (5, 0.0)])
def test_binomial_chances_and_quantiles(steps: int, share: float) -> None:
    truth = [math.comb(steps, c) * share**c * (1 - share) ** (steps - c) for c in range(steps + 1)]
    assert nulls.binomial(steps, share) == pytest.approx(truth, rel=1e-9, abs=1e-200)
    for q in (0.025, 0.3, 0.975):
        least = next(c for c in range(steps + 1) if sum(truth[: c + 1]) >= q)
        assert float(nulls.binomial_quantile(steps, share, np.array([q]))[0]) == least / steps


def test_random_selection_is_concentrated_as_a_short_window_makes_it() -> None:
    drawn = np.random.default_rng(0).binomial(10, 0.25, 400_000)
    truth = [float(estimators.captured_mass(drawn, f)) for f in FRACTIONS]
    assert nulls.random_curve(np.array(FRACTIONS), 10, 0.25) == pytest.approx(truth, abs=2e-3)


def test_ages_and_churn_of_random_selection() -> None:
    rng = np.random.default_rng(0)
    n, k, last, before = 4000, 1000, np.zeros(4000), np.zeros(4000, dtype=bool)
    ages, churn = [], []
    for step in range(400):
        now = np.zeros(n, dtype=bool)
        now[rng.permutation(n)[:k]] = True
        last[now] = step
        if step > 100:
            ages.append(step - last)
            churn.append(1 - (now & before).sum() / (now | before).sum())
        before = now
    truth = [(np.array(ages) > age).mean() for age in range(10)]
    assert nulls.geometric_survival(np.arange(10.0), 0.25) == pytest.approx(truth, abs=2e-3)
    assert float(nulls.churn_of(np.array(0.25))) == pytest.approx(np.mean(churn), abs=1e-3)
    assert float(nulls.churn_of(np.array(0.25))) == pytest.approx(1 - 1 / 7)


@pytest.mark.parametrize(("n", "shards"), [(4096, 2), (4096, 8), (1024, 64), (512, 8)])
def test_regret_of_flat_rows(n: int, shards: int) -> None:
    rng = np.random.default_rng(0)
    scores = 1 + theory.flat_gini(256) * math.sqrt(math.pi) * rng.standard_normal((400, n))
    quota = math.ceil(0.25 * n / shards)
    local = np.sort(scores.reshape(400, shards, -1), axis=-1)[..., -quota:].sum((-2, -1))
    best = np.sort(scores, axis=-1)[:, -quota * shards :].sum(-1)
    assert nulls.flat_regret(n, 0.25, 256, shards) == pytest.approx((1 - local / best).mean(), rel=0.15)


# What is drawn


def test_captured_mass_curves_are_those_of_the_last_step(four: Run) -> None:
    figure = plots.mass_curves(four)
    assert len(figure.axes) == 4
    for ax, name in zip(figure.axes, NAMES, strict=True):
        row = at(four, name, 80)
        for prefix in ("mass", "grad_mass"):
            (line,) = lines(ax, prefix)
            assert xs(line) == [0, *FRACTIONS, 1]
            assert ys(line) == [0, *(row[f"{prefix}_at_{f:g}"] for f in FRACTIONS), 1]
        (null,) = lines(ax, "null")
        assert np.interp(0.25, xs(null), ys(null)) == pytest.approx(0.2587, abs=2e-4)
        (dot,) = lines(ax, "selected")
        assert (xs(dot), ys(dot)) == ([ALPHA], [row["captured_mass"]])
        assert ax.get_title("left") == name
    assert "flat rows" in texts(figure)
    assert "step 80" in texts(figure)


def test_a_chosen_step_and_one_that_was_not_measured(four: Run) -> None:
    (line,) = lines(plots.mass_curves(four, step=30).axes[1], "mass")
    assert ys(line)[1:-1] == [at(four, NAMES[1], 30)[f"mass_at_{f:g}"] for f in FRACTIONS]
    for draw in (plots.mass_curves, plots.mass_heatmap):
        with pytest.raises(ValueError, match=r"step 31 was not measured; measured steps: 10, 20"):
            draw(four, step=31)


def test_a_side_that_is_measured_more_rarely_is_shown_from_its_own_last_step(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 2)
    table = pd.read_csv(run.path / "selection.csv")
    table.loc[table["step"] > 40, [c for c in table.columns if c.startswith("grad_mass")]] = np.nan
    table.to_csv(run.path / "selection.csv", index=False)
    run = Run(path=run.path, info=run.info)
    figure = plots.mass_curves(run)
    (gradient,) = lines(figure.axes[0], "grad_mass")
    assert ys(gradient)[1:-1] == [at(run, NAMES[0], 40)[f"grad_mass_at_{f:g}"] for f in FRACTIONS]
    assert "steps 40 to 80" in texts(figure)


def test_many_curves_are_bands_by_kind(forty: Run) -> None:
    figure = plots.mass_curves(forty)
    assert [ax.get_title("left") for ax in figure.axes] == [f"layers.*.{kind} (5)" for kind in KINDS]
    for ax, kind in zip(figure.axes, KINDS, strict=True):
        rows = [at(forty, f"layers.{i}.{kind}", 80) for i in range(5)]
        truth = {p: [np.median([r[f"{p}_at_{f:g}"] for r in rows]) for f in FRACTIONS] for p in ("mass", "grad_mass")}
        assert [ys(line)[1:-1] for line in lines(ax, "median")] == [pytest.approx(y) for y in truth.values()]
        best = int(np.argmax([r["mass_at_0.25"] for r in rows]))
        assert any(f"layers.{best}.{kind}" in text.get_text() for text in ax.texts)


def test_without_the_gradient_the_figure_says_how_to_get_it(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 2, gradient=False)
    for draw in (plots.mass_curves, plots.mass_heatmap):
        assert "choose the metric selection_gradient" in texts(draw(run))


def test_the_heatmap_holds_every_curve_and_its_null(forty: Run) -> None:
    figure = plots.mass_heatmap(forty)
    above, below = figure.axes[:3], figure.axes[3:6]
    names = [str(name) for name in forty.params["name"]]
    for ax, strip, prefix in zip(above, below, ("mass", "grad_mass", "frequency"), strict=True):
        columns = [f"{prefix}_at_{f:g}" for f in FRACTIONS]
        truth = np.array([at(forty, name, 80)[columns].to_numpy(dtype=float) for name in names])
        assert np.array_equal(np.asarray(ax.images[0].get_array()), truth)
        null = nulls.random_curve(np.array(FRACTIONS), EVERY, ALPHA)
        if prefix != "frequency":
            null = np.array([theory.flat_mass(f, WIDTH) for f in FRACTIONS])
        assert np.asarray(strip.images[0].get_array())[0] == pytest.approx(null)
        (half,) = lines(ax, "half")
        for row in range(len(names)):
            x = float(np.interp(0.5, truth[row], range(len(FRACTIONS))))
            assert xs(half)[2 * row : 2 * row + 2] == pytest.approx([x, x])
            assert ys(half)[2 * row : 2 * row + 2] == [row - 0.5, row + 0.5]
        assert [xs(line)[0] for line in lines(ax, "null")] == [
            pytest.approx(np.interp(0.5, null, range(len(FRACTIONS))))
        ]


def test_rows_are_ranked_by_how_often_they_were_selected(four: Run) -> None:
    figure = plots.selection_ranks(four)
    for ax, name in zip(figure.axes, NAMES, strict=True):
        own = four.slices[four.slices["param"] == name]
        truth = sorted((own["selected"] / own["steps"]).tolist(), reverse=True)
        (line,) = lines(ax, "frequency")
        assert ys(line) == truth
        assert xs(line) == pytest.approx([(i + 0.5) / 128 for i in range(128)])
        share = float(np.mean(truth))
        assert ys(lines(ax, "starved")[0])[0] == pytest.approx(share / 10)
        starved, always = np.mean(np.array(truth) < share / 10), np.mean(np.array(truth) >= 0.99)
        assert f"starved {starved:.1%}, always {always:.1%}" in texts(figure)
    (null,) = lines(figure.axes[0], "null")
    assert np.mean(ys(null)) == pytest.approx(0.25, abs=0.01)
    (band,) = (p for p in figure.axes[0].patches if p.get_gid() == "band")
    sd = math.sqrt(0.25 * 0.75 / 80)
    low, high = (float(y) for y in band.get_window_extent().transformed(figure.axes[0].transData.inverted()).intervaly)
    assert [low, high] == pytest.approx([0.25 - 1.96 * sd, 0.25 + 1.96 * sd], abs=0.01)


def test_the_raster_counts_rows_by_frequency(four: Run) -> None:
    figure = plots.frequencies_over_steps(four)
    for ax, name in zip(figure.axes[:4], NAMES, strict=True):
        (mesh,) = (c for c in ax.collections if isinstance(c, QuadMesh))
        drawn: Any = np.ma.filled(np.ma.asarray(mesh.get_array()), 0.0)
        table = four.histograms[four.histograms["param"] == name]
        for number, step in enumerate(range(10, 90, 10)):
            now = table[table["step"] == step]
            never = now.loc[np.isneginf(now["log2"]), "count"].sum() / 128
            assert drawn[0, number] == pytest.approx(never)
            for _, one in now[np.isfinite(now["log2"])].iterrows():
                assert drawn[drawn.shape[0] - 1 + round(4 * one["log2"]), number] == pytest.approx(one["count"] / 128)
        assert drawn.sum(axis=0) == pytest.approx(np.ones(8))
        low, high = lines(ax, "null")
        # 95 % of Binomial(10, 1/4) lie between 0 and 5: "never", and the bin that starts at 1/2.
        assert set(ys(low)) == {0.5}
        assert set(ys(high)) == {drawn.shape[0] - 5 + 0.5}


def test_ages_are_medians_of_the_second_half_with_the_geometric_law(four: Run) -> None:
    figure = plots.age_distribution(four)
    for ax, name in zip(figure.axes, NAMES, strict=True):
        own = late(four, name)
        (line,) = lines(ax, "age")
        assert xs(line) == [own[c].median() for c in ("age_p50", "age_p99", "age_max")]
        assert ys(line) == [0.5, 0.01, pytest.approx(1 / 128)]
        (null,) = lines(ax, "null")
        assert ys(null)[:4] == pytest.approx([0.75, 0.75**2, 0.75**3, 0.75**4])
        assert null.get_drawstyle() == "steps-post"
        (whiskers,) = (c for c in ax.collections if isinstance(c, LineCollection))
        assert [tuple(s[:, 0]) for s in whiskers.get_segments()] == [
            (pytest.approx(own[c].quantile(0.1)), pytest.approx(own[c].quantile(0.9)))
            for c in ("age_p50", "age_p99", "age_max")
        ]
        low, high = ax.get_xlim()
        assert low < 0
        assert high > max(xs(line))


@pytest.mark.parametrize(("oldest", "words"), [(1e6, "oldest never"), (40.0, "oldest 40")])
def test_below_a_hundred_rows_no_point_stands_at_a_share_that_cannot_be(
    oldest: float, words: str, tmp_path: Path
) -> None:
    matrix = Matrix(name="w", scales=lognormal(16), columns={"age_p50": 2.0, "age_max": oldest})
    figure = plots.age_distribution(write_simulated(tmp_path / "run", matrix))
    (line,) = lines(figure.axes[0], "age")
    assert (xs(line), ys(line)) == ([2.0, oldest], [0.5, 1 / 16])
    assert f"α = 0.25\n{words}" in texts(figure)
    assert ("has not been selected since the tracker began" in texts(figure)) == (words == "oldest never")


def test_churn_stands_against_random_selection_and_its_missing_first_value_is_no_finding(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 4)
    table = pd.read_csv(run.path / "selection.csv")
    table.loc[table["step"] == 10, "churn"] = np.nan
    table.to_csv(run.path / "selection.csv", index=False)
    ax = axes_of(plots.churn_over_steps(run := Run(path=run.path, info=run.info)))
    data = [line for line in ax.lines if line.get_gid() is None]
    assert [ys(line) for line in data] == [
        run.selection.loc[(run.selection["param"] == name) & (run.selection["step"] > 10), "churn"].tolist()
        for name in NAMES
    ]
    (null,) = lines(ax, "reference")
    assert ys(null) == pytest.approx([6 / 7] * 7)
    assert not lines(ax, "nan")


def test_regret_by_shards_with_the_limit_and_the_shards_there_are(four: Run) -> None:
    figure = plots.regret_by_shards(four)
    ax = axes_of(figure)
    data = [line for line in ax.lines if line.get_gid() is None]
    assert [ys(line) for line in data] == [
        [late(four, name)[f"regret_at_{w}"].median() for w in WORLDS] for name in NAMES
    ]
    assert all(xs(line) == list(WORLDS) for line in data)
    assert set(ys(lines(ax, "limit")[0])) == {0.05}
    assert ys(lines(ax, "null")[0]) == [pytest.approx(nulls.flat_regret(128, 0.25, WIDTH, w)) for w in WORLDS]
    (own,) = lines(ax, "own")
    assert (xs(own), ys(own)) == ([2.0] * 4, [0.01] * 4)
    low, high = ax.get_ylim()
    assert low < 0.05 < high
    assert "the run's own shards" in texts(figure)


def test_a_run_without_shards_has_no_mark_for_them(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 2)
    table = pd.read_csv(run.path / "params.csv")
    table["options"] = table["options"].str.replace('"shards": 2', '"shards": 1')
    table.to_csv(run.path / "params.csv", index=False)
    figure = plots.regret_by_shards(load_run(run.path))
    assert not lines(axes_of(figure), "own")
    assert "the run's own shards" not in texts(figure)


def test_captured_mass_over_the_steps_stands_against_flat_rows_where_the_run_says_them(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 2)
    table = pd.read_csv(run.path / "selection.csv").assign(flat_mass=0.2587)
    table.to_csv(run.path / "selection.csv", index=False)
    info = {**run.info, "selection_columns": [*run.info["selection_columns"], "flat_mass"]}
    for shown, level in ((run, 0.25), (Run(path=run.path, info=info), 0.2587)):
        (null,) = lines(axes_of(plots.captured_mass(shown)), "reference")
        assert set(ys(null)) == {level}


# The explorer


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Any:
    matrices = [
        Matrix(
            name=f"layers.{i}.w",
            scales=lognormal(128, seed=i, sigma=0.4 * i),
            role="expert" if i == 3 else "hidden",
            options={"shards": 4},
        )
        for i in range(4)
    ]
    return advise(write_simulated(tmp_path_factory.mktemp("runs") / "advised", *matrices))


def test_the_explorer_shows_what_the_advice_predicts(advised: Any) -> None:
    figure = plots.fraction_explorer(advised)
    frame = advised.to_frame()
    grouped = frame.groupby(["role", "fraction"])
    roles = [group.role for group in advised.groups]
    for panel, column in ((0, "age_p99"), (1, "overdue"), (3, "flops")):
        ax = figure.axes[panel]
        medians = grouped[column].median()
        assert [ys(line) for line in lines(ax, "median")] == [pytest.approx(medians[role].tolist()) for role in roles]
    totals = grouped["bytes"].sum() / 1e6
    assert [ys(line) for line in lines(figure.axes[4], "total")] == [pytest.approx(totals[r].tolist()) for r in roles]
    for ax in figure.axes:
        assert [xs(line)[0] for line in lines(ax, "chosen")] == [group.fraction for group in advised.groups]
        assert [xs(line) for line in lines(ax, "now")] == [sorted(set(group.current)) for group in advised.groups]
    for group in advised.groups:
        assert f"{group.role}: α = {group.fraction:g}, binding: {group.binding}" in texts(figure)
    limits = advised.limits
    (line,) = lines(figure.axes[0], "limit")
    assert dict(zip(xs(line), ys(line), strict=True))[0.25] == pytest.approx(3 * 20 / 0.25)
    for panel, limit in ((1, limits.overdue), (2, limits.mass), (5, limits.coverage)):
        (line,) = lines(figure.axes[panel], "limit")
        assert set(ys(line)) == {limit}
    (null,) = lines(figure.axes[0], "null")
    assert dict(zip(xs(null), ys(null), strict=True))[0.25] == pytest.approx(math.log(0.01) / math.log(0.75))
    assert_texts_apart(figure, "explorer")


# Any run


@pytest.mark.parametrize("count", [1, 4, 24, 40, 400])
def test_legible_for_any_number_of_matrices(tmp_path: Path, count: int) -> None:
    run = selection_run(tmp_path / "run", count, steps=3 if count == 400 else 8)
    for name in SELECTION:
        figure = plots.FIGURES[name](run)
        width, height = (float(size) for size in figure.get_size_inches())
        assert 10 < width <= 17, name
        assert 3 < height <= 15, name
        assert len(figure.axes) <= 25, name
        assert all(len(ax.lines) <= 32 for ax in figure.axes), name
        assert_texts_apart(figure, name)
        for ax in figure.axes:
            box = ax.get_window_extent()
            assert box.width > 90, name
            assert box.height > 8, name


def test_a_run_that_selects_nothing_says_so(tmp_path: Path) -> None:
    run = one_column(tmp_path / "run", {"w": [1.0, 2.0]})
    for name in SELECTION:
        assert "no optimizer of this run selects rows or columns" in texts(plots.FIGURES[name](run)), name


def test_a_run_that_still_lives_says_what_is_missing(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 2)
    for name in ("slices", "histograms"):
        (run.path / f"{name}.csv").unlink()
    run = Run(path=run.path, info=run.info)
    assert "when the tracker" in texts(plots.selection_ranks(run))
    assert "choose the metric selection_frequencies" in texts(plots.frequencies_over_steps(run))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_the_first_flush_and_a_calibration_at_fraction_one(tmp_path: Path, steps: int, alpha: float) -> None:
    run = selection_run(tmp_path / "run", 3, steps=steps, alpha=alpha)
    for name in SELECTION:
        plots.save(plots.FIGURES[name](run), tmp_path / f"{name}.png")


WHO = ("selection_ranks", "age_distribution", "churn_over_steps", "regret_by_shards")


def test_where_everything_is_selected_who_is_goes_without_saying(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "whole", 3, alpha=1.0)
    done = CliRunner().invoke(app, ["plot", str(run.path)])
    assert done.exit_code == 0, done.output
    (said,) = (line for line in done.stderr.splitlines() if "every row is selected at every step (fraction 1)" in line)
    assert sorted(said.partition(":")[0].removeprefix("left out ").split(", ")) == sorted(WHO)
    assert {"mass_curves", "mass_heatmap"} <= {path.stem for path in (run.path / "figures").iterdir()}
    table = pd.read_csv(run.path / "selection.csv")
    table.loc[table["step"] == 40, "fraction"] = 0.25
    table.to_csv(run.path / "selection.csv", index=False)
    assert [plots.missing(plots.FIGURES[name](load_run(run.path))) for name in WHO] == [None] * 4


def test_parameters_share_a_panel_by_their_kind_or_by_role() -> None:
    assert groups(["a.0.w", "a.1.w", "a.1.v", "h"], ["x"] * 4) == {"a.*.w": [0, 1], "a.*.v": [2], "h": [3]}
    assert groups(["0.w", "1.w2"], ["x", "x"]) == {"*.w": [0], "*.w2": [1]}
    many = [f"a.{chr(97 + i)}.w" for i in range(13)]
    assert groups(many, ["x"] * 12 + ["y"]) == {"x": list(range(12)), "y": [12]}


def test_every_figure_of_selections_is_offered_by_name() -> None:
    assert set(SELECTION) <= set(plots.FIGURES)
    assert isinstance(plots.FIGURES["mass_curves"].__doc__, str)
    assert plots.fraction_explorer.__annotations__["return"] is Figure


def test_advise_draws_the_explorer_when_asked(tmp_path: Path) -> None:
    write_simulated(tmp_path / "run", Matrix(name="w", scales=lognormal(64)))
    figure = tmp_path / "explorer.svg"
    done = CliRunner().invoke(app, ["advise", str(tmp_path / "run"), "--figure", str(figure)])
    assert done.exit_code == 0, done.output
    assert str(figure) in done.output.replace("\n", "")
    assert "fraction explorer" in figure.read_text(encoding="utf-8")
