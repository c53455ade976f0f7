"""Models to parameter groups: roles of real layers, overrides, and the table a user can print."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scion_telemetry.optim import Dion2, Scion, group_params, infer_roles
from scion_telemetry.optim.groups import ROLES, clean_name
from scion_telemetry.testing import run_threads


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.gain = nn.Parameter(torch.ones(d, 1, 1))  # LayerScale of a convolution


class Language(nn.Module):
    """Token and position tables, blocks, a router with stacked experts, a head."""

    def __init__(self, *, tied: bool = False, vocab: int = 11, d: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Parameter(torch.zeros(6, d))
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.router = nn.Linear(d, 3, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, d, 8))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class Vision(nn.Module):
    """The parameters of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, 8))
        self.patch_embed = nn.Conv2d(3, 8, 1, bias=False)
        self.post_mix = nn.Parameter(torch.zeros(8, 8))
        self.audio = nn.Conv1d(2, 8, 3)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.mlp = nn.Linear(8, 8)
        self.one = nn.Linear(8, 1)
        self.classifier = nn.Linear(8, 5)


def _roles(model: nn.Module) -> dict[str, str]:
    roles = infer_roles(model)
    return {clean_name(n): roles[p] for n, p in model.named_parameters()}


def test_roles_of_a_language_model() -> None:
    assert _roles(Language()) == {
        "wpe": "embedding",
        "experts": "expert",
        "wte": "embedding",
        **{
            f"blocks.{i}.{n}": r
            for i in range(2)
            for n, r in {
                "gain": "vector",
                "norm": "vector",
                "norm.bias": "vector",
                "qkv": "hidden",
                "proj": "hidden",
                "proj.bias": "vector",
            }.items()
        },
        "router": "hidden",
        "lm_head": "head",
    }


def test_roles_of_a_vision_model() -> None:
    roles = _roles(Vision())
    assert roles == {
        "cls_token": "vector",
        "pos_embed": "embedding",
        "patch_embed": "conv",
        "post_mix": "hidden",
        "temperature": "vector",
        "patch": "conv",
        "patch.bias": "vector",
        "audio": "conv",
        "audio.bias": "vector",
        "mlp": "hidden",
        "mlp.bias": "vector",
        "one": roles["one"],  # one row is a matrix and a vector alike
        "one.bias": "vector",
        "classifier": "head",
        "classifier.bias": "vector",
    }


def test_tied_weights_are_one_parameter_in_one_group() -> None:
    model = Language(tied=True)
    groups = group_params(model)
    assert _roles(model)["wte"] == "tied"
    weights = [p for g in groups for n, p in g["params"]]
    assert sum(p is model.wte.weight for p in weights) == 1
    assert len(weights) == len(set(weights)) == len(list(model.parameters()))


def test_the_last_linear_layer_as_tall_as_the_vocabulary_is_the_head_whatever_its_name() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(11, 4), "mix": nn.Linear(4, 4), "out": nn.Linear(4, 11)})
    assert _roles(model)["out"] == "head"
    assert _roles(nn.ModuleDict({"mix": nn.Linear(4, 4), "out": nn.Linear(4, 11)}))["out"] == "hidden"


@pytest.mark.parametrize("make", [Scion, Dion2])
@pytest.mark.parametrize("model", [Language(), Language(tied=True), Vision()], ids=["language", "tied", "vision"])
def test_every_trainable_parameter_is_stepped_by_its_group(make: Any, model: nn.Module) -> None:
    groups = group_params(model)
    assert sorted(n for g in groups for n, _ in g["params"]) == sorted(
        clean_name(n) for n, _ in model.named_parameters()
    )
    optimizer = make(groups)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert (p != old).any()


def test_frozen_parameters_are_left_out() -> None:
    model = Language()
    model.wte.requires_grad_(False)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    names = {n for g in group_params(model) for n, _ in g["params"]}
    assert "wte" not in names
    assert not any(n.startswith("blocks.0") for n in names)
    assert "blocks.1.qkv" in names
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        group_params(model)


def test_options_of_roles_and_overrides_survive_into_the_optimizer() -> None:
    groups = group_params(
        Language(),
        roles={"embedding": {"scale": 7.5}, "hidden": {"lr": 0.5}},
        overrides={
            r"blocks\.0\.qkv": {"lr": 1e-4, "weight_decay": 0.0},
            r"qkv": {"lr": 1e-3},
            r"wpe": {"role": "vector", "lr": 0.25},
        },
    )
    optimizer = Dion2(groups, lr=5e-4, weight_decay=0.01)
    options = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert (options["blocks.0.qkv"]["lr"], options["blocks.0.qkv"]["weight_decay"]) == (1e-4, 0.0)
    assert (options["blocks.1.qkv"]["lr"], options["blocks.1.qkv"]["weight_decay"]) == (1e-3, 0.01)
    assert (options["router"]["lr"], options["router"]["role"]) == (0.5, "hidden")
    assert options["wte"]["scale"] == 7.5
    assert (options["wpe"]["role"], options["wpe"]["lr"], options["wpe"]["norm"]) == ("vector", 0.25, "BiasRMS")
    assert options["experts"]["lr"] == 5e-4


