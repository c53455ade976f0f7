"""The command line: ``scion-telemetry demo``, ``show``, ``plot``, ``advise``, ``calibrate`` and ``dashboard``."""

import json
import os
import shlex
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scion_telemetry.store import Run, load_run

if TYPE_CHECKING:
    from scion_telemetry.analysis import Advice

app = typer.Typer(
    help="Training dynamics of spectral optimizers: exact under any sharding, nearly free.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
dashboard = typer.Typer(help="Dashboards as code.", no_args_is_help=True)
app.add_typer(dashboard, name="dashboard")

_BATCH = 32
"""Sequences a step of the demo, as nearly as its processes divide it."""

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


def main() -> None:
    """Entry point of the ``scion-telemetry`` command: errors of the user are one line, without a trace."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        _fail(str(error))


def _fail(message: str, status: int = 2) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(status)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 80,
    optimizer: Annotated[str, typer.Option(help="dion2, or scion everywhere.")] = "dion2",
    fraction: Annotated[float, typer.Option(help="Share of rows that Dion2 selects, in (0, 1].")] = 0.25,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    every: Annotated[int, typer.Option(help="Measure every so many steps.")] = 5,
    nproc: Annotated[int, typer.Option(help="Processes; 1 trains without a process group.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Run directory.", show_default="runs/demo/ and the time")] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log to Weights & Biases too.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Hold the numbers against gathered matrices at the end; exit with 1 if off."),
    ] = False,
) -> None:
    """Train a small byte-level GPT on Python's own source text, sharded over two processes, and measure it."""
    from scion_telemetry.demo.config import DemoConfig

    started = time.perf_counter()
    folder = out or Path("runs", "demo", datetime.now().strftime("%Y%m%d-%H%M%S"))
    config = DemoConfig(
        out=folder,
        steps=steps,
        optimizer=optimizer,
        fraction=fraction,
        lr=lr,
        seed=seed,
        every=every,
        nproc=nproc,
        batch=max(1, _BATCH // max(1, nproc)) * nproc,
        wandb=wandb,
        verify=verify,
    )
    from scion_telemetry.demo.launch import launch

    holds = launch(config)
    run = load_run(folder)
    _print_layers(run)
    _conclude(run, time.perf_counter() - started)
    if not holds:
        _fail("verification failed: measured numbers differ from the gathered reference, as the lines above say", 1)


@app.command()
def show(run: RunPath) -> None:
    """Print the last measured values of every parameter."""
    _print_layers(load_run(run))


@app.command()
def plot(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="Folder of the figures.", show_default="RUN/figures")] = None,
    kind: Annotated[str, typer.Option("--format", help="png, svg or pdf.")] = "png",
) -> None:
    """Draw every figure of a run for which something was measured."""
    from scion_telemetry import plots

    loaded = load_run(run)
    folder = out or run / "figures"
    left_out: dict[str, list[str]] = {}
    for name, draw in plots.FIGURES.items():
        figure = draw(loaded)
        if reason := plots.missing(figure):
            left_out.setdefault(reason, []).append(name)
            continue
        path = folder / f"{name}.{kind}"
        plots.save(figure, path)
        typer.echo(path)
    for reason, names in left_out.items():
        typer.echo(f"left out {', '.join(names)}: {reason}", err=True)


@app.command()
def advise(
    run: RunPath,
    calibration: Annotated[
        Path | None, typer.Option(help="A run at fraction 1.", show_default="the window at 1 in RUN, if any")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file too.", show_default=False)] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw every fraction: PNG, SVG, PDF.", show_default=False)] = None,
    age_horizons: Annotated[float, typer.Option(help="Oldest p99 age of rows, in momentum horizons.")] = 3.0,
    max_age: Annotated[float | None, typer.Option(help="The same in steps.", show_default="none")] = None,
    overdue: Annotated[float, typer.Option(help="Largest share of rows that come more rarely than that.")] = 0.01,
    drift: Annotated[float, typer.Option(help="lr x weight decay x age above which to warn.")] = 0.05,
    mass: Annotated[float, typer.Option(help="Smallest captured share of the L1 mass at fraction 1; 0: any.")] = 0.3,
    regret: Annotated[float, typer.Option(help="Largest mass that local selection loses.")] = 0.05,
    horizon_share: Annotated[
        float, typer.Option(help="Longest momentum horizon over all steps, at fractions below 1 - mu.")
    ] = 0.02,
    total_steps: Annotated[
        int | None, typer.Option(help="Steps of the whole training, for --horizon-share.", show_default="the run's")
    ] = None,
    mu: Annotated[float, typer.Option(help="Momentum at fraction 1, whose horizon ef_decay shall keep.")] = 0.95,
    seed_sd: Annotated[float, typer.Option(help="Standard deviation of the final loss over seeds.")] = 0.0013,
) -> None:
    """Say which fraction Dion2 should select (rows by L1 norm), from what a run at one fraction shows."""
    from scion_telemetry._cli_advise import print_advice
    from scion_telemetry.analysis import advise as advise_on

    _check_outputs(json, figure)
    advice = advise_on(
        load_run(run),
        calibration=None if calibration is None else load_run(calibration),
        age_horizons=age_horizons,
        max_age=max_age,
        overdue=overdue,
        drift=drift,
        mass=mass,
        regret=regret,
        horizon_share=horizon_share,
        total_steps=total_steps,
        mu=mu,
        seed_sd=seed_sd,
    )
    print_advice(Console(), advice)
    _keep(advice, json, figure)


def _check_outputs(json: Path | None, figure: Path | None) -> None:
    """What cannot be written is said before any work is done."""
    from scion_telemetry import plots

    if figure is not None:
        plots.suffix_of(figure)
    for option, path in (("--json", json), ("--figure", figure)):
        if path is not None and path.is_dir():
            raise ValueError(f"{option} must be a file, got the folder {str(path)!r}; name a file in it")
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"{option} must be a file in a folder that exists, got {str(path)!r}; make the folder first"
            )


