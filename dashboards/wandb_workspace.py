"""A Weights & Biases workspace for the keys that ``WandbSink`` logs, built as code: one panel a column, for any model.

    save("my-team", "scion")                                      # uploads a view, returns its URL
    write_specification("workspace.json", project="scion")        # the same view as JSON: no account, no network

    column weight_rms_to_rms -> section "weights", one line plot of the keys ^weight_rms_to_rms/.*

wandb-workspaces has no public export of a specification. Everything private that stands in for it is called in this
file alone, behind :func:`_library`, which refuses a version that it was not written for.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlparse

from scion_telemetry import words

STEP_KEY: Final = "telemetry/step"
"""The x axis of every panel: optimizer steps, whatever counter the trainer logs with."""

NONFINITE_KEY: Final = "telemetry/nonfinite"
"""Number of values in a row that are NaN or infinite, which charts leave out."""

NAME: Final = "scion-telemetry"
"""Name of the view in the project."""

SECTIONS: Final = ("training", "weights", "updates", "selection", "telemetry")
"""Sections from top to bottom. Gradients and momenta, which updates are made of, stand among the updates."""

DEFAULT_COLUMNS: Final = (
    *(f"weight_{m}" for m in ("rms_to_rms", "l1_to_rms", "rms_to_inf", "rms", "spectral", "max_abs")),
    "update_weight_ratio",
    *(f"update_{m}" for m in ("rms_to_rms", "l1_to_rms", "rms_to_inf", "rms", "spectral", "max_abs")),
    *("momentum_rms", "momentum_max_abs", "grad_rms", "grad_max_abs"),
    *(f"selection_{m}" for m in ("captured_mass", "fraction", "k", "gini", "participation_ratio", "threshold")),
    *(f"selection_{m}" for m in ("churn", "age_p50", "age_p99", "age_max")),
    *(f"{quantity}_nonfinite" for quantity in words.QUANTITIES),
)
"""Columns shown where no run says which it has."""

DEFAULT_SCALARS: Final = ("train_loss", "val_loss", "tokens_per_second")
"""Scalars shown where nobody says which are logged. All whose name holds ``loss`` share a panel, listed here or not."""

_SECTION_OF: Final[Mapping[str | None, str]] = MappingProxyType(
    {"weight": "weights", "update": "updates", "momentum": "updates", "grad": "updates", None: "telemetry"}
)
_PRIVATE: Final = (
    ("wandb_workspaces.workspaces.Workspace", "_to_model"),
    ("wandb_workspaces.workspaces.internal", "View"),
    ("wandb_workspaces.workspaces.internal", "upsert_view2"),
    ("wandb_workspaces.workspaces.internal", "_generate_view_name"),
    ("wandb_workspaces._graphql", "get_app_url"),
)
_SUPPORTED: Final = ((0, 4, 13), (0, 5, 0))
_INSTALL: Final = "pip install 'scion-telemetry[wandb]'"


def columns_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of a run as ``columns=`` takes them.

    Args:
        info: The content of ``run.json``: ``load_run(...).info``.
    """
    chosen = [f"selection_{name}" for name in info.get("selection_columns", ())]
    return (*map(str, info.get("layer_columns", ())), *chosen)


def workspace(
    entity: str | None = None,
    project: str = "",
    *,
    name: str = NAME,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    scalars: Sequence[str] = DEFAULT_SCALARS,
) -> Any:
    """Build the view as a ``wandb_workspaces.workspaces.Workspace``, without a network.

    Args:
        entity: User or team; may stay empty until the view is saved.
        project: Project; may stay empty until the view is saved.
        name: Name of the view.
        columns: Columns to show, ``weight_rms`` or ``selection_churn``: those of a run from :func:`columns_of`. A
            section without columns is left out.
        scalars: Names that the training loop logs.

    Raises:
        RuntimeError: wandb-workspaces is missing, or its private parts have changed.
        TypeError: ``columns`` or ``scalars`` is a string, where a sequence of names is wanted.
    """
    for argument, value in (("columns", columns), ("scalars", scalars)):
        if isinstance(value, str):
            raise TypeError(f"{argument} must be a sequence of names, got the string {value!r}; write [{value!r}]")
    library = _library()
    panels: dict[str, list[Any]] = {section: [] for section in SECTIONS}
    panels["training"] = _training(library, dict.fromkeys(scalars))
    for column in dict.fromkeys(columns):
        panels[_section(column)].append(_column_panel(library, column))
    panels["telemetry"].insert(0, _panel(library, "NaN and infinite values logged", y=[NONFINITE_KEY]))
    for section, members in panels.items():
        _name_panels(section, members)
    return library.workspaces.Workspace(
        entity=entity or "",
        project=project,
        name=name,
        sections=[
            library.workspaces.Section(name=section, panels=members, is_open=section != "telemetry")
            for section, members in panels.items()
            if members
        ],
        settings=library.workspaces.WorkspaceSettings(x_axis=STEP_KEY, smoothing_type="none"),
        auto_generate_panels=False,
    )


def specification(
    entity: str | None = None,
    project: str = "",
    *,
    name: str = NAME,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    scalars: Sequence[str] = DEFAULT_SCALARS,
) -> dict[str, Any]:
    """The view as JSON-able data, as :func:`save` uploads it; equal for equal arguments (see :func:`workspace`)."""
    view = workspace(entity, project, name=name, columns=columns, scalars=scalars)
    data: dict[str, Any] = view._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")
    return data


