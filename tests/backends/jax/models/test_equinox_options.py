"""S20: which of `axis_name=` and `rngs=` an equinox module lacks is said at once, with both lines."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp.errors import ModelError

X = np.ones((8, 4), np.float32)


class Dropping(eqx.Module):
    linear: Any
    drop: Any

    def __init__(self, key: Any) -> None:
        self.linear = eqx.nn.Linear(4, 3, key=key)
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return self.drop(self.linear(x), key=key)


class Normed(eqx.Module):
    linear: Any
    norm: Any

    def __init__(self, key: Any) -> None:
        self.linear = eqx.nn.Linear(4, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="rows", mode="batch")

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.linear(x), state)


def dropping() -> Any:
    return Dropping(jax.random.key(0))


def normed() -> Any:
    return eqx.nn.make_with_state(Normed)(jax.random.key(0))


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def over_rows(model: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(model)(x) ** 2)


BOTH = "axis_name='batch', rngs=0"


@pytest.mark.parametrize(
    ("make", "given", "function", "wanted"),
    [
        (dropping, {}, loss_fn, BOTH),
        (dropping, {"rngs": 0}, loss_fn, BOTH),
        (dropping, {"axis_name": "batch"}, loss_fn, BOTH),
        (normed, {}, loss_fn, "axis_name='rows'"),
        (normed, {"axis_name": "batch"}, loss_fn, "axis_name='rows'"),
        (normed, {"axis_name": "rows", "rngs": 0}, loss_fn, "axis_name='rows'"),
    ],
)
def test_s20_the_message_has_the_line_that_works(make: Any, given: dict[str, Any], function: Any, wanted: str) -> None:
    recipe = polyamp.Recipe(policy=polyamp.Policy("mixed_bfloat16"), optimizer=polyamp.sgd(0.1))
    with pytest.raises(ModelError) as caught:
        polyamp.train_step(function, recipe)(polyamp.init(make(), recipe, **given), X)
    assert f"Write polyamp.init(model, recipe, {wanted}), and in loss_fn model(x)" in str(caught.value)
    options: dict[str, Any] = eval(f"dict({wanted})")  # the line that it says
    _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init(make(), recipe, **options), X)
    assert not bool(result.skipped)


def test_s20_under_vmap_both_are_said() -> None:
    recipe = polyamp.Recipe(policy=polyamp.Policy("mixed_bfloat16"), optimizer=polyamp.sgd(0.1))
    with pytest.raises(ModelError, match=r"rngs=0\), with axis_name='batch' where loss_fn maps .* without jax\.vmap"):
        polyamp.train_step(over_rows, recipe)(polyamp.init(dropping(), recipe), X)


def test_s20_what_no_option_mends_stays_the_programs_own_error() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    with pytest.raises(TypeError, match="contracting dimensions"):
        polyamp.train_step(loss_fn, recipe)(polyamp.init(dropping(), recipe, axis_name="batch", rngs=0), X[:, :3])
