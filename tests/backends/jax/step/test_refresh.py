"""S28 in JAX: LoRA, new heads and progressive unfreezing of nnx modules and functions, beside optax's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
from polyamp.errors import ModelError, StateError
from polyamp_jax.arrays import named_leaves


class Frozen(nnx.Variable):
    """A weight that is not trained."""


class LoRA(nnx.Module):
    """A layer whose own weights are frozen, and a product of two thin matrices beside it."""

    def __init__(self, base: nnx.Linear, rank: int = 2) -> None:
        self.kernel, self.bias = Frozen(base.kernel[...]), Frozen(base.bias[...])
        inputs, outputs = base.kernel[...].shape
        self.down = nnx.Param(jax.random.normal(jax.random.key(0), (inputs, rank)) * 0.3)
        self.up = nnx.Param(jnp.zeros((rank, outputs)))

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel[...] + self.bias[...] + x @ self.down[...] @ self.up[...]


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.body, self.middle, self.head = (nnx.Linear(*s, rngs=rngs) for s in ((6, 8), (8, 8), (8, 3)))

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.tanh(self.middle(nnx.tanh(self.body(x)))))


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def item(seed: int, outputs: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(8, 6)).astype("f4"), "y": rng.normal(size=(8, outputs)).astype("f4")}


def add_lora(model: Any) -> None:
    model.body = LoRA(model.body)


def freeze(model: Any) -> None:
    model.body.kernel, model.body.bias = Frozen(model.body.kernel[...]), Frozen(model.body.bias[...])


def thaw(model: Any) -> None:
    model.body.kernel, model.body.bias = nnx.Param(model.body.kernel[...]), nnx.Param(model.body.bias[...])


def wider(model: Any) -> None:
    model.head = nnx.Linear(8, 5, rngs=nnx.Rngs(5))


def by_hand(changes: list[Any], sizes: list[int]) -> dict[str, Any]:
    """SGD with momentum over leaves by path: moments of what stayed are kept, by path and shape."""
    model, moments = Net(), dict[str, Any]()
    for number, outputs in enumerate(sizes):
        for seed in (2 * number, 2 * number + 1):
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            batch, pure = item(seed, outputs), nnx.to_pure_dict(params)

            def loss(pure: Any, graph: Any = graph, rest: Any = rest, batch: Any = batch) -> Any:
                return jnp.mean(jnp.square(nnx.merge(graph, pure, rest)(batch["x"]) - batch["y"]))

            now = named_leaves(jax.grad(loss)(pure))
            moments = {
                path: 0.9 * moments[path] + grad if path in moments and moments[path].shape == grad.shape else grad
                for path, grad in now.items()
            }
            leaves = [leaf - 0.05 * moments[path] for path, leaf in named_leaves(pure).items()]
            nnx.update(model, jax.tree.unflatten(jax.tree.structure(pure), leaves))
        if number < len(changes):
            changes[number](model)
    return named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("changes", "sizes", "optimizer"),
    [
        ([add_lora], [3, 3], polyamp.sgd(0.05, momentum=0.9)),
        ([add_lora], [3, 3], optax.sgd(0.05, momentum=0.9)),
        ([wider], [3, 5], optax.sgd(0.05, momentum=0.9)),
        ([freeze, thaw], [3, 3, 3], polyamp.sgd(0.05, momentum=0.9)),
    ],
    ids=["lora, spec", "lora, optax", "head", "frozen and thawed"],
)
def test_s28_a_loop_by_hand_in_which_the_moments_are_kept(changes: list[Any], sizes: list[int], optimizer: Any) -> None:
    wanted = by_hand(changes, sizes)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=64.0))
    state = polyamp.init(Net(), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for number, outputs in enumerate(sizes):
        for seed in (2 * number, 2 * number + 1):
            state, _ = step(state, item(seed, outputs))  # donated: the old state's arrays are gone
        if number < len(changes):
            model = state.model
            changes[number](model)
            state = polyamp.refresh(state, model)
    assert int(state.step) == 2 * len(sizes)
    found = {
        name.removeprefix("model/"): a for name, a in state.backend.export_state(state).items() if "model/" in name
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_s28_a_parameter_that_lies_elsewhere_is_known_by_its_array() -> None:
    """A function's parameters put one level down; and a new one beside them, whose bias correction is its own (S23)."""

    def deep(params: Any, x: Any) -> Any:
        return x @ params["base"]["w"] + params["shift"]

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.05, eps=1e-12))
    state = polyamp.init((lambda p, x: x @ p["w"], {"w": jnp.ones((6, 3))}), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for seed in range(3):
        state, _ = step(state, item(seed))
    moments = {slot: np.asarray(tree["w"]) for slot, tree in state.opt_state.slots.items()}
    _, params = state.model
    state = polyamp.refresh(state, (deep, {"base": params, "shift": jnp.zeros(3)}))
    for slot, tree in state.opt_state.slots.items():
        assert np.array_equal(tree["base"]["w"], moments[slot])
        assert not np.any(tree["shift"])
    assert (int(state.opt_state.count), state.opt_state.missed.tolist()) == (3, [0, 3])
    state, _ = step(state, item(3))
    np.testing.assert_allclose(np.abs(state.params["shift"]), 0.05, rtol=1e-5)


def test_s28_other_values_are_another_parameter_or_said_to_be_the_same() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.05))
    first = Net()
    state = polyamp.init(first, recipe)
    state, _ = polyamp.train_step(loss_fn, recipe)(state, item(0))
    with pytest.raises(ModelError, match=r"other values at 'body/bias' .* change state\.model, not the model that was"):
        polyamp.refresh(state, first)
    with pytest.raises(ModelError, match=r"refresh\(state, model\) needs the changed model"):
        polyamp.refresh(state)
    model = state.model
    model.head = nnx.Linear(8, 3, rngs=nnx.Rngs(5))
    with pytest.raises(ModelError, match=r"'head/kernel'.*fresh=\['head/kernel'\].*keep=\['head/kernel'\]"):
        polyamp.refresh(state, model, keep="head/bias")
    kept = polyamp.refresh(state, model, keep="head").opt_state.slots["exp_avg"]["head"]["kernel"]
    assert np.array_equal(kept, state.opt_state.slots["exp_avg"]["head"]["kernel"])
    anew = polyamp.refresh(state, model, fresh="head").opt_state.slots["exp_avg"]
    assert not np.any(anew["head"]["kernel"])
    assert np.any(anew["body"]["kernel"])


