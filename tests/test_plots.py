"""Figures against the numbers they are drawn from: what is shown, what is marked, and what must not be touched."""

import csv
import json
import os
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from scion_telemetry import plots, rows
from scion_telemetry._plot_axes import scale_for
from scion_telemetry._plot_labels import shorten, spread
from scion_telemetry.store import Run, load_run

ROOT = Path(__file__).resolve().parents[1]
NAN, INF = float("nan"), float("inf")

Cells = dict[tuple[int, str], dict[str, float]]
"""(step, parameter) to the cells of a row; a cell that is missing was not measured."""


def write_run(
    path: Path,
    params: Sequence[tuple[str, str]],
    layers: Cells,
    selection: Cells | None = None,
    scalars: Iterable[tuple[int, str, float]] = (),
) -> Run:
    """A run directory as the CSV sink leaves it, read by the store."""
    path.mkdir(parents=True)
    columns = {
        name: list(dict.fromkeys(column for row in cells.values() for column in row))
        for name, cells in (("layers", layers), ("selection", selection or {}))
    }
    info = {
        "schema_version": 1,
        "attributes": {},
        "layer_columns": columns["layers"],
        "selection_columns": columns["selection"],
        "units": {},
    }
    (path / "run.json").write_text(json.dumps(info), encoding="utf-8")
    facts = ["name", "aliases", "role", "shape", "dtype", "layout", "algorithm", "options"]
    listed = [[name, "", role, "8x8", "float32", "whole", "dion2", "{}"] for name, role in params]
    _table(path / "params.csv", facts, listed)
    for name, cells in (("layers", layers), ("selection", selection or {})):
        body = [[step, param, *map(row.get, columns[name])] for (step, param), row in cells.items()]
        _table(path / f"{name}.csv", ["step", "param", *columns[name]], body)
    _table(path / "scalars.csv", ["step", "name", "value"], [list(row) for row in scalars])
    return load_run(path)