def _keep(advice: "Advice", json: Path | None, figure: Path | None) -> None:
    from scion_telemetry import plots

    if json is not None:
        json.write_text(advice.to_json() + "\n", encoding="utf-8")
        typer.echo(json)
    if figure is not None:
        plots.save(plots.fraction_explorer(advice), figure)
        typer.echo(figure)


@app.command()
def calibrate(
    fraction: Annotated[float, typer.Option(help="Fraction before and after the window, in (0, 1).")] = 0.25,
    warm_up: Annotated[int, typer.Option(help="Steps before the window.")] = 200,
    steps: Annotated[int, typer.Option(help="Length of the window, at least 200.")] = 200,
) -> None:
    """Print how to get a calibration window, steps at fraction 1, in the run that advise reads."""
    from scion_telemetry._cli_advise import calibration_text
    from scion_telemetry.analysis import calibration_snippet

    snippet = calibration_snippet(fraction, warm_up=warm_up, steps=steps)
    typer.echo(calibration_text(snippet, warm_up, steps), nl=False)


@dashboard.command("wandb")
def dashboard_wandb(
    json: Annotated[Path | None, typer.Option(help="Write the specification to this file.", show_default=False)] = None,
    run: Annotated[
        Path | None, typer.Option(help="Show the columns of this run.", show_default="the default metrics")
    ] = None,
    entity: Annotated[str | None, typer.Option(help="Upload to this entity …", show_default=False)] = None,
    project: Annotated[str | None, typer.Option(help="… and project.", show_default=False)] = None,
) -> None:
    """Build the Weights & Biases workspace: write its specification, upload it, or both."""
    from scion_telemetry.dashboards import wandb_workspace as workspace

    if json is None and not (entity and project):
        raise ValueError("nothing to do: give --json FILE, or --entity and --project to upload")
    columns: tuple[str, ...] = workspace.DEFAULT_COLUMNS
    scalars: tuple[str, ...] = workspace.DEFAULT_SCALARS
    if run is not None:
        loaded = load_run(run)
        columns = workspace.columns_of(loaded.info)
        scalars = tuple(name for name in loaded.scalars.columns if name != "step")
    if json is not None:
        workspace.write_specification(json, entity, project or "", columns=columns, scalars=scalars)
        typer.echo(json)
    if entity and project:
        typer.echo(workspace.save(entity, project, columns=columns, scalars=scalars))


def _print_layers(run: Run) -> None:
    console, table = Console(), _layer_table(run)
    # A terminal that is too narrow breaks the lines; rich would cut the numbers.
    fixed = sum(2 + max(cell_len(str(cell)) for cell in (c.header, *c.cells)) for c in table.columns[1:])
    console.width = max(console.width, _NAME_WIDTH + fixed)
    console.print(table)


_NAME_WIDTH = 20
"""Narrowest column of parameter names; longer names are folded."""


def _layer_table(run: Run) -> Table:
    summary = run.summary()
    if "fraction" in run.selection:
        summary["fraction"] = run.selection.groupby("param", observed=True)["fraction"].last()
    shown = {column: title for column, title in _TABLE.items() if column in summary}
    table = Table(
        title=f"step {max(run.steps, default=0)}",
        caption=_LEGEND,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("parameter", overflow="fold")
    for title in ("role", "shape"):
        table.add_column(title, no_wrap=True)
    for title in shown.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in summary.reset_index().to_dict("records"):
        shape = "x".join(map(str, row["shape"])) or "scalar"
        table.add_row(escape(row["param"]), row["role"], shape, *(_number(row[column]) for column in shown))
    return table


_TABLE = {
    "weight_rms": "rms",
    "weight_rms_to_rms": "rms_to_rms",
    "update_weight_ratio": "u/w",
    "fraction": "k/n",
    "captured_mass": "mass",
}
"""Columns of the table in the terminal."""

_LEGEND = (
    "rms, rms_to_rms = σ₁ √(d_in/d_out): of the weight; u/w: update over weight, Frobenius norms; "
    "k/n: share of rows or columns selected; mass: their share of the momentum's L1 norm"
)


def _number(value: float) -> str:
    return "" if value != value else f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"


def _conclude(run: Run, seconds: float) -> None:
    from scion_telemetry import plots

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    figure = run.path / "overview.png"
    plots.save(plots.overview(run), figure)
    losses = run.scalars["val_loss"]  # of the first and the last step, NaN too: a run that diverged must say so
    console, folder = Console(), shlex.quote(str(run.path))
    path = json.dumps(str(run.path), ensure_ascii=False)
    code = shlex.quote(f"from scion_telemetry import load_run; print(load_run({path}).layers)")
    say(f"validation loss {losses.iloc[0]:.2f} -> {losses.iloc[-1]:.2f} nats per byte, {seconds:.0f} s in all")
    say(f"figure          {figure}")
    bin_ = _bin()
    say(
        "\nNext:\n"
        f"  {bin_}scion-telemetry plot {folder}      every figure\n"
        f"  {bin_}scion-telemetry show {folder}      this table again\n"
        f"  {bin_}python -c {code}\n"
        "  README.md                            two lines that put the tracker into your own training loop"
    )


def _bin() -> str:
    """What to write before a command: nothing where this environment is active, else its folder."""
    folder = Path(sys.executable).parent
    if shutil.which("scion-telemetry") == str(folder / "scion-telemetry") or not (folder / "scion-telemetry").exists():
        return ""
    return f"{shlex.quote(os.path.relpath(folder))}/"


if __name__ == "__main__":
    main()
