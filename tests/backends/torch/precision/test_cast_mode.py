"""mode="cast" with float32 masters: gradients, tied weights, buffers, parametrizations, parts of a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import polyamp

CAST = polyamp.Policy("mixed_bfloat16", mode="cast")
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
Values = dict[str, torch.Tensor]


def gradients(model: nn.Module, loss_fn: Any = lambda m, b: m(b).square().mean()) -> Values:
    recipe = polyamp.Recipe(policy=CAST, optimizer=polyamp.sgd(0.1))
    _, grads = polyamp.value_and_grad(loss_fn)(polyamp.init(model, recipe), X)
    values: Values = grads.values
    return {name.replace("/", "."): value for name, value in values.items()}


def by_functional_call(model: nn.Module, x: torch.Tensor) -> Values:
    """What torch's own words for it give: a call of the whole module on cast tensors."""
    masters = dict(model.named_parameters())
    cast = {name: p.to(torch.bfloat16) for name, p in masters.items()}
    loss = torch.func.functional_call(model, cast, (x.to(torch.bfloat16),)).float().square().mean()
    return dict(zip(masters, torch.autograd.grad(loss, list(masters.values())), strict=True))


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make()
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.outward.weight = self.inward.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outward(self.inward(x).tanh())
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x)[0]
        return out


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)),
    "tied": Tied,
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2)),
    "lstm": Recurrent,
}


@pytest.mark.parametrize("name", ["linear", "tied", "weight_norm", "lstm"])
def test_gradients_reach_the_masters_as_through_functional_call(name: str) -> None:
    model = seeded(MODELS[name])
    want = by_functional_call(seeded(MODELS[name]), X)
    got = gradients(model)
    assert got.keys() == want.keys()
    assert {g.dtype for g in got.values()} == {torch.float32}
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["linear", "tied", "weight_norm", "lstm"])
def test_nothing_is_left_in_the_module(name: str) -> None:
    model = seeded(MODELS[name])
    before = {key: (id(p), p.detach().clone()) for key, p in model.named_parameters()}
    CAST.autocast(model)(X).sum().backward()
    assert {key: id(p) for key, p in model.named_parameters()} == {key: at for key, (at, _) in before.items()}
    assert all(torch.equal(p, before[key][1]) for key, p in model.named_parameters())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(X), model(X))


def test_an_rnns_own_list_of_weights_holds_the_masters_again() -> None:
    model = seeded(Recurrent)
    CAST.autocast(model)(X)
    assert all(held is own for held, own in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True))


def test_weights_are_cast_once_and_computed_with_in_16_bits() -> None:
    model = seeded(Tied)
    seen: list[tuple[int, torch.dtype]] = []
    for part in (model.inward, model.outward):
        part.register_forward_hook(lambda m, a, out: seen.append((id(m.weight), out.dtype)))
    CAST.autocast(model)(X)
    assert seen[0] == seen[1], "one copy of the tied weight"
    assert seen[0][1] == torch.bfloat16
    assert model.inward.weight is model.outward.weight


def test_parts_called_by_themselves_in_loss_fn() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)
            self.seen: list[torch.dtype] = []
            self.encoder[0].register_forward_hook(lambda m, a, out: self.seen.append(out.dtype))

    def loss_fn(model: Any, batch: Any) -> Any:
        return model.decoder(model.encoder(batch.to(model.decoder.weight.dtype))).float().square().mean()

    model = seeded(Encoder)
    got = gradients(model, loss_fn)
    assert model.seen == [torch.bfloat16]
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert all(value.abs().sum() > 0 for value in got.values())


class Counting(nn.Module):
    """A batch norm, and buffers that forward writes in place and replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 2)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
        self.total: torch.Tensor
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.detach().sum(0)
        self.last = x.detach().mean(0)
        self.seen += [self.total.dtype, self.norm.running_mean.dtype]  # type: ignore[union-attr]  # it tracks
        out: torch.Tensor = self.linear(self.norm(x))
        return out


def test_buffers_written_in_forward_come_back_in_float32() -> None:
    model = seeded(Counting)
    CAST.autocast(model)(X)
    assert model.seen == [torch.bfloat16, torch.float32]
    assert {b.dtype for name, b in model.named_buffers() if "num" not in name} == {torch.float32}
    torch.testing.assert_close(model.total, X.bfloat16().sum(0).float())
    torch.testing.assert_close(model.last, X.bfloat16().mean(0).float())
    plain = nn.BatchNorm1d(8)
    plain(X.bfloat16())
    torch.testing.assert_close(model.norm.running_mean, plain.running_mean)
    assert model.norm.num_batches_tracked.item() == 1


def test_a_calls_no_grad_does_not_show_in_the_next() -> None:
    model = seeded(MODELS["linear"])
    bound: Any = CAST.autocast(model)
    with bound.installed():
        with torch.no_grad():
            assert not bound(X).requires_grad
        bound(X).sum().backward()
    assert model[0].weight.grad is not None
    with torch.inference_mode():
        assert not bound(X).requires_grad
    assert bound(X).requires_grad


def test_an_error_in_forward_puts_the_masters_back() -> None:
    model = seeded(MODELS["linear"])
    masters = list(model.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        CAST.autocast(model)(torch.ones(1, 3))
    assert all(a is b for a, b in zip(masters, model.parameters(), strict=True))


def test_s12_what_a_pass_writes_to_a_buffer_through_data_is_kept() -> None:
    """Which moves no version counter; a buffer that nothing writes to keeps the digits that 16 bits have not."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("written", torch.zeros(2))
            self.register_buffer("kept", torch.tensor([1.001, float("nan")]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("written").data.add_(1.0)
            return self.layer(x) * self.get_buffer("kept")[0]

    model = Averaged()
    recipe = polyamp.Recipe(policy=polyamp.Policy("mixed_bfloat16", mode="cast"), optimizer=polyamp.sgd(0.1))
    state, step = polyamp.init(model, recipe), polyamp.train_step(lambda m, b: m(b).square().mean(), recipe)
    for _ in range(3):
        step(state, torch.ones(4, 3))
    assert model.get_buffer("written").tolist() == [3.0, 3.0]
    assert model.get_buffer("kept")[0] == torch.tensor(1.001)
