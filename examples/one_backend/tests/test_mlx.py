"""MLX tests beyond the conformance suite: compiled functions, modules, global random numbers, threads."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from polyamp_mlx import BACKEND
from polyamp_mlx.precision.op_list import FAMILIES

import polyamp
from polyamp.rules import float32_op_families

FLOAT16 = polyamp.Policy(compute="float16", output="float16")


def half(*shape: int) -> mx.array:
    return mx.full(shape, 0.25, mx.float16)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}


def test_the_op_list_has_every_family() -> None:
    assert set(float32_op_families.OP_FAMILIES) <= set(FAMILIES)


def test_autocast_acts_in_its_block_alone_and_in_its_thread() -> None:
    seen: dict[str, Any] = {}

    def inside(x: mx.array) -> mx.array:
        thread = threading.Thread(target=lambda: seen.update(thread=mx.exp(half(2)).dtype))
        thread.start()
        thread.join()
        seen.update(exp=mx.exp(x).dtype, method=x.exp().dtype, product=(x @ mx.ones((2, 2))).dtype)
        return x

    FLOAT16.autocast(inside)(half(2, 2))
    assert seen == {"thread": mx.float16, "exp": mx.float32, "method": mx.float32, "product": mx.float16}
    assert mx.exp(half(2)).dtype == mx.float16
    assert (half(2, 2) @ mx.ones((2, 2))).dtype == mx.float32


def test_functions_that_mlx_has_compiled_already_follow_the_policy() -> None:
    """`nn.sigmoid` is an example: its program for float16 has a float16 sigmoid."""
    inner: list[mx.Dtype] = []

    def watched(x: mx.array) -> mx.array:
        inner.append(nn.sigmoid(x).dtype)
        return x

    assert nn.sigmoid(half(2)).dtype == mx.float16
    FLOAT16.autocast(watched)(half(2))
    assert inner == [mx.float32]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[mx.zeros(4096, mx.int32)],
        lambda x: mx.take(x, mx.zeros(4096, mx.int32)),
        lambda x: mx.take_along_axis(x, mx.zeros(4096, mx.int32), axis=0),
        lambda x: mx.repeat(x, 4096),
    ],
    ids=["index", "take", "take_along_axis", "repeat"],
)
def test_gradients_of_gathers_are_summed_in_float32(read: Any) -> None:
    """In float16, 2048 + 1 is 2048."""
    gradient = mx.grad(lambda x: FLOAT16.autocast(read)(x).sum())(half(1))
    assert gradient.item() == 4096.0


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_lists_of_modules_have_paths_and_overrides(mode: Any) -> None:
    inner: list[mx.Dtype] = []

    def watch(x: mx.array) -> mx.array:
        inner.append(x.dtype)
        return x

    model = nn.Sequential(nn.Linear(4, 3), watch, nn.Linear(3, 3), watch, nn.Linear(3, 2), watch)
    policy = polyamp.Policy("mixed_bfloat16", mode=mode, overrides={"layers/2": "float32"})
    policy.autocast(model)(mx.ones((2, 4)))
    assert inner == [mx.bfloat16, mx.float32, mx.bfloat16]


def test_what_stands_behind_stop_gradient_is_unused() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    model = nn.Sequential(nn.Linear(4, 3), mx.stop_gradient, nn.Linear(3, 2))
    _, gradients = polyamp.value_and_grad(loss_fn)(polyamp.init(model, recipe), BATCH)
    unused = {path for path, value in gradients.values.items() if value is None}
    assert unused == {"layers/0/weight", "layers/0/bias"}


def test_a_users_model_and_random_numbers_stay_as_they_are() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm(3), nn.Linear(3, 2))
    before = [np.array(model.layers[index][name]) for index, name in ((0, "weight"), (2, "running_mean"))]
    mx.random.seed(3)
    want = np.array(mx.random.uniform(shape=(4,)))
    mx.random.seed(3)
    state, _ = polyamp.train_step(loss_fn, recipe)(polyamp.init(model, recipe), BATCH)
    assert np.array_equal(np.array(mx.random.uniform(shape=(4,))), want)
    after = [model.layers[index][name] for index, name in ((0, "weight"), (2, "running_mean"))]
    assert all(np.array_equal(old, np.array(new)) for old, new in zip(before, after, strict=True))
    assert not np.array_equal(before[1], np.array(state.model.layers[2].running_mean))
    state.model.layers[0].weight[0] = 0.0
    assert not np.array_equal(np.array(state.model.layers[0].weight[0]), np.zeros(4))


def test_what_is_not_supported_says_so() -> None:
    from mlx.optimizers import SGD

    with pytest.raises(polyamp.UnsupportedError, match="trains with polyamp's optimizers"):
        polyamp.init(nn.Linear(4, 2), polyamp.Recipe(policy="float32", optimizer=SGD(0.1)))
    layer = nn.Linear(4, 4)
    with pytest.raises(polyamp.ModelError, match="'layers/0/weight' and 'layers/1/weight' are one array"):
        polyamp.init(nn.Sequential(layer, layer), polyamp.Recipe(policy="float32"))
    model = nn.Linear(4, 2)

    def halve(model: Any, batch: Any) -> Any:
        model.weight = model.weight * 0.5
        return loss_fn(model, batch)

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    with pytest.raises(polyamp.UnsupportedError, match="the forward pass wrote to the parameter 'weight'"):
        polyamp.train_step(halve, recipe)(polyamp.init(model, recipe), BATCH)
    assert BACKEND.info().devices == ("cpu",)
