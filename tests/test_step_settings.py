"""What options say of a step: its length, the decay, and the radius that weights settle at, all by stepping."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scion_telemetry.metrics.pieces import MatrixShape
from scion_telemetry.optim import Dion2, Dion3, Orthogonalizer, Scion, StepSettings
from scion_telemetry.optim.events import ObservableOptimizer
from scion_telemetry.optim.groups import ROLES
from scion_telemetry.optim.settings import transposed
from scion_telemetry.testing import run_threads

EXACT = Orthogonalizer(name="svd", dtype=torch.float64)
SHAPE = (12, 5)


def _gauss(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _largest(w: Tensor) -> Tensor:
    return torch.linalg.svdvals(w)[..., 0].max()


# W is [d_out, d_in]; that of an embedding [vocab, d] is its transpose.
METRICS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rms_to_rms": lambda w: _largest(w) * math.sqrt(w.size(-1) / w.size(-2)),
    "l1_to_rms": lambda w: w.square().sum(-2).sqrt().max() / math.sqrt(w.size(-2)),
    "rms_to_inf": lambda w: w.square().sum(-1).sqrt().max() * math.sqrt(w.size(-1)),
    "spectral": _largest,
    "rms": lambda w: w.square().mean().sqrt(),
    "max_abs": lambda w: w.abs().max(),
}

Options = Mapping[str, Any]
HIDDEN: Options = {"norm": "Spectral", "norm_kwargs": {"orthogonalizer": EXACT}}
FLIPPED: Options = {"norm_kwargs": {"transpose": True}, "role": "embedding"}
SCION: dict[str, tuple[Options, str]] = {
    "hidden": (HIDDEN, "rms_to_rms"),
    "expert": ({**HIDDEN, "norm": "Auto", "role": "expert", "shape": (2, 6, 4)}, "rms_to_rms"),
    "embedding": ({**ROLES["embedding"], "role": "embedding"}, "l1_to_rms"),
    "head": ({**ROLES["head"], "role": "head"}, "rms_to_inf"),
    "tied": ({**ROLES["tied"], "role": "tied"}, "rms_to_inf"),
    "vector": ({**ROLES["vector"], "role": "vector", "shape": (7,)}, "rms"),
    "a table of gains": ({"norm": "BiasRMS"}, "rms"),
    "ColNorm": ({"norm": "ColNorm"}, "l1_to_rms"),
    "RowNorm": ({"norm": "RowNorm"}, "rms_to_inf"),
    "RowNorm of an embedding": ({"norm": "RowNorm", **FLIPPED}, "rms_to_inf"),
    "Spectral of an embedding": (
        {"norm": "Spectral", "norm_kwargs": {"orthogonalizer": EXACT, "transpose": True}, "role": "embedding"},
        "rms_to_rms",
    ),
    "embed_sqrt": ({"norm": "embed_sqrt", "role": "embedding"}, "l1_to_rms"),
    "unembed_sqrt": ({"norm": "unembed_sqrt", "role": "head"}, "rms_to_inf"),
    "sign": ({"norm": "sign"}, "max_abs"),
}
PULLS: list[Options] = [{}, {"unconstrained": True, "weight_decay": 0.5}, {"weight_decay": 0.5}]


def _shown(param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The weight as the metrics orient it."""
    w = param.detach()
    return w.mT if group.get("role") == "embedding" else w


def _settles(optimizer: Any, steps: int = 300) -> None:
    """The first step has length lr · scale, and a constant direction leads to the radius."""
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    settings: StepSettings = optimizer.settings(group)
    assert settings.norm is not None
    assert settings.scale is not None
    assert settings.radius is not None
    metric, direction = METRICS[settings.norm], _gauss(*param.shape)
    sizes = torch.rand(steps, generator=torch.Generator().manual_seed(1)).tolist()
    for step, size in enumerate(sizes):
        param.grad = (0.1 + size) * direction
        optimizer.step()
        length = metric(_shown(param, group)).item()
        if step == 0:
            assert length == pytest.approx(settings.lr * settings.scale, rel=1e-6)
        assert length <= settings.radius * (1 + 1e-6)
    assert length == pytest.approx(settings.radius, rel=1e-4)


