"""`polyamp.compare` within torch: eager against compiled, one policy against another, one process against its wrappers,
and what it says where they part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import polyamp

BATCH = (np.random.default_rng(0).standard_normal((6, 8), "f4"), np.arange(6) % 4)
RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2))


def loss_fn(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch[0]).float(), batch[1].long())


class Net(nn.Module):
    """Two layers with a norm and dropout between them."""

    def __init__(self, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, epsilon)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 4)

    def between(self, x: Any) -> Any:
        return torch.relu(x)

    def forward(self, x: Any) -> Any:
        return self.second(self.drop(self.between(self.norm(self.first(x)))))


class Rounds(Net):
    """It loses digits between two layers, in float32 too."""

    def between(self, x: Any) -> Any:
        return torch.relu(x).bfloat16().float()


class Tanh(Net):
    """Another formula between two layers."""

    def between(self, x: Any) -> Any:
        return torch.tanh(x)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def group(tmp_path: Any) -> Any:
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


AGREE: dict[str, Callable[[Net], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "a compiled part": lambda model: _with_part(model, torch.compile(model.first, backend="aot_eager")),
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
}


def _with_part(model: Net, part: Any) -> Net:
    model.first = part
    return model


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", AGREE)
def test_a_wrapper_trains_as_the_model_in_it(model: Net, how: str) -> None:
    torch.compiler.reset()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = polyamp.compare(model, AGREE[how](copy.deepcopy(model)), BATCH, loss_fn, RECIPE, 2)
    assert report.agrees, str(report)
    assert report.phases[0] == "float32"
    assert "mixed_bfloat16" in report.phases
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    seen = {row.module for row in report.comparisons[0].rows if row.what == "output"}
    assert seen == ({""} if how == "compiled" else {"", "first", "norm", "second"})


def test_float32_and_a_mixed_policy_agree_as_far_as_rounding_allows(model: Net) -> None:
    recipes = (RECIPE.replace(policy="float32"), RECIPE)
    report = polyamp.compare(model, copy.deepcopy(model), BATCH, loss_fn, recipes, 2, labels=("float32", "mixed"))
    assert report.agrees, str(report)
    halves = [row for row in report.comparisons[0].rows if row.what == "output" and row.module == "second"]
    assert ("float32", "bfloat16") in {row.dtypes for row in halves}


def test_shared_masks_are_the_same_masks(model: Net) -> None:
    report = polyamp.compare(model, copy.deepcopy(model), BATCH, loss_fn, RECIPE, 2, randomness="shared")
    assert report.agrees, str(report)
    behind = [row.distance for row in report.comparisons[0].rows if (row.module, row.what) == ("second", "output")]
    assert behind == [0.0, 0.0]
    quiet = loss_fn(model.eval(), tuple(map(torch.from_numpy, BATCH))).item()
    first = [curve.loss[0] for curve in report.curves if curve.phase == "float32"]
    assert first[0] == first[1] != pytest.approx(quiet)


@pytest.mark.parametrize(
    ("other", "module", "kind"),
    [(lambda: Net(1e-3), "norm", "epsilon"), (Rounds, "second", "dtype"), (Tanh, "second", "formula")],
)
def test_where_two_models_part_is_named(model: Net, other: Any, module: str, kind: str) -> None:
    report = polyamp.compare(model, other(), BATCH, loss_fn, RECIPE, 1)
    assert report.first is not None
    assert (report.first.phase, report.first.step, report.first.stage) == ("float32", 1, "forward")
    assert (report.first.module, report.first.kind) == (module, kind), str(report)


class RootMeanSquare(nn.Module):
    """LLaMA's norm, which computes in float32 whatever its input is; `twice` writes the same formula otherwise."""

    def __init__(self, eps: float, twice: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.eps, self.twice = eps, twice

    def forward(self, x: Any) -> Any:
        wide = x.float()
        if self.twice:
            root = torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + self.eps)
            return (wide / root).to(x.dtype) * self.weight
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def decoder(eps: float = 1e-6, *, twice: bool = False) -> nn.Module:
    torch.manual_seed(0)
    blocks = [part for _ in range(3) for part in (RootMeanSquare(eps, twice), nn.Linear(16, 16))]
    return nn.Sequential(nn.Linear(4, 16), *blocks, RootMeanSquare(eps, twice), nn.Linear(16, 3))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_norm_that_casts_to_float32_inside_does_not_alarm(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = rng.standard_normal((8, 4), np.float32), rng.integers(0, 3, 8)
    recipe = RECIPE.replace(policy=policy)
    report = polyamp.compare(decoder(), decoder(twice=True), batch, loss_fn, recipe, 2)
    assert report.agrees, str(report)
    report = polyamp.compare(decoder(), decoder(1e-4, twice=True), batch, loss_fn, recipe, 2)
    assert report.first is not None
    assert (report.first.phase, report.first.step, report.first.module) == ("float32", 1, "1"), str(report)
    assert (report.first.kind, report.first.what) == ("epsilon", "output")


def test_a_fault_in_what_is_compiled_is_found_in_its_output(model: Net) -> None:
    torch.compiler.reset()
    report = polyamp.compare(model, torch.compile(Tanh(), backend="aot_eager"), BATCH, loss_fn, RECIPE, 1)
    assert report.first is not None
    assert (report.first.stage, report.first.module, report.first.what) == ("forward", "", "output")


def test_what_lies_between_two_layers_is_found_in_what_the_second_is_given() -> None:
    def made(approximate: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 32), nn.GELU(approximate), nn.LayerNorm(32, eps=1e-5), nn.Linear(32, 5))

    x = np.random.default_rng(0).standard_normal((8, 12), np.float32)
    other = made("tanh")
    other[2].eps = 1e-6  # another mistake, which is not to be blamed for the first
    first = polyamp.compare(made("none"), other, x).first
    assert first is not None
    assert (first.stage, first.module, first.what, first.after, first.kind) == ("forward", "2", "input", "0", "formula")
    assert first.sentence.startswith("torch a computes gelu of 0, torch b computes gelu_tanh of 0: other formulas")


def test_dropout_on_one_side_alone_is_said(model: Net) -> None:
    other = copy.deepcopy(model)
    other.drop = nn.Dropout(0.0)
    report = polyamp.compare(model, other, BATCH, loss_fn, RECIPE)

    assert report.agrees
    said = "dropout was off: 1 call in torch a and 0 calls in torch b. With dropout they do not train alike"
    assert report.comparisons[0].notes[0] == said
    assert f"  note        {said}" in str(report)
    assert not any("dropout" in note for note in polyamp.compare(model, model, BATCH, loss_fn).comparisons[0].notes)
