"""Optimizers that need a parameter as a whole, against torch's own classes and by kinds of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import RecipeError, UnsupportedError

STEPS = 50


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.Tanh(), nn.Linear(12, 3, bias=False))


class Mixed(nn.Module):
    """An embedding, a convolution, a transposed matrix, a scalar, and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(5, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.turned = nn.Parameter(torch.randn(4, 8).t())
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, :4].abs() * 2).long() % 5
        hidden = self.conv(self.table(tokens).transpose(1, 2)).mean(2)
        out: torch.Tensor = self.head(torch.tanh(hidden @ self.turned.t())) * self.scale
        return out


def batch(number: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(number)
    x = torch.from_numpy(rng.normal(size=(8, 6)).astype(np.float32))
    return {"x": x, "y": x[:, :3].sin()}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def train(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, list[float]]:
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, **options)
    losses = []
    for number in range(STEPS):
        state, result = step(state, batch(number))
        losses.append(float(result.loss))
    return state, losses


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        item = batch(number)
        loss = ((model(item["x"]) - item["y"]) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_s21_muon_is_torchs_in_bfloat16() -> None:
    """torch iterates in bfloat16, whose roundings differ by the order of its products."""
    model = matrices()
    expected = by_hand(model, torch.optim.Muon(model.parameters(), 0.02, weight_decay=0.1))
    _, losses = train(matrices(), polyamp.muon(0.02, ns_dtype="bfloat16"))
    np.testing.assert_allclose(losses, expected, rtol=5e-2)
    _, wide = train(matrices(), polyamp.muon(0.02))
    assert np.abs(np.subtract(wide, expected)).max() < 0.05 * expected[0]


def test_s21_muons_steps_are_orthogonal_whatever_the_gradient() -> None:
    state = polyamp.init(matrices(), recipe := polyamp.Recipe(policy="float32", optimizer=polyamp.muon(0.1)))
    before = {name: p.detach().clone() for name, p in state.parameters.items()}
    polyamp.train_step(loss_fn, recipe)(state, batch(0))
    for name, p in state.parameters.items():
        change = (before[name] * (1 - 0.01) - p.detach()) / 0.1
        values = torch.linalg.svdvals(change) / max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_s21_adafactor_is_torchs_for_matrices_and_vectors() -> None:
    made = [nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    expected = by_hand(made[0], torch.optim.Adafactor(made[0].parameters(), 0.1, weight_decay=0.1))
    state, losses = train(made[1], polyamp.adafactor(0.1, weight_decay=0.1))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    slots = {name: tuple(slot.shape) for name, slot in state.optimizer.state[state.parameters["0/weight"]].items()}
    assert slots == {"step": (), "row_var": (12, 1), "col_var": (1, 6), "variance": ()}


@pytest.mark.parametrize("optimizer", [polyamp.muon(0.01), polyamp.adafactor(0.01)])
def test_every_kind_of_parameter_trains_compiled_or_not(optimizer: Any) -> None:
    state, losses = train(Mixed(), optimizer)
    compiled, again = train(Mixed(), optimizer, compile={"backend": "aot_eager"})
    np.testing.assert_allclose(losses, again, rtol=1e-4)
    for name, p in state.parameters.items():
        assert torch.isfinite(p).all()
        torch.testing.assert_close(p, compiled.parameters[name], rtol=1e-3, atol=1e-4)


def test_muon_leaves_what_is_no_matrix_to_adamw() -> None:
    optimizer = polyamp.muon(0.02, adamw_learning_rate=3e-4, groups=[polyamp.Group("head/**", method="adamw")])
    state = polyamp.init(Mixed(), polyamp.Recipe(policy="float32", optimizer=optimizer))
    assert state.groups is not None
    found = {path: state.groups.of(path) for path in state.parameters}
    assert {path: (member.spec.method, member.learning_rate) for path, member in found.items()} == {
        "table/weight": ("adamw", 3e-4),
        "conv/weight": ("adamw", 3e-4),
        "conv/bias": ("adamw", 3e-4),
        "turned": ("muon", 0.02),
        "scale": ("adamw", 3e-4),
        "head/weight": ("adamw", 3e-4),
        "head/bias": ("adamw", 3e-4),
    }
    assert {member.spec.layout for member in found.values()} == {"out_in"}
    state = polyamp.init(
        Mixed(),
        polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.muon(groups=[polyamp.Group("turned", momentum=0.9)])),
    )
    assert state.groups is not None
    assert state.groups.of("turned").spec.ns_dtype == "bfloat16"
    with pytest.raises(RecipeError, match=r"method='muon' is for parameters with two axes\. Received: 'conv/weight'"):
        polyamp.init(
            Mixed(),
            polyamp.Recipe(policy="float32", optimizer=polyamp.muon(groups=[polyamp.Group("conv", method="muon")])),
        )


@pytest.mark.parametrize("optimizer", [polyamp.muon(0.01), polyamp.adafactor(0.01), polyamp.lamb(0.01)])
def test_complex_parameters_are_refused(optimizer: Any) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match=rf"{optimizer.tag} does not train complex parameters.*'w'"):
        polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=optimizer))
