"""The raster of selected rows against the table it is drawn from, its null against brute force, and what plot skips."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage, PcolorImage
from selection_run import KINDS, selection_run
from test_plots import assert_texts_apart, full_run, model, one_column, texts, ys
from typer.testing import CliRunner

from scion_telemetry import plots
from scion_telemetry._plot_raster import FLUSHES, ROWS, picture, sample, streaks
from scion_telemetry.cli import app
from scion_telemetry.store import Run, load_run


def flagged(run: Run, flags: dict[tuple[str, int], np.ndarray], steps: list[int]) -> Run:
    """The run with these flags [flushes, rows] for its table of selected rows."""
    rows = [
        (step, name, matrix, mask.shape[1], base64.b64encode(np.packbits(row).tobytes()).decode())
        for (name, matrix), mask in flags.items()
        for step, row in zip(steps, mask, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["step", "param", "matrix", "count", "rows"]).sort_values("step", kind="stable")
    table.to_csv(run.path / "selected.csv", index=False)
    return load_run(run.path)


def drawn(ax: Axes) -> np.ndarray:
    (image,) = (c for c in ax.get_children() if isinstance(c, AxesImage | PcolorImage))
    return np.asarray(image.get_array(), dtype=float)


def panels(figure: Figure) -> dict[str, Axes]:
    """By the first line of their titles."""
    return {ax.get_title("left").splitlines()[0]: ax for ax in figure.axes if ax.get_title("left")}


# What is drawn


def test_rows_are_sorted_by_how_often_they_were_selected_and_dark_where_they_were(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 4)
    figure = plots.selection_raster(run)
    found = panels(figure)
    assert list(found) == [f"layers.0.{kind}" for kind in KINDS[:4]]
    for name, ax in found.items():
        flags = run.raster(name).to_numpy()
        rows = sorted(range(128), key=lambda r, flags=flags: (-flags[:, r].sum(), r))  # type: ignore[misc]
        assert np.array_equal(drawn(ax), np.array([flags[:, r] for r in rows], dtype=float))
        assert ax.get_ylim() == (1, 0), "the first row is at the top"
        assert ax.get_xlim() == (5, 85), "half a flush beside 10 and 80"
        (line,) = (line for line in ax.lines if line.get_gid() == "fraction")
        assert ys(line) == [pytest.approx(flags.mean())] * 2
        starts = sum(flags[t, r] and not (t and flags[t - 1, r]) for t in range(8) for r in range(128))
        assert f"α = {flags.mean():.3g}, streak {flags.sum() / starts:.2f} (random" in ax.get_title("left")
    said = texts(figure)
    assert "horizontal bands" in said
    assert "1 / (1 - α)" in said
    assert "share a cell" not in said


def test_steps_at_uneven_distances_and_a_single_flush(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 1)
    mask = np.random.default_rng(0).random((4, 12)) < 0.5
    ax = next(
        iter(panels(plots.selection_raster(flagged(run, {("layers.0.attn.wq", 0): mask}, [1, 2, 4, 8]))).values())
    )
    assert ax.get_xlim() == (0.5, 10)
    (image,) = (c for c in ax.get_children() if isinstance(c, PcolorImage))
    assert image._Ax.tolist() == [0.5, 1.5, 3, 6, 10]  # type: ignore[attr-defined]
    one = plots.selection_raster(flagged(run, {("layers.0.attn.wq", 0): mask[:1]}, [7]))
    assert one.axes[0].get_xlim() == (6.5, 7.5)


def test_tall_matrices_and_long_runs_share_cells(tmp_path: Path) -> None:
    count, times = 2 * ROWS + 7, 3 * FLUSHES - 1
    mask = np.random.default_rng(0).random((times, count)) < np.linspace(0, 1, count)
    run = selection_run(tmp_path / "run", 1)
    steps = list(range(5, 5 * times + 1, 5))
    figure = plots.selection_raster(flagged(run, {("layers.0.attn.wq", 0): mask}, steps))
    found = drawn(figure.axes[0])
    rows = sorted(range(count), key=lambda r: (-mask[:, r].sum(), r))
    assert found.shape == (-(-count // 3), -(-times // 3))
    for i in (0, 17, found.shape[0] - 1):
        for t in (0, 50, found.shape[1] - 1):
            cell = mask[3 * t : 3 * t + 3, rows[3 * i : 3 * i + 3]]
            assert found[i, t] == pytest.approx(cell.mean())
    assert "up to 3 rows and 3 flushes share a cell" in texts(figure)
    assert "selected share of a cell" in texts(figure)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (ROWS, FLUSHES), (ROWS + 1, 1), (1, FLUSHES + 1)])
def test_cells_cover_everything_once(shape: tuple[int, int]) -> None:
    mask = np.random.default_rng(1).random(shape[::-1]) < 0.3
    one = picture(pd.DataFrame(mask, index=pd.Index(range(1, shape[1] + 1), name="step")))
    assert (one.x.size, one.y.size) == (one.share.shape[1] + 1, one.share.shape[0] + 1)
    area = np.outer(np.diff(one.y) * shape[0], np.diff(one.x))
    assert (one.share * area).sum() == pytest.approx(mask.sum())
    assert (one.y[0], one.y[-1], one.x[0], one.x[-1]) == (0, 1, 0.5, shape[1] + 0.5)
    assert one.share.max() <= 1
    assert one.share.min() >= 0


# The null


@pytest.mark.parametrize(("n", "k", "times"), [(64, 16, 400), (64, 48, 400), (10, 3, 2), (12, 12, 5)])
def test_streaks_of_random_selection(n: int, k: int, times: int) -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2 if times > 100 else 400):
        mask = np.zeros((times, n), dtype=bool)
        for row in mask:
            row[rng.permutation(n)[:k]] = True
        found.append((mask.sum(), sum(mask[0]) + (np.diff(mask.astype(int), axis=0) == 1).sum()))
    selected, starts = np.sum(found, axis=0)
    own, random = streaks(mask)
    assert own == pytest.approx(found[-1][0] / found[-1][1])
    assert random == pytest.approx(selected / starts, rel=0.02)
    if times > 100:
        assert random == pytest.approx(1 / (1 - k / n), rel=0.01)


def test_streaks_of_the_same_rows_of_turns_and_of_none() -> None:
    same = np.tile([True, False, False, False], (10, 1))
    turns = np.array([[row % 4 == t % 4 for row in range(8)] for t in range(12)])
    assert streaks(same)[0] == 10
    assert list(streaks(turns)) == [1, pytest.approx(12 / (1 + 11 * 0.75))]
    assert streaks(same & False) == (0, 0)


# Many matrices


def test_of_many_matrices_as_many_of_every_kind_are_shown() -> None:
    pairs = [(f"layers.{i}.{kind}", 0) for i in range(50) for kind in KINDS]
    assert sample(pairs, ["hidden"] * 400, 24) == [(f"layers.{i}.{kind}", 0) for kind in KINDS for i in (0, 24, 49)]
    assert sample(pairs[:24], ["hidden"] * 24, 24) == pairs[:24]
    stack = [("experts.w1", m) for m in range(100)] + [("head", 0)]
    assert sample(stack, ["expert"] * 100 + ["hidden"], 4) == [("experts.w1", 0), ("experts.w1", 99), ("head", 0)]
    odd = [(f"part{chr(97 + i)}.w", 0) for i in range(26)]
    assert sample(odd, ["hidden"] * 26, 24)[0::23] == [odd[0], odd[25]]


@pytest.mark.parametrize("count", [4, 400])
def test_few_and_many_are_legible(tmp_path: Path, count: int) -> None:
    run = selection_run(tmp_path / "run", count, steps=3)
    figure = plots.selection_raster(run)
    plots.save(figure, tmp_path / "raster.png")
    assert len(panels(figure)) == min(count, 24)
    assert ("24 of 400 matrices" in texts(figure)) == (count == 400)
    assert_texts_apart(figure, "selection_raster")
    for ax in panels(figure).values():
        assert ax.get_window_extent().height >= ROWS, "a pixel a cell"
        assert ax.get_window_extent().width >= FLUSHES


def test_stacked_matrices_have_a_panel_each(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 2)
    rng = np.random.default_rng(0)
    flags = {("layers.0.attn.wk", m): rng.random((3, 16)) < 0.25 for m in range(12)}
    figure = plots.selection_raster(flagged(run, flags, [1, 2, 3]))
    assert list(panels(figure)) == [f"layers.0.attn.wk [{m}]" for m in range(12)]
    own = flags["layers.0.attn.wk", 10]
    assert drawn(panels(figure)["layers.0.attn.wk [10]"]).sum() == own.sum()


# Not measured


def without(run: Run, *names: str, **info: Any) -> Run:
    for name in names:
        (run.path / f"{name}.csv").unlink()
    (run.path / "run.json").write_text(json.dumps({**run.info, **info}), encoding="utf-8")
    return load_run(run.path)


def test_the_figure_says_why_it_has_nothing_to_draw(tmp_path: Path) -> None:
    run = without(selection_run(tmp_path / "a", 2), "selected", selection_rows=False)
    figure = plots.selection_raster(run)
    assert plots.missing(figure) == "not measured: choose the metric selection_rows"
    assert "not measured: choose the metric selection_rows" in texts(figure)
    begun = without(selection_run(tmp_path / "b", 2), "selected")
    assert plots.missing(plots.selection_raster(begun)) == "nothing measured yet"
    nothing = one_column(tmp_path / "c", {"w": [1.0, 2.0]})
    assert plots.missing(plots.selection_raster(nothing)) == (
        "not measured: no optimizer of this run selects rows or columns"
    )
    unasked = without(selection_run(tmp_path / "d", 2), "selected", "selection", selection_columns=[])
    for draw in (plots.mass_curves, plots.captured_mass, plots.churn_over_steps, plots.age_distribution):
        assert plots.missing(draw(unasked)) == "not measured: choose the metric selection"


def test_a_figure_that_shows_something_lacks_nothing(tmp_path: Path) -> None:
    run = selection_run(tmp_path / "run", 4)
    for name in ("selection_raster", "frequencies_over_steps", "mass_curves", "churn_over_steps", "captured_mass"):
        assert plots.missing(plots.FIGURES[name](run)) is None, name
    assert plots.missing(plots.overview(one_column(tmp_path / "other", {"w": [1.0]}))) is None


def test_plot_leaves_out_what_was_not_measured_and_says_so_once(tmp_path: Path) -> None:
    run = without(selection_run(tmp_path / "run", 2), "selected", "histograms", selection_rows=False)
    done = CliRunner().invoke(app, ["plot", str(run.path)])
    assert done.exit_code == 0, done.output
    missing = ["frequencies_over_steps", "selection_raster"]
    for name in missing:
        assert f"left out {name}: not measured: choose the metric" in done.stderr
        assert done.output.count(name) == 1
    assert "choose the metric selection_rows" in done.stderr
    assert "choose the metric selection_frequencies" in done.stderr
    written = {path.stem for path in (run.path / "figures").iterdir()}
    assert {str(run.path / "figures" / f"{name}.png") for name in written} == set(done.stdout.split())
    assert written.isdisjoint(missing)
    assert {"overview", "selection_ranks", "mass_curves", "age_distribution"} <= written


def test_plot_of_a_run_that_selects_nothing_has_no_page_of_selections(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", model(1))
    table = run.path / "selection.csv"
    table.unlink(missing_ok=True)
    done = CliRunner().invoke(app, ["plot", str(run.path)])
    assert done.exit_code == 0, done.output
    written = {path.stem for path in (run.path / "figures").iterdir()}
    assert written == {"overview", "norms_over_steps", "update_weight_by_layer"}
    assert done.stderr.count("\n") <= 2, done.stderr
