"""Reported mistakes about what counts as a matrix: kernels, heads, fused rows, ties, groups and their options."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tracked import gauss, named, rms, rows

from scion_telemetry import Tracker, every
from scion_telemetry.optim import Dion2, Orthogonalizer, Scion, group_params
from scion_telemetry.sinks import MemorySink

EXACT = Orthogonalizer(name="svd", dtype=torch.float32)


def stepped(model: nn.Module, optimizer: Any, grads: dict[str, Tensor], metrics: Any = "full") -> MemorySink:
    """One step."""
    sink = MemorySink()
    for name, p in model.named_parameters():
        p.grad = grads[name].clone() if name in grads else None
    with Tracker(model, optimizer, schedule=every(1), metrics=metrics, sinks=[sink]):
        optimizer.step()
    return sink


def scalar(sink: MemorySink, name: str) -> float:
    (found,) = [s.value for s in sink.scalars if s.name == name]
    return found


def test_c49_a_gain_of_three_dimensions_is_a_vector() -> None:
    model = nn.ParameterDict({"gain": nn.Parameter(gauss(8, 1, 1)), "matrix": nn.Parameter(gauss(6, 8, seed=1))})
    optimizer = Dion2(group_params(model), lr=0.1, fraction=0.5)
    sink = stepped(model, optimizer, {n: gauss(*p.shape, seed=2) for n, p in model.items()})
    assert sink.run is not None
    assert {p.name: p.role for p in sink.run.params} == {"gain": "vector", "matrix": "hidden"}
    assert sink.value(1, "gain", "weight_spectral") == pytest.approx(
        float(model["gain"].detach().abs().max()), rel=1e-6
    )
    assert [r.param for r in sink.selection] == ["matrix"]


def test_c50_a_kernel_is_one_matrix_for_rule_and_telemetry() -> None:
    """[8, 4, 3, 3] is [8, 36]: the same numbers as of the reshaped weight, and the factor √(36/8)."""
    model = nn.Conv2d(4, 8, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(gauss(8, 4, 3, 3))
    optimizer = Scion(group_params(model), lr=0.1, momentum=0.3)
    sink = stepped(model, optimizer, {"weight": gauss(8, 4, 3, 3, seed=1)})
    flat = model.weight.detach().double().flatten(1)
    assert flat.shape == (8, 36)
    sigma = float(torch.linalg.svdvals(flat)[0])
    row = rows(sink)[1, "weight"]
    assert row["weight_spectral"] == pytest.approx(sigma, rel=1e-6)
    assert row["weight_rms_to_rms"] == pytest.approx(sigma * math.sqrt(36 / 8), rel=1e-6)
    assert row["weight_row_magnitude"] == pytest.approx(float(flat.norm(dim=1).max()), rel=1e-9)
    matrix = named(weight=flat.float())
    other = stepped(
        matrix,
        torch.optim.SGD(matrix.parameters(), lr=0.0),
        {"weight": gauss(8, 36)},
        ["weight_" + n for n in ("rms_to_rms", "l1_to_rms", "rms_to_inf", "stable_rank")],
    )
    for name, value in rows(other)[1, "weight"].items():
        assert row[name] == pytest.approx(value, rel=1e-6), name


def test_c54_fused_heads_are_selected_from_each_for_itself() -> None:
    """8 + 2 + 2 heads of 4 rows: twelve blocks, as twelve parameters; other numbers of heads are refused."""
    whole, grad = gauss(48, 16), gauss(48, 16, seed=1)
    model = named(qkv=whole.clone())
    options: dict[str, Any] = {"lr": 0.1, "fraction": 0.5, "newton_schulz_func": EXACT, "select_dim": "rows"}
    optimizer = Dion2([{"params": [("qkv", model["qkv"])], "num_heads": 12}], **options)
    sink = stepped(model, optimizer, {"qkv": grad})
    blocks = named(**{f"head{i}": whole[4 * i : 4 * i + 4].clone() for i in range(12)})
    apart = stepped(
        blocks, Dion2(blocks.parameters(), **options), {f"head{i}": grad[4 * i : 4 * i + 4] for i in range(12)}
    )
    assert sink.selection[0].values["k"] == sum(r.values["k"] for r in apart.selection) == 24
    for quantity in ("weight", "grad", "update"):
        squares = sum(r.values[f"{quantity}_frobenius"] ** 2 for r in apart.layers)
        assert sink.value(1, "qkv", f"{quantity}_frobenius") ** 2 == pytest.approx(squares, rel=1e-6), quantity
    with pytest.raises(ValueError, match="heads"):
        Dion2([{"params": [("qkv", nn.Parameter(whole))], "num_heads": 13}], **options)


def test_c57_interleaved_rows_are_no_option_and_asking_for_them_says_so() -> None:
    for options in ({"stride": 2}, {"split_rows": (8, 8)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Dion2([{"params": [nn.Parameter(gauss(16, 8))], **options}], lr=0.1)


def test_c58_a_tied_weight_is_one_row_and_counts_once() -> None:
    """Gradients of norm 3 (tied) and 4 (the rest) have norm 5 together, not 5.831."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix, self.out = (
                nn.Embedding(10, 4),
                nn.Linear(4, 4, bias=False),
                nn.Linear(4, 10, bias=False),
            )
            self.out.weight = self.table.weight

    model = Tied()
    grads = {"table.weight": torch.full((10, 4), 3 / math.sqrt(40)), "mix.weight": torch.ones(4, 4)}
    sink = stepped(model, torch.optim.SGD(model.parameters(), lr=0.0), grads)
    assert sink.run is not None
    assert [(p.name, p.aliases) for p in sink.run.params] == [("table", ("out",)), ("mix", ())]
    assert [r.param for r in sink.layers] == ["table", "mix"]
    assert scalar(sink, "grad_frobenius/total") == pytest.approx(5.0, rel=1e-6)
    assert scalar(sink, "grad_frobenius/total.hidden") == pytest.approx(4.0, rel=1e-6)
    assert sum(math.prod(p.shape) for p in sink.run.params) == 40 + 16
    twice = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for make in (Dion2, Scion):
        with pytest.raises(ValueError, match="is the same tensor as"):
            make(twice, lr=0.1)