@pytest.mark.parametrize("pull", PULLS, ids=["constrained", "decay", "both"])
@pytest.mark.parametrize("case", SCION)
def test_scion_settles_at_the_radius(case: str, pull: Options) -> None:
    options, norm = SCION[case]
    shape = options.get("shape", SHAPE)
    group = {**{k: v for k, v in options.items() if k != "shape"}, "unconstrained": False, **pull}
    optimizer = Scion([{**group, "params": [nn.Parameter(torch.zeros(shape).double())]}], lr=0.1, scale=3.0)
    settings = optimizer.settings(optimizer.param_groups[0])
    assert (settings.lr, settings.norm, settings.scale) == (0.1, norm, 3.0)
    decay = {0: 1.0, 1: 0.5, 2: 1 + 0.5 - 0.1 * 0.5}[PULLS.index(pull)]
    assert settings.decay == pytest.approx(decay)
    assert settings.radius == pytest.approx(3.0 / decay)
    _settles(optimizer)


@pytest.mark.parametrize("make", [Dion2, Dion3])
@pytest.mark.parametrize("adjust", ["spectral_norm", "rms_norm", None])
@pytest.mark.parametrize("shape", [(5, 12), (6, 6), (2, 5, 7)])
def test_dion_settles_at_the_radius(make: Any, adjust: str | None, shape: tuple[int, ...]) -> None:
    options = {"fraction": 1.0, "adjust_lr": adjust, "newton_schulz_func": EXACT, "weight_decay": 0.5, "lr": 0.1}
    optimizer = make([nn.Parameter(torch.zeros(shape).double())], **options)
    settings = optimizer.settings(optimizer.param_groups[0])
    assert settings.norm == {"spectral_norm": "rms_to_rms", "rms_norm": "rms", None: "spectral"}[adjust]
    assert settings.radius == pytest.approx((0.2 if adjust == "rms_norm" else 1.0) / 0.5)
    _settles(optimizer)


def test_a_selected_part_steps_as_far_and_stays_within_the_radius() -> None:
    param = nn.Parameter(torch.zeros(8, 12).double())
    options = {"fraction": 0.25, "newton_schulz_func": EXACT, "weight_decay": 0.5, "lr": 0.1, "select_dim": "rows"}
    optimizer = Dion2([param], **options)
    settings = optimizer.settings(optimizer.param_groups[0])
    assert settings.radius == 2.0
    for step in range(200):
        before = param.detach() * (1 - settings.lr * settings.decay)
        param.grad = _gauss(8, 12, seed=step % 3)
        optimizer.step()
        assert METRICS["rms_to_rms"](param.detach() - before).item() == pytest.approx(0.1)
        assert METRICS["rms_to_rms"](param.detach()).item() <= 2.0


def test_newton_schulz_settles_within_its_band() -> None:
    optimizer = Scion([nn.Parameter(torch.zeros(16, 24))], lr=0.1, scale=3.0)
    (param,) = optimizer.param_groups[0]["params"]
    for _ in range(200):
        param.grad = _gauss(16, 24).float()
        optimizer.step()
    radius = optimizer.settings(optimizer.param_groups[0]).radius
    assert radius == 3.0
    assert 0.9 * radius <= METRICS["rms_to_rms"](param.detach()).item() <= 1.2 * radius


DECAYS: dict[str, Callable[[Any], Any]] = {
    "Scion": lambda p: Scion(p, lr=0.1),
    "Scion unconstrained": lambda p: Scion(p, lr=0.1, unconstrained=True),
    "Scion twice": lambda p: Scion(p, lr=0.1, weight_decay=3.0),
    "Dion2": lambda p: Dion2(p, lr=0.1, weight_decay=0.3),
    "Dion3": lambda p: Dion3(p, lr=0.1, weight_decay=0.3),
    "AdamW": lambda p: Dion2([{"params": p, "algorithm": "adamw", "lr": 0.2, "weight_decay": 0.3}]),
    "Lion": lambda p: Dion2([{"params": p, "algorithm": "lion", "lr": 0.2, "weight_decay": 0.3}]),
    "Scion in Dion2": lambda p: Dion2([{"params": p, "algorithm": "scion", "lr": 0.2, "norm": "Sign"}]),
}


@pytest.mark.parametrize("case", DECAYS)
def test_weights_without_a_gradient_shrink_as_it_says(case: str) -> None:
    param = nn.Parameter(_gauss(4, 6))
    before = param.detach().clone()
    optimizer = DECAYS[case]([param])
    assert isinstance(optimizer, ObservableOptimizer)
    settings = optimizer.settings(optimizer.param_groups[0])
    assert settings.lr == optimizer.param_groups[0]["lr"]
    param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(param.detach(), (1 - settings.lr * settings.decay) * before, rtol=1e-12, atol=0)


def _of(optimizer: Any) -> StepSettings:
    settings: StepSettings = optimizer.settings(optimizer.param_groups[0])
    return settings