def _table(path: Path, header: list[str], body: list[list[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([header, *([rows.text(cell) for cell in row] for row in body)])


def model(blocks: int) -> list[tuple[str, str]]:
    inner = [
        (f"layers.{b}.{name}", "vector" if name == "norm" else "hidden")
        for b in range(blocks)
        for name in ("attn.wq", "attn.wo", "mlp.w1", "mlp.w2", "norm")
    ]
    return [("embed", "embedding"), *inner, ("head", "head")]


def full_run(path: Path, params: Sequence[tuple[str, str]], steps: int = 6) -> Run:
    """A run in which every panel has something to show."""
    rng = np.random.default_rng(0)
    layers: Cells = {}
    selection: Cells = {}
    for step in range(10, 10 * steps + 1, 10):
        for name, role in params:
            row = {"weight_rms": 1 + rng.random(), "weight_nonfinite": 0.0, "update_weight_ratio": 1e-3 * rng.random()}
            layers[step, name] = row if role == "vector" else {"weight_rms_to_rms": 1 + step * rng.random(), **row}
            if role == "hidden":
                selection[step, name] = {"k": 2.0, "fraction": 0.25, "captured_mass": 0.25 + 0.1 * rng.random()}
    scalars = [(s, "train_loss", 5.0 / s) for s in range(1, 10 * steps + 1)]
    scalars += [(s, "val_loss", 5.5 / s) for s in range(20, 10 * steps + 1, 20)]
    return write_run(path, params, layers, selection, sorted(scalars))


def one_column(path: Path, series: Mapping[str, Sequence[float | None]], column: str = "grad_rms", **more: Any) -> Run:
    """A run with one column: parameter to its values at steps 1, 2, ...; None was not measured."""
    layers: Cells = {}
    for name, values in series.items():
        for step, value in enumerate(values, 1):
            layers[step, name] = {} if value is None else {column: value}
    return write_run(path, [(name, "hidden") for name in series], layers, **more)


def xs(line: Line2D) -> list[float]:
    return [float(x) for x in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(y) for y in np.asarray(line.get_ydata())]


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def marks(ax: Axes, kind: str) -> list[float]:
    """The x of everything marked as ``zeros`` or ``nan``."""
    return sorted({float(x) for line in ax.lines if line.get_gid() == kind for x in xs(line)})


def drawn(ax: Axes) -> list[Line2D]:
    """Lines of data: neither marks nor reference lines nor lone dots."""
    return [line for line in ax.lines if line.get_gid() is None and line.get_linestyle() != "None"]


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


# What is drawn


def test_a_line_per_parameter_in_model_order_with_its_own_values(tmp_path: Path) -> None:
    names = [f"layers.{i}.w" for i in range(12)]
    series = {name: [i + 1.0, i + 1.5, i + 1.25] for i, name in enumerate(names)}
    figure = plots.norms_over_steps(one_column(tmp_path / "run", series), "grad_rms")
    lines = drawn(axes_of(figure))
    assert [ys(line) for line in lines] == list(series.values())
    assert all(xs(line) == [1, 2, 3] for line in lines)
    assert len({to_hex(line.get_color()) for line in lines}) == 12
    labels = [text.get_text() for text in axes_of(figure).texts]
    assert [name for name in labels if name in names] == names


def test_a_parameter_without_the_column_is_left_out(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", model(1))
    assert len(drawn(axes_of(plots.norms_over_steps(run, "weight_rms_to_rms")))) == 6
    assert len(drawn(axes_of(plots.norms_over_steps(run, "weight_rms")))) == 7


def test_chosen_parameters_alone(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", model(2))
    chosen = ["layers.1.attn.wq", "head"]
    figure = plots.norms_over_steps(run, "weight_rms", params=chosen)
    truth = [run.layers.loc[run.layers["param"] == name, "weight_rms"].tolist() for name in chosen]
    assert [ys(line) for line in drawn(axes_of(figure))] == truth


def test_many_lines_become_a_band_with_the_right_edges(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    series = {f"layers.{i}.w": list(map(float, rng.random(3) + 1)) for i in range(31)}
    figure = plots.norms_over_steps(one_column(tmp_path / "run", series), "grad_rms")
    ax = axes_of(figure)
    outer, inner = (c for c in ax.collections if isinstance(c, FillBetweenPolyCollection))
    for step in range(3):
        column = sorted(values[step] for values in series.values())
        tenths = statistics.quantiles(column, n=10, method="inclusive")
        for band, low, high in ((outer, column[0], column[-1]), (inner, tenths[0], tenths[-1])):
            path = np.asarray(band.get_paths()[0].vertices)
            heights = path[path[:, 0] == step + 1, 1]
            assert heights.min() == pytest.approx(low)
            assert heights.max() == pytest.approx(high)
    medians = [statistics.median(values[step] for values in series.values()) for step in range(3)]
    assert any(ys(line) == pytest.approx(medians) for line in drawn(ax))
    last = {name: values[-1] for name, values in series.items()}
    assert max(last, key=last.__getitem__) in texts(figure)
    assert min(last, key=last.__getitem__) in texts(figure)


def test_a_thousand_layers_by_two_hundred_steps(tmp_path: Path) -> None:
    params = [(f"layers.{i}.w", "hidden") for i in range(1000)]
    layers = {
        (step, name): {"weight_rms_to_rms": 1.0 + (i * 7919 + step) % 1000, "update_weight_ratio": 1e-3 * (i + step)}
        for step in range(1, 201)
        for i, (name, _) in enumerate(params)
    }
    run = write_run(tmp_path / "run", params, layers)
    assert len(run.layers) == 200_000
    start = time.perf_counter()
    figure = plots.overview(run)
    plots.save(figure, tmp_path / "overview.png")
    assert time.perf_counter() - start < 10
    for ax in figure.axes:
        legend = ax.get_legend()
        assert len(ax.lines) <= 24
        assert legend is None or len(legend.get_texts()) <= 12


def test_update_weight_by_layer_shows_each_parameter_at_its_place(tmp_path: Path) -> None:
    params = model(2)
    run = full_run(tmp_path / "run", params)
    for step, chosen in ((60, None), (20, 20)):
        ax = axes_of(plots.update_weight_by_layer(run, step=chosen))
        shown = {
            (float(x), float(y)): to_hex(line.get_color())
            for line in ax.lines
            if line.get_linestyle() == "None"
            for x, y in zip(xs(line), ys(line), strict=True)
        }
        at = run.layers[run.layers["step"] == step].set_index("param")["update_weight_ratio"]
        assert set(shown) == {(float(i), at[name]) for i, (name, _) in enumerate(params)}
        colours = {role: {shown[i, at[n]] for i, (n, r) in enumerate(params) if r == role} for _, role in params}
        assert all(len(mine) == 1 for mine in colours.values())
        assert len(set.union(*colours.values())) == 4
        assert ax.get_yscale() == "log"
        assert [tick.get_text() for tick in ax.get_xticklabels()] == [name for name, _ in params]


def test_captured_mass_stands_against_the_realised_fraction(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", model(1))
    ax = axes_of(plots.captured_mass(run))
    (flat,) = (line for line in ax.lines if line.get_gid() == "reference")
    assert set(ys(flat)) == {0.25}
    names = [name for name, role in model(1) if role == "hidden"]
    truth = [run.selection.loc[run.selection["param"] == name, "captured_mass"].tolist() for name in names]
    assert [ys(line) for line in drawn(ax)] == truth
    low, high = ax.get_ylim()
    assert low < 0.25 < high


def test_each_fraction_has_its_own_reference(tmp_path: Path) -> None:
    selection = {
        (1, "a"): {"fraction": 0.25, "captured_mass": 0.3},
        (1, "b"): {"fraction": 0.125, "captured_mass": 0.2},
        (2, "a"): {"fraction": 0.25, "captured_mass": 0.3},
        (2, "b"): {"fraction": 0.125, "captured_mass": 0.2},
    }
    run = write_run(tmp_path / "run", [("a", "hidden"), ("b", "hidden")], {(1, "a"): {"weight_rms": 1.0}}, selection)
    lines = [line for line in axes_of(plots.captured_mass(run)).lines if line.get_gid() == "reference"]
    assert sorted(ys(line) for line in lines) == [[0.125, 0.125], [0.25, 0.25]]


# What a line cannot show


def test_zeros_stay_visible_on_a_log_axis(tmp_path: Path) -> None:
    run = one_column(tmp_path / "run", {"w": [0.0, 1e-3, 1e-2], "v": [1e-3, 0.0, 1e-1]})
    figure = plots.norms_over_steps(run, "grad_rms")
    ax = axes_of(figure)
    assert ax.get_yscale() == "log"
    assert marks(ax, "zeros") == [1, 2]
    assert "2 zeros" in ax.get_xlabel()
    low, high = ax.get_ylim()
    assert all(low < y < high for line in drawn(ax) for y in ys(line))
    plots.save(figure, tmp_path / "a.png")


def test_a_series_of_zeros_is_a_line_at_zero(tmp_path: Path) -> None:
    run = one_column(tmp_path / "run", {"w": [0.0, 0.0, 0.0]}, "update_weight_ratio")
    for figure in (plots.norms_over_steps(run, "update_weight_ratio"), plots.update_weight_by_layer(run)):
        ax = axes_of(figure)
        assert ax.get_yscale() == "linear"
        assert ax.get_ylim()[0] < 0 < ax.get_ylim()[1]
        assert any(set(ys(line)) == {0.0} for line in ax.lines)
        plots.save(figure, tmp_path / "a.png")


@pytest.mark.parametrize("values", [[NAN, NAN, NAN], [None, None, None], [INF, -INF, NAN]])
def test_no_finite_value_says_so(tmp_path: Path, values: list[float | None]) -> None:
    layers: Cells = {(step, "w"): {} if v is None else {"weight_rms": v} for step, v in enumerate(values, 1)}
    layers[4, "w"] = {"update_weight_ratio": NAN, "weight_rms": NAN}
    run = write_run(tmp_path / "run", [("w", "hidden")], layers)
    for figure in (plots.norms_over_steps(run, "weight_rms"), plots.update_weight_by_layer(run)):
        assert "no finite data" in texts(figure)
        plots.save(figure, tmp_path / "a.png")


def test_nan_and_infinity_are_marked_and_the_rest_is_drawn_as_it_is(tmp_path: Path) -> None:
    values = [1.0, INF, 2.0, 2.0, NAN, 3.0]
    ax = axes_of(plots.norms_over_steps(one_column(tmp_path / "run", {"w": values}), "grad_rms"))
    assert marks(ax, "nan") == [2, 5]
    assert "2 NaN or infinite values" in ax.get_xlabel()
    assert "step 2" in ax.get_xlabel()
    (line,) = drawn(ax)
    np.testing.assert_array_equal(ys(line), [1.0, NAN, 2.0, 2.0, NAN, 3.0])
    dots = {float(x) for dot in ax.lines if dot.get_marker() == "o" for x in xs(dot)}
    assert dots == {1, 6}  # a line of one point is invisible


def test_what_was_not_measured_is_no_finding(tmp_path: Path) -> None:
    """Counts of non-finite entries beside the column tell a NaN from an empty cell."""
    layers: Cells = {}
    for step in range(1, 5):
        for name in ("w", "v"):
            layers[step, name] = {"weight_rms": 1.0, "weight_nonfinite": 0.0}
            if step % 2 == 0:
                layers[step, name]["weight_spectral"] = 2.0
        layers[step, "bias"] = {"weight_rms": 1.0, "weight_nonfinite": 0.0}
    layers[4, "w"] = {"weight_rms": NAN, "weight_nonfinite": 3.0, "weight_spectral": NAN}
    layers[2, "bias"] = {"weight_rms": NAN, "weight_nonfinite": 1.0}
    run = write_run(tmp_path / "run", [("w", "hidden"), ("v", "hidden"), ("bias", "vector")], layers)
    ax = axes_of(plots.norms_over_steps(run, "weight_spectral"))
    assert marks(ax, "nan") == [4]
    assert len(drawn(ax)) == 2  # the bias has no spectral norm, whatever its entries are
    (whole,) = (line for line in drawn(ax) if np.isfinite(ys(line)).all())
    assert xs(whole) == [2, 4]  # connected over the steps between, which were not measured
    assert marks(axes_of(plots.norms_over_steps(run, "weight_rms")), "nan") == [2, 4]


def test_a_parameter_that_is_nan_from_the_start_is_a_finding(tmp_path: Path) -> None:
    layers: Cells = {(s, "good"): {"weight_rms": 1.0, "weight_nonfinite": 0.0} for s in (1, 2)}
    layers |= {(s, "bad"): {"weight_rms": NAN, "weight_nonfinite": 64.0} for s in (1, 2)}
    run = write_run(tmp_path / "run", [("good", "hidden"), ("bad", "hidden")], layers)
    ax = axes_of(plots.norms_over_steps(run, "weight_rms"))
    assert marks(ax, "nan") == [1, 2]
    assert "in 1 of 2 parameters, first: bad, step 1" in ax.get_xlabel()


def test_a_loss_that_turns_nan_is_marked_and_a_rare_loss_is_not(tmp_path: Path) -> None:
    scalars = []
    for step in range(1, 41):
        scalars.append((step, "train_loss", NAN if step in (7, 39, 40) else INF if step == 9 else 4.0 / step))
        scalars.append((step, "speed", 1.0))
        if step % 10 == 0:
            scalars.append((step, "val_loss", 5.0 / step))
    run = one_column(tmp_path / "run", {"w": [1.0]}, scalars=scalars)
    ax = plots.overview(run).axes[0]
    assert marks(ax, "nan") == [7, 9, 39, 40]
    assert "train_loss: no finite value at 4 of its steps, first at step 7" in ax.get_xlabel()
    assert "val_loss" not in ax.get_xlabel()


def test_missing_parts_are_said_and_nothing_raises(tmp_path: Path) -> None:
    run = one_column(tmp_path / "run", {"w": [1.0, 2.0]})
    for name, draw in plots.FIGURES.items():
        plots.save(draw(run), tmp_path / f"{name}.png")
    assert "no column weight_rms_to_rms" in texts(plots.norms_over_steps(run))
    said = texts(plots.overview(run))
    for words in ("no loss logged", "no column weight_rms_to_rms", "no column update_weight_ratio", "selects rows"):
        assert words in said


def test_norms_without_sigma_are_drawn_by_default(tmp_path: Path) -> None:
    run = one_column(tmp_path / "run", {"w": [1.0, 2.0]}, column="weight_rms")
    assert axes_of(plots.norms_over_steps(run)).get_title(loc="left") == "weight RMS"


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    nothing = write_run(tmp_path / "nothing", model(1), {})
    plots.save(plots.overview(nothing), tmp_path / "a.png")
    first = full_run(tmp_path / "first", model(1), steps=1)
    for name, draw in plots.FIGURES.items():
        figure = draw(first)
        plots.save(figure, tmp_path / f"{name}.png")
    ax = axes_of(plots.norms_over_steps(first))
    low, high = ax.get_xlim()
    assert low < 10 < high
    assert any(line.get_marker() == "o" for line in ax.lines)


# Words and places


@pytest.mark.parametrize("count", [1, 2, 5, 80])
def test_no_text_overlaps_another_or_leaves_the_page(tmp_path: Path, count: int) -> None:
    run = full_run(tmp_path / "run", model(count))
    for name, draw in plots.FIGURES.items():
        assert_texts_apart(draw(run), name)


def assert_texts_apart(figure: Figure, name: str) -> None:
    """No text of a figure overlaps another or leaves the page."""
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [
        (text.get_text(), Text.get_window_extent(text, canvas.get_renderer()))
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible() and not _beyond_axis(text)
    ]
    page = figure.bbox
    for words, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.width and box.y1 <= page.height
        assert inside, f"{name}: {words!r} leaves the page"
    for (words, box), (other, beside) in combinations(boxes, 2):
        # A pixel or two of the empty rim of two boxes may touch.
        width = min(box.x1, beside.x1) - max(box.x0, beside.x0)
        height = min(box.y1, beside.y1) - max(box.y0, beside.y0)
        assert width < 2 or height < 3, f"{name}: {words!r} lies on {other!r}"


def _beyond_axis(text: Text) -> bool:
    """Whether this is the label of a tick outside of its axis, which matplotlib keeps but does not draw."""
    for axis in (axis for ax in text.figure.findobj(Axes) for axis in (ax.xaxis, ax.yaxis)):
        every = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        if any(text in (tick.label1, tick.label2) for tick in every):
            return not any(text in (tick.label1, tick.label2) for tick in axis._update_ticks())  # type: ignore[union-attr]
    return False


def test_every_panel_names_its_quantity_and_its_axes(tmp_path: Path) -> None:
    figure = plots.overview(full_run(tmp_path / "run", model(1)))
    for ax, title, formula in zip(
        figure.axes,
        ("loss", "weight RMS→RMS norm", "update / weight", "captured mass"),
        ("mean over ranks", "√(d_in / d_out)", "Frobenius norm of the update", "share of the momentum's L1 mass"),
        strict=True,
    ):
        assert ax.get_title("left") == title
        assert any(formula in text.get_text() for text in ax.texts)
        assert ax.get_ylabel() == title
        assert ax.get_xlabel().startswith("optimizer step")


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    series = {"_orig_mod.$x_1$.w": [1.0, 2.0], "a_b^c\\d.w": [2.0, 3.0], "层.w": [0.5, 0.5], "$.w": [0.0, 0.1]}
    del series["层.w"]  # the bundled font has no Chinese letters
    run = one_column(tmp_path / "run", series, "update_weight_ratio")
    for figure in (plots.norms_over_steps(run, "update_weight_ratio"), plots.update_weight_by_layer(run)):
        plots.save(figure, tmp_path / "a.svg")
        assert all(name in texts(figure) for name in series)


def test_long_names_lose_what_they_share() -> None:
    long = [f"model.decoder.layers.{i}.attention.{n}.parametrized" for i in (2, 10) for n in ("wq", "wk")]
    assert shorten(long) == ["2.attention.wq", "2.attention.wk", "10.attention.wq", "10.attention.wk"]
    assert shorten(["layers.0.wq", "layers.1.wq"]) == ["layers.0.wq", "layers.1.wq"]
    (single,) = shorten(["x" * 40 + ".wq"])
    assert len(single) == 28
    assert single.startswith("…")
    assert single.endswith(".wq")
    assert shorten([]) == []


@pytest.mark.parametrize("heights", [[0.5] * 6, [0.0, 0.01, 0.99, 1.0], [1.2, 0.3, -1.0], [0.4], []])
def test_labels_move_apart_and_keep_their_order(heights: list[float]) -> None:
    placed = spread(heights, 0.1)
    assert all(0 <= place <= 1 for place in placed)
    for (a, here), (b, there) in combinations(zip(heights, placed, strict=True), 2):
        assert abs(here - there) >= 0.1 - 1e-12
        assert (a - b) * (here - there) >= 0


@pytest.mark.parametrize(
    ("values", "log", "expected"),
    [
        ([1.0, 20.0], None, False),
        ([1.0, 40.0], None, True),
        ([1.0, 1.1], True, True),
        ([0.0, 1e-3, 1.0], None, True),
        ([-1.0, 1e-3, 1.0], True, False),
        ([0.0, 0.0], True, False),
        ([1.0, 4000.0], False, False),
        ([NAN], True, False),
    ],
)
def test_the_axis_follows_the_range(values: list[float], log: bool | None, expected: bool) -> None:
    scale = scale_for(np.array(values), log=log)
    assert scale.log is expected
    shown = scale.place(np.array([v for v in values if v == v]))
    assert ((scale.low < shown) & (shown < scale.high)).all()


# Refusals and files


def test_unknown_names_are_refused_with_an_offer(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", model(1))
    with pytest.raises(ValueError, match=r"'weight_rms_to_rsm'.*did you mean weight_rms_to_rms"):
        plots.norms_over_steps(run, "weight_rms_to_rsm")
    with pytest.raises(ValueError, match=r"'param'.*it has: "):
        plots.norms_over_steps(run, "param")
    with pytest.raises(ValueError, match=r"'layers.0.atn.wq'.*did you mean layers.0.attn.wq"):
        plots.norms_over_steps(run, params=["layers.0.atn.wq"])
    with pytest.raises(ValueError, match=r"step 15 was not measured; measured steps: 10, 20, "):
        plots.update_weight_by_layer(run, step=15)


def test_save_writes_what_the_suffix_says(tmp_path: Path) -> None:
    figure = plots.overview(full_run(tmp_path / "run", model(1)))
    for suffix, start in ((".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".PDF", b"%PDF")):
        path = tmp_path / "new" / f"figure{suffix}"
        plots.save(figure, path)
        assert path.read_bytes().startswith(start)
    head = (tmp_path / "new" / "figure.png").read_bytes()[16:24]
    assert (int.from_bytes(head[:4]), int.from_bytes(head[4:])) == (1600, 1000)


@pytest.mark.parametrize("name", ["figure.gif", "figure", "figure.png.txt"])
def test_save_refuses_other_suffixes(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of \.png, \.svg, \.pdf, got"):
        plots.save(Figure(), tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("backend", [None, "TkAgg"])
def test_no_display_no_pyplot_any_thread(tmp_path: Path, backend: str | None) -> None:
    full_run(tmp_path / "run", model(1))
    program = """
        import sys, threading
        import matplotlib
        def state():  # past rcParams["backend"], which would choose one and import pyplot for it
            raw = {key: dict.__getitem__(matplotlib.rcParams, key) for key in list(dict.keys(matplotlib.rcParams))}
            return raw, matplotlib.get_backend(auto_select=False)
        before = state()
        from scion_telemetry import plots
        from scion_telemetry.store import load_run
        failed = []
        def work():
            try:
                for name, draw in plots.FIGURES.items():
                    plots.save(draw(load_run(sys.argv[1])), f"{sys.argv[2]}/{name}.png")
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=work) for _ in range(2)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not failed, failed
        assert state() == before
        assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
    """
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    env |= {"DISPLAY": ":99", "PYTHONPATH": str(ROOT)} | ({"MPLBACKEND": backend} if backend else {})
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), str(tmp_path / "run"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.png")} == set(plots.FIGURES)


def test_the_table_of_figures_draws_from_a_run_alone(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", model(1))
    draw: Callable[[Run], Figure]
    for draw in plots.FIGURES.values():
        assert isinstance(draw(run), Figure)
    assert next(iter(plots.FIGURES)) == "overview"
