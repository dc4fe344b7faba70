"""`observer.watch`: what comes out of a pass equals what JAX gives by hand, in the dtypes of the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import polyamp

Seen = dict[tuple[str, str], tuple[Any, str]]


def watched(backend: Any, state: Any, loss_fn: Any, batch: Any) -> tuple[Any, Seen, list[tuple[str, str]]]:
    """What was watched, and what was seen by (path, what), and in which order."""
    seen: Seen = {}

    def see(path: str, what: Any, array: Any, dtype: str) -> None:
        assert array.dtype in (np.float32, np.float64)
        seen[path, what] = array, dtype

    return backend.observer.capture_pass(state, loss_fn, batch, see), seen, list(seen)


def test_outputs_cotangents_and_gradients_are_those_of_jax(backend: Any, make_kind: Any, batch: Any) -> None:
    module, variables = make_kind("linen").model
    first, second, third = (variables["params"][name] for name in ("first", "second", "third"))
    data = batch()

    def parts(extra: Any, params: Any) -> Any:
        x = data["x"] @ params[0]["kernel"] + params[0]["bias"] + extra[0]
        y = x @ params[1]["kernel"] + params[1]["bias"] + extra[1]
        z = jax.nn.relu(y) @ params[2]["kernel"] + params[2]["bias"] + extra[2]
        return jnp.mean((z * data["gain"] - data["y"]) ** 2), (x, y, z)

    zeros = [jnp.zeros((8, width)) for width in (8, 8, 3)]
    grad = jax.value_and_grad(parts, argnums=(0, 1), has_aux=True)
    (loss, outputs), (cotangents, gradients) = grad(zeros, (first, second, third))

    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["x"]) * batch["gain"] - batch["y"]) ** 2)

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init((module, variables), recipe)
    found, seen, order = watched(backend, state, loss_fn, data)
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    assert found.hidden_reason == ""
    paths = ["first", "second", "third", ""]
    forward = [(path, what) for path in paths for what in ("input", "output") if path or what == "output"]
    assert order == forward + [(path, "cotangent") for path in reversed(paths)]
    np.testing.assert_array_equal(seen["first", "input"][0], data["x"])
    np.testing.assert_allclose(seen["third", "input"][0], jax.nn.relu(outputs[1]), 1e-5, 1e-6)
    assert {(row.module, row.name, row.dtype, row.rule) for row in found.operations} >= {
        (path, name, "float32", "off") for path in paths[:3] for name in ("dot_general", "add")
    }
    for path, output, cotangent, gradient in zip(paths, outputs, cotangents, gradients, strict=False):
        np.testing.assert_allclose(seen[path, "output"][0], output, 1e-5, 1e-6)
        np.testing.assert_allclose(seen[path, "cotangent"][0], cotangent, 1e-5, 1e-7)
        for name in ("kernel", "bias"):
            np.testing.assert_allclose(found.gradients[f"{path}/{name}"], gradient[name], 1e-5, 1e-7)
    polyamp.train_step(loss_fn, recipe)(state, data)  # the state was not consumed


def test_aux_beside_the_loss_changes_nothing(backend: Any, make_kind: Any, batch: Any) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(make_kind("linen").model, recipe)
    expected, _, order = watched(backend, state, loss_fn, batch())
    found, _, seen = watched(backend, state, lambda m, batch: (loss_fn(m, batch), {"rows": 8.0}), batch())
    assert found.loss == expected.loss
    assert seen == order


def test_what_is_seen_is_what_the_step_computes(backend: Any, make: Any, loss_fn: Any, batch: Any, recipe: Any) -> None:
    made = make()
    paths = [path for path in made.layers if made.layers[0] != "first" or "rngs" not in made.options]
    state = polyamp.init(made.model, recipe("mixed_float16"), **made.options)
    found, seen, _ = watched(backend, state, loss_fn, batch())
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    assert found.loss == float(loss)
    flat = {jax.tree_util.keystr(k, simple=True, separator="/"): leaf for k, leaf in
            jax.tree_util.tree_leaves_with_path(gradients.values)}  # fmt: skip
    assert list(found.gradients) == list(flat)
    for name, gradient in flat.items():
        np.testing.assert_allclose(found.gradients[name], gradient, 1e-6, 1e-7)
    assert seen["", "output"][1] == "float32"
    if type(made.model) is tuple and not hasattr(made.model[0], "apply"):
        assert "function" in found.hidden_reason
        assert set(seen) == {("", "output"), ("", "cotangent")}
        return
    assert {path for path, _ in seen} == {*paths, ""}
    assert {seen[path, "output"][1] for path in paths} == {"float16"}
    rows = {(row.module, row.name): row.dtype for row in found.operations}
    assert {rows[path, "dot_general"] for path in paths} == {"float16"}


def test_calls_are_counted_and_what_a_loop_runs_is_not_shown(backend: Any) -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            layer = linen.Dense(4, name="layer")
            x = linen.remat(linen.Dense)(4, name="again")(layer(layer(x)))
            scanned = linen.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return scanned(name="loop")(x)[0]

    class Body(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(4, name="inner")(x), None

    x = np.ones((2, 4), np.float32)
    module = Net()
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
    state = polyamp.init((module, module.init(jax.random.key(0), x)), recipe)
    found, seen, _ = watched(backend, state, lambda model, x: jnp.mean(model(x) ** 2), x)
    assert {path for path, _ in seen} == {"layer", "layer#2", "again", ""}
    np.testing.assert_array_equal(seen["layer#2", "input"][0], seen["layer", "output"][0])
    np.testing.assert_array_equal(found.gradients["loop/inner/kernel[1]"], found.gradients["loop/inner/kernel"][1])


def test_what_the_loss_does_not_depend_on_has_no_gradient(backend: Any) -> None:
    def apply_fn(params: Any, x: Any) -> Any:
        return x @ jax.lax.stop_gradient(params["still"]) @ params["moving"]

    params = {"moving": jnp.ones((3, 2)), "still": jnp.ones((4, 3))}
    state = polyamp.init((apply_fn, params), polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)))
    found, _, _ = watched(backend, state, lambda model, x: jnp.sum(model(x)), np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(found.gradients["moving"], np.full((3, 2), 8.0))
    assert found.gradients["still"] is None


def test_a_pass_is_traced_once_for_all_steps(backend: Any, make_kind: Any, batch: Any, recipe: Any) -> None:
    made, traced = make_kind("nnx", dropout=True), []

    def loss_fn(model: Any, batch: Any) -> Any:
        traced.append(1)
        return jnp.mean(model(batch["x"]) ** 2)

    rule = recipe("mixed_bfloat16", optimizer=polyamp.adamw(0.1))
    with backend.observer.model_copy(made.model) as model:
        state = polyamp.init(model, rule)
        step = polyamp.train_step(loss_fn, rule)
        for number in range(3):
            backend.observer.capture_pass(state, loss_fn, batch(number), lambda *_: None)
            state, _ = step(state, batch(number))
    assert len(traced) == 2
