"""Given random numbers: by the rule of `UniformSource`, in call order, and repeated in repeated passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp_torch.observe.observer import OBSERVER

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))


class Numbers:
    """Source of draws that records its calls."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.given: list[np.ndarray[Any, Any]] = []

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        self.given.append(self.rng.random(shape, dtype="f4"))
        return self.given[-1]


X = torch.linspace(-2, 3, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5)


def drop(draw: Any, rate: float) -> Any:
    return torch.from_numpy(draw >= np.float32(rate)).float() / (1 - rate)


DROPS = {
    "module": (lambda x: nn.Dropout(0.3)(x), lambda x, u: x * drop(u, 0.3)),
    "functional": (lambda x: functional.dropout(x, 0.3), lambda x, u: x * drop(u, 0.3)),
    "by name": (lambda x: functional.dropout(input=x, p=0.3), lambda x, u: x * drop(u, 0.3)),
    "in place": (lambda x: functional.dropout(x.clone(), 0.3, inplace=True), lambda x, u: x * drop(u, 0.3)),
    "torch's own": (lambda x: torch.dropout(x, 0.3, train=True), lambda x, u: x * drop(u, 0.3)),
    "all": (lambda x: functional.dropout(x, 1.0), lambda x, u: x * 0),
    "channels": (lambda x: nn.Dropout2d(0.3)(x), lambda x, u: x * drop(u, 0.3)),
    "rand": (lambda x: torch.rand(2, 3), lambda x, u: torch.from_numpy(u)),
    "rand_like": (lambda x: torch.rand_like(x, dtype=torch.float64), lambda x, u: torch.from_numpy(u).double()),
    "uniform_": (lambda x: torch.empty(4).uniform_(-1, 3), lambda x, u: torch.from_numpy(u * 4 - 1)),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((7,), 0.8)), lambda x, u: torch.from_numpy(u >= 0.2).float()),
    "bernoulli_": (lambda x: torch.empty(9).bernoulli_(0.8), lambda x, u: torch.from_numpy(u >= 0.2).float()),
    "randn": (lambda x: torch.randn(size=(5,)), lambda x, u: torch.special.ndtri(torch.from_numpy(u).double()).float()),
    "randint": (lambda x: torch.randint(2, 9, (6,)), lambda x, u: torch.from_numpy(np.floor(u * 7) + 2).long()),
}


@pytest.mark.parametrize("name", DROPS)
def test_the_rule_of_draws(name: str) -> None:
    run, wanted = DROPS[name]
    numbers = Numbers()
    with OBSERVER.disable_dropout(nn.Identity(), numbers):
        got = run(X)
    (draw,) = numbers.given
    assert draw.shape == {"channels": (2, 3, 1, 1)}.get(name, tuple(got.shape))
    expected = wanted(X, draw)
    assert got.dtype == expected.dtype
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    with OBSERVER.disable_dropout(nn.Identity(), Numbers()):
        y = functional.alpha_dropout(x, 0.4, training=True)
    assert abs(float(y.mean())) < 0.01
    assert abs(float(y.std()) - 1) < 0.01


@pytest.mark.parametrize(
    "run",
    [
        lambda x: functional.alpha_dropout(x, 0.4, training=True, inplace=True),
        lambda x: functional.feature_alpha_dropout(x, 0.4, training=True, inplace=True),
        lambda x: torch.alpha_dropout_(x, 0.4, train=True),
    ],
    ids=["function", "channels", "name"],
)
def test_alpha_dropout_in_place_writes_into_its_input(run: Any) -> None:
    x = X.clone()
    with OBSERVER.disable_dropout(nn.Identity(), Numbers()):
        y = run(x)
    assert y is x
    assert not torch.equal(x, X)


def test_nothing_is_drawn_where_nothing_drops() -> None:
    numbers = Numbers()
    with OBSERVER.disable_dropout(nn.Identity(), numbers):
        assert torch.equal(nn.Dropout(0.5).eval()(X), X)
        assert torch.equal(functional.dropout(X, 0.0), X)
        functional.scaled_dot_product_attention(X, X, X)
    assert numbers.given == []


def test_what_no_other_framework_draws_is_refused_by_name() -> None:
    with (
        OBSERVER.disable_dropout(nn.Identity(), Numbers()),
        pytest.raises(polyamp.UnsupportedError, match="numbers of randperm"),
    ):
        torch.randperm(3)