def write_specification(
    path: str | os.PathLike[str],
    entity: str | None = None,
    project: str = "",
    *,
    name: str = NAME,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    scalars: Sequence[str] = DEFAULT_SCALARS,
) -> None:
    """Write :func:`specification` to a JSON file, the same bytes for the same arguments."""
    data = specification(entity, project, name=name, columns=columns, scalars=scalars)
    Path(path).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(
    entity: str | None,
    project: str,
    *,
    name: str = NAME,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    scalars: Sequence[str] = DEFAULT_SCALARS,
    update: str | None = None,
) -> str:
    """Upload the view as a saved view of the project and return its URL.

    Args:
        entity: User or team; the account's default one where None.
        project: Project that the runs are logged to.
        name: Name of the view.
        columns: As in :func:`workspace`.
        scalars: As in :func:`workspace`.
        update: URL that an earlier call returned: that view is replaced, where otherwise a new one is added.

    Raises:
        RuntimeError: No account is logged in, wandb-workspaces is missing, or its private parts have changed.
        ValueError: ``project`` is empty, or ``update`` is no URL of a saved view.
    """
    if not project:
        raise ValueError("project must name the project that the runs are logged to, got ''")
    earlier = None if update is None else _view_id(update)
    library = _library()
    api = _api(library)
    entity = entity or api.default_entity
    if not entity:
        raise RuntimeError("this account has no default entity: pass entity=, the user or team that owns the project")
    view = workspace(entity, project, name=name, columns=columns, scalars=scalars)._to_model()
    if earlier is None:
        view.name = library.internal._generate_view_name()
    else:
        view.name = f"nw-{earlier}-v"
        view.id = library.internal.View.from_name(entity, project, view.name).id
    saved = library.internal.upsert_view2(view)["upsertView"]["view"]["name"]
    return _url(library.graphql.get_app_url(api), entity, project, saved)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Library:
    """The modules of wandb-workspaces that this file uses, known to have what it needs."""

    wandb: Any
    workspaces: Any
    panels: Any
    internal: Any
    graphql: Any


def _library() -> _Library:
    try:
        with warnings.catch_warnings():
            # Its own use of deprecated pydantic is not the caller's to mend, nor an error where warnings are errors.
            warnings.simplefilter("ignore", DeprecationWarning)
            import wandb
            from wandb_workspaces import _graphql
            from wandb_workspaces.reports import v2
            from wandb_workspaces.workspaces import interface, internal
    except ImportError as error:
        raise RuntimeError(f"the wandb workspace needs wandb-workspaces ({error}): {_INSTALL}") from error
    found = metadata.version("wandb-workspaces")
    low, high = _SUPPORTED
    known = {
        "wandb_workspaces.workspaces.Workspace": interface.Workspace,
        "wandb_workspaces.workspaces.internal": internal,
        "wandb_workspaces._graphql": _graphql,
    }
    gone = [f"{owner}.{part}" for owner, part in _PRIVATE if not hasattr(known[owner], part)]
    panels: Any = v2
    gone += [] if "_id" in panels.LinePlot.__dataclass_fields__ else ["wandb_workspaces.reports.v2.LinePlot._id"]
    if gone or not low <= _numbers(found) < high:
        lacks = f", which lacks {', '.join(gone)}" if gone else ""
        wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high[:2]))}"
        raise RuntimeError(f"wandb-workspaces {wanted} is needed, found {found}{lacks}: {_INSTALL}")
    return _Library(wandb=wandb, workspaces=interface, panels=panels, internal=internal, graphql=_graphql)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _api(library: _Library) -> Any:
    try:
        return library.wandb.Api()
    except library.wandb.errors.UsageError as error:
        raise RuntimeError(
            f"no Weights & Biases account is logged in ({error}): run `wandb login` or set WANDB_API_KEY, "
            "or write the view to a file with write_specification"
        ) from error


def _url(app: str, entity: str, project: str, view: str) -> str:
    # Built here: the library joins paths with the separator of the operating system.
    query = view.removeprefix("nw-").removesuffix("-v")
    return f"{app.rstrip('/')}/{quote(entity)}/{quote(project)}?nw={query}"


def _view_id(url: str) -> str:
    (found,) = parse_qs(urlparse(url).query).get("nw") or [""]
    if not re.fullmatch(r"\w+", found):
        raise ValueError(f"update must be the URL of a saved view, https://…/entity/project?nw=abc123, got {url!r}")
    return found


def _section(column: str) -> str:
    return "selection" if column.startswith("selection_") else _SECTION_OF[words.quantity(column)]


def _training(library: _Library, scalars: Iterable[str]) -> list[Any]:
    losses = _panel(library, "loss", metric_regex="^scalars/.*[Ll]oss.*")
    others = [name for name in scalars if "loss" not in name.lower()]
    return [losses, *(_panel(library, name, y=[f"scalars/{name}"]) for name in others)]


def _column_panel(library: _Library, column: str) -> Any:
    metric = column.removeprefix("selection_")
    # Anchored: a search would also find weight_rms/ in scalars/weight_rms/….
    regex = f"^{re.escape(column)}/.*"
    # Layers move at rates that differ by decades. On other panels a logarithm would hide the zeros.
    log = True if column == "update_weight_ratio" else None
    return _panel(library, words.title(metric), metric_regex=regex, title_y=words.formula(metric) or None, log_y=log)


def _panel(library: _Library, title: str, **more: Any) -> Any:
    return library.panels.LinePlot(title=title, x=STEP_KEY, title_x="optimizer step", **more)


def _name_panels(section: str, panels: Sequence[Any]) -> None:
    """Replace the random ids of panels by ones that follow from their content, so that equal views are equal."""
    for panel in panels:
        config = panel._to_model().config.model_dump(by_alias=True, exclude_none=True, mode="json")
        content = json.dumps([section, config], sort_keys=True)
        panel._id = hashlib.sha256(content.encode()).hexdigest()[:12]
