"""The wandb workspace: its panels against the keys of the sink, its JSON, and an upload to a server of our own."""

import builtins
import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scion_telemetry.dashboards import wandb_workspace as dashboard
from scion_telemetry.rows import key
from scion_telemetry.sinks import wandb as sink

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("embed", "layers.3.attn.wq", "layers.10.mlp.w2", "weight_rms")
"""Parameters; the last one is called like a column."""


def sections(data: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data["spec"]["section"]["panelBankConfig"]["sections"]
    return found


def panels(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(section["name"], panel) for section in sections(data) for panel in section["panels"]]


def finds(panel: dict[str, Any], keys: list[str]) -> set[str]:
    """The keys that a panel shows, whether its expression must match a key as a whole or only from some point on."""
    config = panel["config"]
    if "metricRegex" not in config:
        return set(config["metrics"])
    assert config["useMetricRegex"] is True
    whole = {k for k in keys if re.fullmatch(config["metricRegex"], k)}
    assert whole == {k for k in keys if re.search(config["metricRegex"], k)}
    return whole


def test_every_column_has_one_panel_that_shows_its_keys_alone() -> None:
    columns = ["weight_rms", "weight_rms_to_rms", "weight_spectral", "weight_spectral_upper", "update_weight_ratio"]
    columns += ["momentum_rms", "grad_rms", "selection_k", "selection_churn", "selection_weight_rms", "angle"]
    keys = [key(column, name) for column in columns for name in NAMES]
    keys += ["scalars/train_loss", "scalars/weight_rms/x", "scalars/speed", sink.STEP_KEY, sink.NONFINITE_KEY]
    data = dashboard.specification(columns=columns, scalars=["train_loss", "speed"])
    shown = [finds(panel, keys) for _, panel in panels(data)]
    for column in columns:
        assert shown.count({key(column, name) for name in NAMES}) == 1, column
    for one in ("scalars/train_loss", "scalars/speed", sink.NONFINITE_KEY):
        assert shown.count({one}) == 1, one
    assert len(shown) == len(columns) + 3


def test_sections_stand_in_their_order_and_hold_their_quantities() -> None:
    data = dashboard.specification()
    assert [section["name"] for section in sections(data)] == [
        "training",
        "weights",
        "updates",
        "selection",
        "telemetry",
    ]
    place = {panel["config"].get("metricRegex"): name for name, panel in panels(data)}
    for column in dashboard.DEFAULT_COLUMNS:
        start = column.partition("_")[0]
        wanted = {"weight": "weights", "selection": "selection"}.get(start, "updates")
        assert place[f"^{column}/.*"] == wanted, column


def test_a_section_without_panels_is_left_out_and_an_unknown_column_is_not() -> None:
    data = dashboard.specification(columns=["weight_rms", "angle", "weight_rms"], scalars=())
    assert [(section["name"], len(section["panels"])) for section in sections(data)] == [
        ("training", 1),
        ("weights", 1),
        ("telemetry", 2),
    ]


def test_the_x_axis_is_the_step_of_the_sink() -> None:
    data = dashboard.specification()
    assert (dashboard.STEP_KEY, dashboard.NONFINITE_KEY) == (sink.STEP_KEY, sink.NONFINITE_KEY)
    assert {panel["config"]["xAxis"] for _, panel in panels(data)} == {sink.STEP_KEY}
    settings = data["spec"]["section"]["settings"]
    assert settings["xAxis"] == sink.STEP_KEY
    assert settings["smoothingType"] == "none"  # a smoothed spike is a hidden one
    assert settings["shouldAutoGeneratePanels"] is False


def test_every_panel_is_titled_in_words() -> None:
    titles = [(name, panel["config"]["chartTitle"]) for name, panel in panels(dashboard.specification())]
    assert len(set(titles)) == len(titles)
    assert ("weights", "weight RMS→RMS norm") in titles
    assert not [title for name, title in titles if "_" in title and name != "training"]


def test_columns_come_from_a_run() -> None:
    info = {"layer_columns": ["weight_rms", "update_rms"], "selection_columns": ["churn"], "attributes": {}}
    assert dashboard.columns_of(info) == ("weight_rms", "update_rms", "selection_churn")
    assert dashboard.columns_of({}) == ()


def test_equal_arguments_give_equal_bytes_in_any_process(tmp_path: Path) -> None:
    dashboard.write_specification(tmp_path / "here.json", "team", "scion", columns=["weight_rms", "grad_rms"])
    code = (
        "from scion_telemetry.dashboards.wandb_workspace import write_specification;"
        f"write_specification({str(tmp_path / 'there.json')!r}, 'team', 'scion', columns=['weight_rms', 'grad_rms'])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=100)
    here, there = ((tmp_path / name).read_bytes() for name in ("here.json", "there.json"))
    assert here == there
    assert json.loads(here) == dashboard.specification("team", "scion", columns=["weight_rms", "grad_rms"])
    ids = [panel["__id__"] for _, panel in panels(dashboard.specification())]
    assert len(set(ids)) == len(ids)


def test_the_specification_is_one_that_the_library_reads() -> None:
    from wandb_workspaces.workspaces import Workspace, internal

    data = dashboard.specification("team", "scion")
    view = internal.View.model_validate(data)
    again = Workspace._from_model(view)._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")
    assert again == data


def test_a_string_is_no_sequence_of_names() -> None:
    with pytest.raises(TypeError, match=r"columns must be a sequence of names, got the string 'weight_rms'"):
        dashboard.workspace(columns="weight_rms")
    with pytest.raises(TypeError, match=r"scalars must be"):
        dashboard.workspace(scalars="loss")


# The library underneath


def test_the_installed_library_has_the_private_parts_that_are_used() -> None:
    """Fails with the name of what is gone when a new wandb-workspaces is installed."""
    dashboard._library()


def test_a_library_without_a_private_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb_workspaces.workspaces import internal

    monkeypatch.delattr(internal, "upsert_view2")
    with pytest.raises(RuntimeError, match=r"lacks wandb_workspaces\.workspaces\.internal\.upsert_view2.*pip install"):
        dashboard.specification()


@pytest.mark.parametrize(("version", "fits"), [("0.4.12", False), ("0.4.13", True), ("0.4.20", True), ("0.5.0", False)])
def test_only_supported_versions_are_used(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    if fits:
        dashboard.specification()
        return
    with pytest.raises(RuntimeError, match=rf">=0\.4\.13,<0\.5 is needed, found {re.escape(version)}"):
        dashboard.specification()


@pytest.mark.parametrize("gone", ["wandb", "wandb_workspaces"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == gone:
            raise ModuleNotFoundError(f"No module named {gone!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RuntimeError, match=re.escape("pip install 'scion-telemetry[wandb]'")):
        dashboard.specification()


def test_importing_the_dashboards_imports_no_vendor() -> None:
    code = (
        "import sys, scion_telemetry.dashboards.wandb_workspace;"
        "sys.exit(bool({'wandb', 'wandb_workspaces', 'torch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=100)
    assert done.returncode == 0


# The upload


class Server:
    """A Weights & Biases server that knows one account and keeps the views that it is given."""

    def __init__(self) -> None:
        self.views: dict[str, dict[str, Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = json.dumps({"data": outer.answer(json.loads(body))}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        query, sent = request["query"], request.get("variables") or {}
        if "upsertView(" in query:
            new = sent.get("id") is None
            view = {**sent, "id": sent.get("id") or f"id-{len(self.views)}"}
            self.views[view["id"]] = view
            return {"upsertView": {"view": {"id": view["id"], "name": view["name"]}, "inserted": new}}
        if "allViews(" in query:
            found = [view for view in self.views.values() if view["name"] == sent["viewName"]]
            return {"project": {"allViews": {"edges": [{"node": view} for view in found]}}}
        viewer = {"id": "u", "entity": "me", "username": "me", "admin": False, "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {"features": []}}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    server = Server()
    for name, value in {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": "local" + 35 * "0",
        "HOME": str(tmp_path),
        "WANDB_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.mark.parametrize(("entity", "owner"), [("my team", "my team"), (None, "me")])
def test_save_uploads_the_specification_and_returns_where_it_is(server: Server, entity: str | None, owner: str) -> None:
    url = dashboard.save(entity, "scion", columns=["weight_rms"])
    (view,) = server.views.values()
    assert (view["entityName"], view["projectName"], view["displayName"]) == (owner, "scion", "scion-telemetry")
    assert view["type"] == "project-view"
    assert json.loads(view["spec"]) == dashboard.specification(owner, "scion", columns=["weight_rms"])["spec"]
    assert url == f"{server.url}/{owner.replace(' ', '%20')}/scion?nw={view['name'][3:-2]}"
    assert view["name"] == f"nw-{url.rpartition('=')[2]}-v"


def test_save_replaces_the_view_that_it_is_told_to(server: Server) -> None:
    first = dashboard.save("me", "scion", columns=["weight_rms"])
    assert dashboard.save("me", "scion", columns=["grad_rms"], update=first) == first
    (view,) = server.views.values()
    assert json.loads(view["spec"]) == dashboard.specification("me", "scion", columns=["grad_rms"])["spec"]
    assert dashboard.save("me", "scion") != first
    assert len(server.views) == 2


def test_save_refuses_what_cannot_be_saved() -> None:
    with pytest.raises(ValueError, match="project must name"):
        dashboard.save("me", "")
    for url in ("https://host/me/scion", "https://host/me/scion?nw=a b"):
        with pytest.raises(ValueError, match=r"update must be the URL of a saved view.*got 'https://host"):
            dashboard.save("me", "scion", update=url)


def test_save_without_an_account_says_what_to_do(tmp_path: Path) -> None:
    code = "from scion_telemetry.dashboards.wandb_workspace import save; save('me', 'scion')"
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command,
        env=env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "RuntimeError: no Weights & Biases account is logged in" in done.stderr
    assert "wandb login" in done.stderr