@pytest.mark.parametrize("mask", ["none", "causal", "float", "bool"])
def test_attention_drops_weights(mask: str) -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    more: dict[str, Any] = {
        "none": {},
        "causal": {"is_causal": True},
        "float": {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5)},
        "bool": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    }[mask]
    numbers = Numbers()
    with OBSERVER.disable_dropout(nn.Identity(), numbers):
        got = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **more)
        # rows of the identity as values: torch's own kernel returns the weights
    weights = functional.scaled_dot_product_attention(q, k, torch.eye(5).expand(2, 3, 5, 5), **more)
    assert torch.allclose(got, (weights * drop(numbers.given[0], 0.4)) @ v, atol=1e-6)
    module = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    for wants in (True, False):
        numbers = Numbers()
        with OBSERVER.disable_dropout(module, numbers):
            module(q[0], q[0], q[0], need_weights=wants)
        assert [draw.size for draw in numbers.given] == [3 * 2 * 5 * 5]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_drop_between_layers(kind: Any, packed: bool) -> None:
    torch.manual_seed(0)
    stack = kind(4, 3, 3, dropout=0.4, bidirectional=True, batch_first=True)
    x: Any = torch.randn(2, 5, 4)
    x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True) if packed else x
    numbers = Numbers()
    with OBSERVER.disable_dropout(stack, numbers):
        got, _ = stack(x)
    given = x
    for layer in range(3):
        one = kind(4 if layer == 0 else 6, 3, 1, bidirectional=True, batch_first=True)
        own = dict(stack.named_parameters())
        one.load_state_dict({name: own[name.replace("l0", f"l{layer}")] for name in one.state_dict()})
        given, _ = one(given)
        if layer < 2:
            mask = drop(numbers.given[layer], 0.4)
            given = given._replace(data=given.data * mask) if packed else given * mask
    assert len(numbers.given) == 2
    one_data, other_data = (got.data, given.data) if packed else (got, given)
    assert torch.allclose(one_data, other_data, atol=1e-6)


class Repeats(nn.Module):
    """Block with dropout, applied three times; checkpointed or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(4, 4)
        self.reentrant = reentrant

    def block(self, x: Any) -> Any:
        return x + self.second(self.drop(torch.relu(self.first(x))))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def _into(seen: list[Any]) -> Any:
    return lambda *each: seen.append(each)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("randomness", ["off", "given"])
def test_a_checkpoint_is_seen_once_and_drops_the_same_again(policy: str, randomness: str) -> None:
    torch.manual_seed(0)
    weights = Repeats(None).state_dict()
    batch = np.random.default_rng(0).standard_normal((6, 4), "f4")
    recipe = RECIPE.replace(policy=policy)

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch).float().square().mean()

    found = []
    for reentrant in (None, False, True):
        model = Repeats(reentrant)
        model.load_state_dict(weights)
        seen: list[Any] = []
        with OBSERVER.disable_dropout(model, Numbers() if randomness == "given" else None):
            state = polyamp.init(model, recipe)
            watched = OBSERVER.capture_pass(state, loss_fn, batch, _into(seen))
        with OBSERVER.disable_dropout(model, Numbers() if randomness == "given" else None):
            _, result = polyamp.train_step(loss_fn, recipe)(state, batch)
        assert sum(what != "input" for _, what, *_ in seen) == 2 * (1 + 4 + 3 + 3)
        found.append(({each[:2]: each[2] for each in seen}, watched.gradients, result.grad_norm))
    plain, gradients, norm = found[0]
    assert {path for path, _ in plain} >= {"", "first", "first#4", "drop#3", "second#3"}
    for seen, others, other in found[1:]:
        assert seen.keys() == plain.keys()
        assert all(np.array_equal(seen[key], plain[key]) for key in plain)
        assert all(np.array_equal(others[name], gradients[name]) for name in gradients)  # type: ignore[arg-type]
        assert float(other) == float(norm)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: nn.Dropout(0.5)(x), 1),
        (lambda x: functional.dropout(functional.alpha_dropout(x, 0.1, True), training=False), 1),
        (lambda x: nn.Dropout(0.0)(nn.Dropout(0.5).eval()(x)), 0),
        (lambda x: torch.dropout(x, 0.5, True), 1),
        (lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), 1),
        (lambda x: nn.MultiheadAttention(4, 2, dropout=0.5)(x, x, x)[0], 1),
        (lambda x: nn.MultiheadAttention(4, 2, dropout=0.5).eval()(x, x, x)[0], 0),
        (lambda x: nn.LSTM(4, 4, 3, dropout=0.5)(x)[0], 2),
        (lambda x: nn.GRU(4, 4, 3, dropout=0.5)(nn.utils.rnn.pack_sequence([x[0], x[1]]))[0].data, 2),
        (lambda x: checkpoint(nn.Dropout(0.5), x.requires_grad_(), use_reentrant=False), 1),
    ],
)
def test_calls_that_would_have_dropped_are_counted(call: Any, expected: int) -> None:
    with OBSERVER.disable_dropout(nn.Identity(), None) as count:
        made = call(torch.ones(2, 3, 4))
        if made.requires_grad:
            made.sum().backward()
    assert count.calls == expected


def test_what_is_compiled_cannot_be_counted() -> None:
    with OBSERVER.disable_dropout(torch.compile(nn.Dropout(0.5), backend="eager"), None) as count:
        assert count.calls is None