NOWHERE: dict[str, Options] = {
    "width enters": {"norm": "Spectral", "norm_kwargs": {"normalized": False}},
    "capped": {"norm": "Spectral", "norm_kwargs": {"max": True}},
    "counted columns": {"norm": "ColNorm", "norm_kwargs": {"normalized": True}},
    "bare rows": {"norm": "RowNorm", "norm_kwargs": {"normalized": False}},
    "linear rows": {"norm": "embed_linear"},
    "the other orientation": {"norm": "ColNorm", "role": "embedding"},
    "the other orientation of rows": {"norm": "ColNorm", "norm_kwargs": {"transpose": True}, "role": "hidden"},
    "signs of an embedding": {"norm": "Sign", "role": "embedding"},
    "a vector as a matrix": {"norm": "RowNorm", "role": "vector"},
}


@pytest.mark.parametrize("case", NOWHERE)
def test_no_metric_fits(case: str) -> None:
    settings = _of(Scion([{"params": [nn.Parameter(torch.ones(SHAPE))], **NOWHERE[case]}], lr=0.1))
    assert (settings.norm, settings.scale, settings.radius, settings.decay) == (None, None, None, 1.0)


def test_no_metric_fits_convolutions_mixed_groups_heads_and_elementwise_rules() -> None:
    matrix, vector = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))
    assert _of(Scion([nn.Parameter(torch.ones(4, 3, 2, 2))])).norm is None
    assert _of(Scion([matrix, vector])).norm is None
    assert _of(Dion2([matrix], num_heads=2)).norm is None
    assert _of(Dion2([matrix], num_heads=2, adjust_lr="rms_norm", fraction=1.0)).norm == "rms"
    assert _of(Dion2([matrix], adjust_lr="rms_norm")).norm is None
    assert _of(Dion2([{"params": [matrix], "role": "embedding"}])).norm is None
    assert _of(Dion2([{"params": [vector], "algorithm": "adamw"}])).norm is None
    # One parameter of a mixed group, by what the telemetry knows of it.
    optimizer = Scion([matrix, vector])
    group = optimizer.param_groups[0]
    assert optimizer.settings({**group, "params": [vector], "role": "vector"}).norm == "rms"
    assert optimizer.settings({**group, "params": [matrix], "role": "hidden"}).norm == "rms_to_rms"


def test_no_radius_without_decay_or_where_only_some_entries_decay() -> None:
    matrix = nn.Parameter(torch.ones(6, 4))
    for settings in (_of(Scion([matrix], unconstrained=True)), _of(Dion2([matrix], weight_decay=0.0))):
        assert (settings.norm, settings.decay, settings.radius) == ("rms_to_rms", 0.0, None)
    settings = _of(Dion2([matrix], decay_on="selected", weight_decay=0.5))
    assert (settings.norm, settings.decay, settings.radius) == ("rms_to_rms", 0.5, None)
    cautious = _of(Dion2([{"params": [matrix], "algorithm": "lion", "cautious_wd": True, "weight_decay": 0.5}]))
    assert (cautious.norm, cautious.decay, cautious.radius) == (None, 0.5, None)


def test_a_schedule_changes_what_it_says() -> None:
    optimizer = Scion([nn.Parameter(torch.ones(6, 4))], lr=0.1, weight_decay=2.0)
    optimizer.param_groups[0]["lr"] = 0.2
    settings = _of(optimizer)
    assert (settings.lr, settings.decay) == (0.2, pytest.approx(1 + 2 - 0.2 * 2))


@pytest.mark.parametrize("role", [*ROLES, None])
@pytest.mark.parametrize("shape", [(6, 4), (2, 6, 4), (6, 4, 3, 3)])
def test_the_orientation_is_that_of_the_metrics(role: str | None, shape: tuple[int, ...]) -> None:
    assert transposed(len(shape), role) == MatrixShape.of(shape, role or "hidden").transposed


def test_two_ranks_settle_alike() -> None:
    def rank_function(rank: int, world: int) -> tuple[StepSettings, float]:
        mesh = init_device_mesh("cpu", (world,))
        place = lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)  # noqa: E731
        param = nn.Parameter(place(torch.zeros(12, 5).double()))
        optimizer = Scion([{"params": [param], **HIDDEN}], lr=0.1, scale=3.0)
        for _ in range(200):
            param.grad = place(_gauss(12, 5))
            optimizer.step()
        whole = param.detach()
        assert isinstance(whole, DTensor)
        return _of(optimizer), METRICS["rms_to_rms"](whole.full_tensor()).item()

    for settings, norm in run_threads(rank_function, 2):
        assert settings == StepSettings(lr=0.1, decay=1.0, norm="rms_to_rms", scale=3.0, radius=3.0)
        assert norm == pytest.approx(3.0, rel=1e-4)