def test_c61_options_of_the_callers_groups_are_in_the_rows() -> None:
    for kind in ("AdamW", "Dion2"):
        model = named(one=gauss(5, 4), two=gauss(4, 3, seed=1))
        groups = [
            {"params": [model["one"]], "lr": 1e-3, "weight_decay": 0.1},
            {"params": [model["two"]], "lr": 1e-4, "weight_decay": 0.0},
        ]
        optimizer = (
            torch.optim.AdamW(groups, lr=5e-4, weight_decay=0.01)
            if kind == "AdamW"
            else Dion2(groups, lr=5e-4, weight_decay=0.01)
        )
        sink = stepped(model, optimizer, {n: gauss(*p.shape, seed=3) for n, p in model.items()})
        found = {name: (sink.value(1, name, "update_lr"), sink.value(1, name, "weight_decay")) for name in model}
        assert found == {"one": (1e-3, 0.1), "two": (1e-4, 0.0)}, kind


def test_c63_no_rule_scales_the_rate_of_the_head_behind_the_callers_back() -> None:
    """A head [100, 64] at lr 0.01 under AdamW and Lion: both rows say 0.01, and the first steps are ± 0.01."""
    for algorithm in ("adamw", "lion"):
        model = named(head=gauss(100, 64))
        optimizer = Dion2([{"params": [model["head"]], "algorithm": algorithm, "lr": 0.01, "weight_decay": 0.0}])
        sink = stepped(model, optimizer, {"head": gauss(100, 64, seed=1)})
        assert sink.value(1, "head", "update_lr") == 0.01
        assert sink.value(1, "head", "update_max_abs") == pytest.approx(0.01, rel=1e-3)
        assert sink.value(1, "head", "update_rms") == pytest.approx(0.01, rel=1e-3)
        assert rms(model["head"].detach() - gauss(100, 64)) == pytest.approx(0.01, rel=1e-3)