def test_a_pattern_sees_the_name_with_and_without_weight() -> None:
    for pattern in (r"^lm_head$", r"^lm_head\.weight$", r"head"):
        groups = group_params(Language(), overrides={pattern: {"lr": 0.125}})
        assert [n for g in groups if g.get("lr") == 0.125 for n, _ in g["params"]] == ["lm_head"]


@pytest.mark.parametrize("pattern", [r"w[123]\.weight", r"^wq$"])
def test_a_pattern_that_matches_nothing_is_an_error_that_lists_the_names(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"override pattern .* matches no.*names are .*blocks\.0\.qkv"):
        group_params(Language(), overrides={"wte": {"lr": 1.0}, pattern: {"lr": 1.0}})


def test_a_pattern_that_never_comes_first_is_an_error_too() -> None:
    with pytest.raises(ValueError, match=r"override pattern 'qkv' .*earlier pattern"):
        group_params(Language(), overrides={"blocks": {"lr": 1.0}, "qkv": {"lr": 2.0}})


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown role 'embeddings'; known are hidden, expert, conv, embedding"):
        group_params(Language(), roles={"embeddings": {}})
    with pytest.raises(ValueError, match="unknown role 'bias'"):
        group_params(Language(), overrides={"bias": {"role": "bias"}})
    assert set(ROLES) == {"hidden", "expert", "conv", "embedding", "head", "tied", "vector"}


def test_flattened_weights_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(120))

    with caplog.at_level(logging.WARNING):
        groups = group_params(Flat())
    assert "no hidden matrix found" in caplog.text
    assert groups.table()[0]["role"] == "vector"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        group_params(Language())
    assert not caplog.records


def test_the_table_shows_every_parameter_once_and_prints() -> None:
    groups = group_params(Vision(), overrides={"mlp$": {"lr": 0.125}})
    rows = {r["name"]: r for r in groups.table()}
    assert len(rows) == len(groups.table()) == len(list(Vision().parameters()))
    assert (rows["mlp"]["shape"], rows["mlp"]["role"], rows["mlp"]["lr"]) == ((8, 8), "hidden", 0.125)
    text = str(groups)
    assert len(text.splitlines()) == len(rows) + 1
    line = next(line for line in text.splitlines() if line.startswith("mlp "))
    assert line.split() == ["mlp", "hidden", "8x8", "lr=0.125"]
    assert "scalar" in next(line for line in text.splitlines() if line.startswith("temperature"))
    Dion2(groups)
    assert str(groups) == text  # the optimizer does not write into them


class _Wrapped(nn.Module):
    """A wrapper's child is called ``module``; a user's may be called ``submodule``."""

    def __init__(self) -> None:
        super().__init__()
        self.submodule = nn.Linear(2, 2)


def test_names_lose_what_wrappers_add_and_nothing_else() -> None:
    assert clean_name("_orig_mod.layers.0.weight") == "layers.0"
    assert clean_name("module._orig_mod.layers.0.bias") == "layers.0.bias"
    assert clean_name("layers._checkpoint_wrapped_module.0._orig_mod.w.weight") == "layers.0.w"
    assert clean_name("submodule.linear.weight") == "submodule.linear"
    assert clean_name("submodule._orig_mod.linear.weight") == "submodule.linear"
    assert clean_name("weight") == "weight"
    assert clean_name("a.weights") == "a.weights"
    assert {n for g in group_params(_Wrapped()) for n, _ in g["params"]} == {"submodule", "submodule.bias"}


def test_compiled_and_sharded_models_have_the_same_groups() -> None:
    plain = {(r["name"], r["role"], r["shape"]) for r in group_params(Language()).table()}
    compiled = torch.compile(Language(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert {(r["name"], r["role"], r["shape"]) for r in group_params(compiled).table()} == plain

    def rank_function(rank: int, world: int) -> set[Any]:
        model = Language()
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return {(r["name"], r["role"], r["shape"]) for r in group_params(model).table()}

    assert run_threads(rank_function, 2) == [plain, plain]


def test_step_with_a_layer_scale_is_that_of_a_vector() -> None:
    gain = nn.Parameter(torch.ones(8, 1, 1))
    gradient: Tensor = torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(0))
    gain.grad = gradient.clone()
    group = {"params": [gain], **ROLES["vector"], "lr": 0.1, "scale": 1.0}
    Dion2([group]).step()
    expected = 1 - 0.1 * gradient / gradient.square().mean().sqrt()
    torch.testing.assert_close(gain.detach(), expected, atol=1e-5, rtol=0)


def test_another_algorithm_takes_none_of_the_options_of_the_role() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 9))
    groups = group_params(
        model, roles={"embedding": {"algorithm": "adamw", "lr": 0.1}}, overrides={"^2$": {"norm": "Sign"}}
    )
    by_role = {g["role"]: {k: v for k, v in g.items() if k not in ("params", "role")} for g in groups}
    assert by_role["embedding"] == {"algorithm": "adamw", "lr": 0.1}
    assert by_role["head"] == {"algorithm": "scion", "norm": "Sign", "unconstrained": True}
    Dion2(groups)


@pytest.mark.parametrize("choice", [{"role": "hidden"}, {"norm": "Spectral"}, {"algorithm": "dion2"}])
def test_an_embedding_that_would_be_orthogonalised_is_named(
    choice: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 9))
    group_params(model)
    assert not caplog.records
    group_params(model, overrides={"^0$": choice})
    assert "'0' has the role embedding" in caplog.text
