"""Options of groups: they may change between steps; decay of the selected rows alone; heads as a loop over them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import assert_same, one_param
from torch import Tensor, nn

from scion_telemetry.optim import Dion2, Dion3, Scion, ScionLight

pytestmark = pytest.mark.timeout(60)

CHANGES: list[tuple[Callable[..., torch.optim.Optimizer], str, Any, Any]] = [
    (Scion, "lr", 0.1, 0.01),
    (Scion, "momentum", 0.5, 0.1),
    (Scion, "scale", 1.0, 3.0),
    (Scion, "norm", "Spectral", "RowNorm"),
    (Scion, "norm_kwargs", {"normalized": True}, {"normalized": False}),
    (Scion, "weight_decay", 0.0, 0.5),
    (Scion, "nesterov", False, True),
    (Scion, "unconstrained", False, True),
    (ScionLight, "momentum", 0.5, 0.1),
    (Dion2, "lr", 0.1, 0.01),
    (Dion2, "fraction", 0.25, 0.75),
    (Dion2, "ef_decay", 0.9, 0.1),
    (Dion2, "weight_decay", 0.0, 0.5),
    (Dion2, "epsilon", 1e-8, 1.0),
    (Dion2, "adjust_lr", "spectral_norm", "rms_norm"),
    (Dion2, "newton_schulz_func", "polar_express", "dion_ns5"),
    (Dion2, "select_dim", "rows", "cols"),
    (Dion2, "decay_on", "all", "selected"),
    (Dion3, "muon_beta2", 0.95, 0.5),
]


@pytest.mark.parametrize(("make", "option", "old", "new"), CHANGES, ids=[f"{c[0].__name__}-{c[1]}" for c in CHANGES])
def test_every_option_may_change_between_steps(make: Any, option: str, old: Any, new: Any) -> None:
    """Two steps with the old value and two with the new one; the second half in an optimizer made with it."""
    defaults = {"momentum": 0.5} if make in (Scion, ScionLight) else {"weight_decay": 0.25, "fraction": 0.5}

    def run(optimizer: torch.optim.Optimizer, param: nn.Parameter, steps: range) -> None:
        for t in steps:
            gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(t))
            kept = param.grad if make is ScionLight and t else None
            param.grad = gradient if kept is None else kept + gradient
            optimizer.step()

    changed, unchanged, fresh = one_param(), one_param(), one_param()
    first, same = (make([p], **{"lr": 0.1, **defaults, option: old}) for p in (changed, unchanged))
    for optimizer, p in ((first, changed), (same, unchanged)):
        run(optimizer, p, range(2))
    second = make([fresh], **{"lr": 0.1, **defaults, option: new})
    fresh.data.copy_(changed.detach())
    saved = copy.deepcopy(first.state_dict())
    saved["param_groups"][0][option] = new
    second.load_state_dict(saved)
    first.param_groups[0][option] = new
    for optimizer, p in ((first, changed), (same, unchanged), (second, fresh)):
        run(optimizer, p, range(2, 5))
    assert_same(changed, fresh)
    assert (changed != unchanged).any()


@pytest.mark.parametrize("choice", ["rows", "cols"])
def test_decay_on_selected_leaves_the_rest_alone(choice: str) -> None:
    param = one_param((6, 8), torch.float64)
    before = param.detach().clone()
    optimizer = Dion2([param], lr=0.1, fraction=0.5, weight_decay=0.5, select_dim=choice, decay_on="selected")
    seen: list[tuple[Tensor, Tensor]] = []
    optimizer.register_step_observer(
        lambda e: seen.append((e.selections[0].indices, e.directions[0].double() * e.scale))
    )
    optimizer.step()
    ((index, update),) = seen
    dim = 0 if choice == "rows" else 1
    expected = before.clone().index_copy_(dim, index, before.index_select(dim, index) * (1 - 0.1 * 0.5) + update)
    torch.testing.assert_close(param.detach(), expected, atol=1e-12, rtol=0)
    rest = [i for i in range(param.shape[dim]) if i not in index.tolist()]
    assert_same(param.detach().index_select(dim, torch.tensor(rest)), before.index_select(dim, torch.tensor(rest)))


@pytest.mark.parametrize("make", [Dion2, Dion3])
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_heads_are_stepped_as_a_loop_over_them(make: Any, heads: int) -> None:
    joined = one_param((12, 5), torch.float64)
    parts = [nn.Parameter(c.clone()) for c in joined.detach().chunk(heads)]
    options: dict[str, Any] = {"fraction": 0.4, "newton_schulz_func": "svd/5/float64", "adjust_lr": None}
    if make is Dion2:
        options["select_dim"] = "rows"
    one, many = make([joined], num_heads=heads, **options), make(parts, **options)
    for t in range(3):
        gradient = torch.randn(12, 5, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        joined.grad = gradient
        for part, g in zip(parts, gradient.chunk(heads), strict=True):
            part.grad = g.clone()
        one.step()
        many.step()
    torch.testing.assert_close(joined.detach(), torch.cat([p.detach() for p in parts]), atol=1e-7, rtol=0)
