"""S20: what `loss_fn` raises stays the program's own error, whatever the batch, the loss or the error itself is."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import BatchError, LossError, RecipeError
from polyamp.reference import MLP
from polyamp.train import error_hints

RECIPE = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))


class OwnError(Exception):
    """The program's."""


def raises(model: Any, batch: Any) -> Any:
    raise OwnError("own")


def state() -> Any:
    return polyamp.init(MLP.random([4, 8, 1], seed=0), RECIPE)


class Pair:
    """A batch that is unpacked into its arrays: `x, y = batch`."""

    def __iter__(self) -> Iterator[Any]:
        return iter((np.ones((2, 4), "f4"), np.zeros((2, 1), "f4")))


class AnyAttribute(dict[str, Any]):
    """A dict whose keys are attributes, with an empty one for each that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyAttribute()


class Lazy:
    """A leaf that cannot be looked at now."""

    @property
    def dtype(self) -> Any:
        raise RuntimeError("not loaded")


@pytest.mark.parametrize("batch", [Pair(), AnyAttribute(x=1), {"x": Lazy()}, collections.deque([1]), {1: 2}.values()])
def test_s20_what_loss_fn_raises_comes_through_whatever_the_batch_is(batch: Any) -> None:
    error_hints.add_error_hints(OwnError("own"), raises, [state()], batch)  # raises nothing


def test_s20_a_batch_that_may_yield_batches_is_said_in_the_note() -> None:
    error = OwnError("own")
    error_hints.add_error_hints(error, raises, [state()], Pair())
    assert "batch can be iterated over: if it yields batches" in error.__notes__[0]


class DataLoader:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("batch", [DataLoader(), iter([]), zip((), strict=True)])
def test_s20_a_loader_is_certain(batch: Any) -> None:
    with pytest.raises(BatchError, match="which yields batches"):
        error_hints.add_error_hints(TypeError("not subscriptable"), raises, [state()], batch)


def test_s20_an_error_that_takes_no_note_comes_through() -> None:
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        code: int = 1

    def loss_fn(model: Any, batch: Any) -> Any:
        raise FrozenError

    with pytest.raises(FrozenError):
        polyamp.train_step(loss_fn, RECIPE)(state(), {"x": np.ones((2, 4), "f4")})


class Loss:
    """A loss that is a module with weights of its own, such as a perceptual one."""

    def parameters(self) -> Any:
        return [1.0]

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def forward(self, model: Any, batch: Any) -> Any:
        raise ValueError("own")


class Net(Loss):
    """A model."""

    def forward(self, x: Any, batch: Any = None) -> Any:
        raise ValueError("own")


def test_s20_a_loss_that_is_a_module_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"^own\n"):
        polyamp.train_step(Loss(), RECIPE)(state(), {})
    with pytest.raises(RecipeError, match=r"a Net .*, a model"):
        polyamp.train_step(Net(), RECIPE)(state(), {})


def test_s20_a_clearer_error_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that goes on after it has the memory of the failed step back, without a collection of garbage."""
    backend = type(state().backend)
    monkeypatch.setattr(backend, "explain_error", lambda *_: LossError("clearer"), raising=False)
    kept: list[weakref.ref[Any]] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        activation = np.ones(3)
        kept.append(weakref.ref(activation))
        raise OwnError

    gc.collect()
    gc.disable()
    try:
        said = None
        try:
            polyamp.train_step(loss_fn, RECIPE)(state(), {"x": np.ones((2, 4), "f4")})
        except LossError as error:
            said = str(error), type(error.__cause__)
        assert said == ("clearer", OwnError)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_loss_of_a_module_of_the_users_that_is_called_as_a_backend_is_the_users() -> None:
    def loss_fn(model: Any, batch: Any) -> Any: ...

    loss_fn.__module__ = "reference.losses"
    polyamp.train_step(loss_fn, RECIPE)


def test_a_tuple_of_micro_batches_is_told_from_a_list_of_them() -> None:
    """A tuple is one batch, whose arrays are split (S8), whatever its members are."""

    def by_name(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    recipe = RECIPE.replace(accumulate_steps=2)
    made, step = polyamp.init(MLP.random([4, 8, 1], seed=0), recipe), polyamp.train_step(by_name, recipe)
    parts = tuple({"x": np.ones((rows, 4), "f4"), "y": np.zeros((rows, 1), "f4")} for rows in (2, 2, 3))
    with pytest.raises(TypeError) as error:
        step(made, parts[:2])
    assert "batch is a tuple of 2: one batch, whose arrays are split for accumulate_steps." in error.value.__notes__[0]
    assert "pass a list of them: step(state, list(batch))." in error.value.__notes__[0]
    with pytest.raises(BatchError, match=r"If its members are micro-batches, pass a list of them: step\(state, list"):
        step(made, parts[1:])
    with pytest.raises(BatchError, match=r"Received: batch\[0\]: 2, batch\[1\]: 3\.$"):
        step(made, (np.ones((2, 4), "f4"), np.zeros((3, 1), "f4")))
    assert np.isfinite(float(step(made, list(parts[1:]))[1].loss))