def test_s28_a_donated_state_says_so() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.05))
    state = polyamp.init(Net(), recipe)
    model = state.model
    polyamp.train_step(loss_fn, recipe)(state, item(0))
    with pytest.raises(StateError, match="the state's arrays are gone"):
        polyamp.refresh(state, model)


def test_s28_random_streams_and_the_counts_of_optax_go_on() -> None:
    def apply_fn(params: Any, x: Any, rng: Any) -> Any:
        return (x @ params["w"]) * jax.random.bernoulli(rng, 0.5, (len(x), params["w"].shape[1]))

    recipe = polyamp.Recipe(policy="float32", optimizer=optax.adamw(optax.exponential_decay(0.1, 1, 0.5)))
    ends = []
    for refreshes in (False, True):
        state = polyamp.init((apply_fn, {"w": jnp.ones((6, 3))}), recipe, rngs=0)
        step = polyamp.train_step(loss_fn, recipe)
        for seed in range(4):
            if refreshes and seed == 2:
                state = polyamp.refresh(state, state.model)
            state, _ = step(state, item(seed))
        ends.append(np.asarray(state.params["w"]))
    assert np.array_equal(ends[0], ends[1])


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "lion"])
def test_s28_groups_that_begin_to_matter_keep_moments_and_the_schedule(name: str) -> None:
    """A model without norms, whose parameters are all alike, is given one; and loses it again."""
    rate = polyamp.schedules.step(0.1, every=1, factor=0.5)
    settings: dict[str, Any] = {} if name == "lion" else {"momentum": 0.9}
    spec: Any = getattr(polyamp, name)(rate, weight_decay=0.1, groups=polyamp.no_decay("norm"), **settings)
    recipe = polyamp.Recipe(policy="float32", optimizer=spec)
    state: Any = polyamp.init(Net(), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for seed in range(2):
        state, _ = step(state, item(seed))
    before = state.backend.export_state(state)
    model = state.model
    model.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(1))
    state = polyamp.refresh(state, model)
    after = state.backend.export_state(state)
    kept = {path for path in before if path.startswith("optimizer/") and before[path].shape}
    assert sum(np.any(before[path] != 0) for path in kept) >= 6
    for path in kept - {"optimizer/missed"}:
        assert np.array_equal(after[path], before[path]), path
    assert after["optimizer/count"] == 2
    state, _ = step(state, item(2))
    model = state.model
    del model.norm
    before = state.backend.export_state(state)
    state = polyamp.refresh(state, model)
    after = state.backend.export_state(state)
    assert all(np.array_equal(after[path], before[path]) for path in kept - {"optimizer/missed"})
    assert after["optimizer/count"] == 3


def test_the_guide_runs() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "growing_models.md").read_text(encoding="utf-8")
    section = guide.split("\n## JAX\n")[1].split("\n## ")[0]
    exec(compile(section.split("```python\n")[1].split("```")[0], "docs/guides/growing_models.md", "exec"), {})
