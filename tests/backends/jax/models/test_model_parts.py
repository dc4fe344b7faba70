"""S29: methods, submodules, attributes and parameters of the model in a JAX `loss_fn`, of every library."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from polyamp.errors import ModelError, RecipeError, TraceError, UnsupportedError
from tests.backends.jax.models.two_parts import START, WIDTH, made

MODULES = ["nnx", "linen", "equinox"]
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def policy(mode: str = "autocast", **settings: Any) -> polyamp.Policy:
    return polyamp.Policy("mixed_float16", mode=mode, **settings)


def stepped(kind: str, chosen: polyamp.Policy, loss_fn: Any, steps: int = 1, **settings: Any) -> tuple[Any, Any, Any]:
    """The state before and after some steps, and the last result."""
    model, options = made(kind)
    recipe = polyamp.Recipe(
        policy=chosen, optimizer=polyamp.sgd(0.05), scaler=polyamp.LossScaler(init_scale=8.0), **settings
    )
    before = state = polyamp.init(model, recipe, **options)
    step = polyamp.train_step(loss_fn, recipe, donate=False)
    for _ in range(steps):
        state, result = step(state, X)
    return before, state, result


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("kind", MODULES)
def test_s29_parts_run_under_the_policy(kind: str, mode: str, products: Any, backend: Any) -> None:
    seen: dict[str, Any] = {}

    def loss_fn(model: Any, x: Any) -> Any:
        one, other = model.encode(x), model.encode(x)
        y = model.blocks[0](one)
        seen["outputs"] = {str(a.dtype) for a in (one, y, model.encoder(x), model(x), model.gain)}
        seen["count"] = model.count() + model.size
        read = model.log_gain[...]
        seen["read"] = str(read.dtype)
        seen["params"] = {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)}
        return jnp.mean((y * model.gain - 1.0) ** 2) + 0.0 * read, jnp.mean(jnp.abs(one - other))

    before, after, result = stepped(kind, policy(mode), loss_fn, steps=2)
    assert seen == {
        "outputs": {"float32"},
        "count": 2 * WIDTH,
        "read": "float32" if mode == "autocast" else "float16",
        "params": {"float32"},
    }
    assert float(result.aux) > 0.1, "two calls of one method draw two masks (S12)"
    assert not bool(result.skipped)
    statistics = [jax.tree.leaves(state.running.statistics) for state in (before, after)]
    assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(*statistics, strict=True))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before.params, after.params)
    assert sum(jax.tree.leaves(moved)) >= 5, "the method's parameters and the gain are trained"
    step = backend.train_step(lambda model, x: jnp.mean(model.encode(x) ** 2), before.recipe, compile=False)
    assert set(products(step, before, X)) == {("float16", "float16")}


@pytest.mark.parametrize("kind", MODULES)
def test_s29_a_method_and_a_submodule_follow_overrides(kind: str, products: Any, backend: Any) -> None:
    wide = policy(overrides={"encoder": "float32"})
    before, _, _ = (
        stepped(kind, wide, lambda model, x: jnp.mean(model(x) ** 2), steps=0) if False else (None, None, None)
    )
    model, options = made(kind)
    recipe = polyamp.Recipe(policy=wide, optimizer=polyamp.sgd(0.1))
    before = polyamp.init(model, recipe, **options)
    for loss_fn in (lambda m, x: jnp.mean(m.encode(x) ** 2), lambda m, x: jnp.mean(m.encoder(x) ** 2)):
        step = backend.train_step(loss_fn, recipe, compile=False)
        assert set(products(step, before, X)) == {("float32", "float32")}
    step = backend.train_step(lambda m, x: jnp.mean(m.blocks[0](x) ** 2), recipe, compile=False)
    assert set(products(step, before, X)) == {("float16", "float16")}


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s29_haikus_functions(mode: str, products: Any, backend: Any) -> None:
    def loss_fn(model: Any, x: Any) -> Any:
        one, other = model.encode(x), model.encode(x)
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(model.params))
        return jnp.mean((model.decode(one) - 1.0) ** 2) + 1e-3 * penalty, jnp.mean(jnp.abs(one - other))

    before, after, result = stepped("haiku", policy(mode), loss_fn, steps=2)
    assert float(result.aux) > 0.1
    assert int(after.step) == 2
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before.params, after.params)))
    step = backend.train_step(loss_fn, before.recipe, compile=False)
    assert set(products(step, before, X)) == {("float16", "float16")}
    with pytest.raises(ModelError, match=r"called by its functions: model\.encode\(\.\.\.\), model\.decode\(\.\.\.\)"):
        stepped("haiku", policy(mode), lambda model, x: jnp.mean(model(x)))


def test_s29_functions_of_a_tuple_and_of_a_dict() -> None:
    def tuple_of() -> Any:
        one, two = hk.Linear(3, name="one"), hk.Linear(3, name="two")
        return lambda x: two(one(x)), (one, two)

    transformed = hk.without_apply_rng(hk.multi_transform(tuple_of))
    params = transformed.init(jax.random.key(0), X)
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))

    def loss_fn(model: Any, x: Any) -> Any:
        one, two = model
        return jnp.mean(two(one(x)) ** 2)

    _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init((transformed, params), recipe), X)
    wide = jnp.mean(transformed.apply[1](params, transformed.apply[0](params, X)) ** 2)
    np.testing.assert_allclose(result.loss, wide, rtol=5e-3)


def test_s29_a_function_has_its_params_and_says_what_else_to_pass() -> None:
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))
    pair = (lambda params, x: x @ params["w"], {"w": jnp.full((WIDTH, 2), 300.0)})

    def loss_fn(model: Any, x: Any) -> Any:
        return jnp.mean(model(x)) * 0.0 + jnp.sum(model.params["w"] ** 2)

    _, result = polyamp.train_step(loss_fn, recipe, donate=False)(polyamp.init(pair, recipe), X)
    assert float(result.loss) == 2 * WIDTH * 300.0**2, "float16 does not reach that far"
    with pytest.raises(AttributeError, match=r"one function has the attribute params.*linen_module"):
        polyamp.train_step(lambda m, x: jnp.mean(m.encode(x)), recipe)(polyamp.init(pair, recipe), X)


def test_s29_what_is_written_to_a_variable_of_nnx_is_kept() -> None:
    def loss_fn(model: Any, x: Any) -> Any:
        model.calls[...] += 1.0
        y = model(x)
        model.calls[...] += 1.0
        return jnp.mean(y**2), model.calls[...]

    before, after, result = stepped("nnx", policy(), loss_fn, steps=2, accumulate_steps=2)
    assert float(after.model.calls[...]) == 8.0
    assert float(before.model.calls[...]) == 0.0
    assert [float(value) for value in result.aux] == [6.0, 8.0]


def _sets(model: Any, x: Any) -> Any:
    model.scale = 2.0
    return jnp.mean(model(x))


def _evaluates(model: Any, x: Any) -> Any:
    model.eval()
    return jnp.mean(model(x))


def _misspells(model: Any, x: Any) -> Any:
    return jnp.mean(model.encoed(x))


@pytest.mark.parametrize(
    ("kind", "loss_fn", "error", "message"),
    [
        ("nnx", _sets, TraceError, r"model\.scale = \.\.\. would be lost"),
        ("linen", _sets, TraceError, r"model\.scale = \.\.\. would be lost"),
        ("nnx", _evaluates, UnsupportedError, r"model\.eval is a method of Nnx's base class.*before polyamp\.init"),
        ("equinox", _misspells, AttributeError, "'Equinox' has no attribute 'encoed'. Did you mean encode"),
        ("linen", _misspells, AttributeError, "Did you mean encode.*What linen makes in a @nn.compact method"),
    ],
)
def test_s29_what_would_be_lost_is_an_error(kind: str, loss_fn: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        stepped(kind, policy(), loss_fn)


def test_s29_a_method_that_changes_settings_is_an_error() -> None:
    class Switched(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
            self.frozen = False

        def freeze(self) -> None:
            self.frozen = True

        def __call__(self, x: Any) -> Any:
            return self.layer(x)

    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))

    def loss_fn(model: Any, x: Any) -> Any:
        model.freeze()
        return jnp.mean(model(x))

    with pytest.raises(TraceError, match=r"model\.freeze\(\.\.\.\) changes what the model is made of"):
        polyamp.train_step(loss_fn, recipe)(polyamp.init(Switched(), recipe), X)


@pytest.mark.parametrize("kind", MODULES)
def test_s29_outside_of_a_step_the_parts_are_under_the_policy_too(kind: str) -> None:
    model, options = made(kind)
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))
    native = polyamp.init(model, recipe, **options).model
    bound = recipe.policy.autocast(native)
    block = (native[0] if isinstance(native, tuple) else native).blocks[0] if kind != "linen" else None
    called = bound.blocks[0](X[0])
    assert called.dtype == "float32"
    if block is not None:
        np.testing.assert_allclose(called, block(jnp.asarray(X[0])), rtol=2e-2, atol=2e-3)
        assert np.any(np.asarray(called) != np.asarray(block(jnp.asarray(X[0])))), "the product is of float16"
    np.testing.assert_allclose(bound.gain, np.exp(START), rtol=1e-5)


def test_s29_several_states_and_the_two_halves() -> None:
    """A parameter that one state's part lends to another's loss has its gradient there."""
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=8.0))
    states = [polyamp.init(made("nnx")[0], recipe) for _ in range(2)]

    def loss_fn(models: Any, x: Any) -> Any:
        one, two = models
        return jnp.mean((one.encoder(x) - two.blocks[0](x)) ** 2) + two.log_gain[...]

    value, grads = polyamp.value_and_grad(loss_fn)(states, X)
    names = [[n for n, g in states[0].backend.named_gradients(grad) if g is not None] for grad in grads]
    assert names == [
        ["encoder/bias", "encoder/kernel"],
        ["blocks/0/bias", "blocks/0/kernel", "log_gain"],
    ]
    states, _ = polyamp.apply_gradients(states, grads)
    np.testing.assert_allclose(states[1].params["log_gain"], START - 0.1, rtol=1e-6)
    assert np.isfinite(float(value))


def test_s29_streams_go_to_the_methods_that_take_them() -> None:
    class Takes(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.5)

        def encode(self, x: Any, rngs: Any) -> Any:
            return self.drop(self.layer(x), rngs=rngs)

    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Takes(), recipe, rngs=nnx.Rngs(3))
    step = polyamp.train_step(lambda m, x: (jnp.mean(m.encode(x)), m.encode(x)), recipe)
    masks = []
    for _ in range(2):
        state, result = step(state, X)
        masks.append(np.asarray(result.aux) == 0.0)
    assert 0.3 < masks[0].mean() < 0.7
    assert np.any(masks[0] != masks[1])


def test_s29_linens_collections_and_calls_by_method_name() -> None:
    module, variables = made("linen")[0]
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))
    state = polyamp.init((module, variables), recipe, rngs={"dropout": 0})

    def loss_fn(model: Any, x: Any) -> Any:
        by_name = model(x, method="encode")
        return jnp.mean(by_name**2), model.variables["batch_stats"]["norm"]["mean"]

    _, result = polyamp.train_step(loss_fn, recipe)(state, X)
    assert bool(jnp.any(result.aux != 0.0)), "read after a call they are what the call left"


def test_s29_parts_are_read_like_the_librarys_own() -> None:
    net = eqx.nn.MLP(WIDTH, 2, 8, 2, key=jax.random.key(0))
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))

    def loss_fn(model: Any, x: Any) -> Any:
        assert len(model.layers) == 3
        assert bool(model.layers)
        assert model.layers[0].out_features == 8
        shapes = [layer.weight.shape for layer in model.layers]
        kernels = [layer.params.weight for layer in model.layers]
        assert [kernel.shape for kernel in kernels] == shapes
        assert "layers" in dir(model)
        with pytest.raises(ModelError, match=r"model\.layers\[0\] is a part of it"):
            polyamp.parameters(model.layers[0])
        return jnp.mean(jax.vmap(model)(x) ** 2) + 1e-3 * sum(jnp.sum(kernel**2) for kernel in kernels)

    _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init(net, recipe), X)
    assert np.isfinite(float(result.loss))


def test_s29_a_compact_linen_model_has_its_params_by_module_names() -> None:
    module = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(2)])
    recipe = polyamp.Recipe(policy=policy(), optimizer=polyamp.sgd(0.1))
    state = polyamp.init((module, module.init(jax.random.key(0), X)), recipe)

    def loss_fn(model: Any, x: Any) -> Any:
        kernels = [layer["kernel"] for layer in model.params.values()]
        return jnp.mean(model(x) ** 2) + 1e-3 * sum(jnp.sum(kernel**2) for kernel in kernels)

    _, result = polyamp.train_step(loss_fn, recipe)(state, X)
    assert np.isfinite(float(result.loss))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("kind", MODULES)
def test_s29_the_librarys_own_ways_to_the_parameters_give_the_masters(kind: str, mode: str) -> None:
    """A penalty over what they give would be 0 if the model were one opaque leaf."""
    ways = {"nnx": lambda node: nnx.state(node, nnx.Param), "equinox": lambda n: eqx.filter(n, eqx.is_inexact_array)}

    def loss_fn(model: Any, x: Any) -> Any:
        own = ways.get(kind, lambda node: node)
        gain = model.log_gain if mode == "autocast" else START
        parts = [own(model.encoder), own(model.blocks), own(model.norm), gain]
        whole = model if kind == "linen" else own(model)  # nnx's and equinox's are pytrees of all that is in them
        trees = [whole, model.params, own(model), polyamp.parameters(model), parts]
        penalties = [sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)) for tree in trees]
        return jnp.mean(model(x) ** 2) + penalties[0], jnp.stack(penalties)

    _, _, result = stepped(kind, policy(mode), loss_fn)
    assert float(result.aux[0]) > START**2
    np.testing.assert_allclose(result.aux, float(result.aux[0]), rtol=1e-6)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, x: jnp.mean(jax.checkpoint(lambda model, x: model(x))(model, x)),
        lambda model, x: jnp.mean(jax.tree.map(lambda leaf: leaf, model).encode(x)),
        jax.jit(lambda model, x: jnp.mean(model(x))),
    ],
    ids=["checkpoint", "tree.map", "jit"],
)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_s29_a_model_does_not_go_through_a_transformation(kind: str, loss_fn: Any) -> None:
    with pytest.raises(RecipeError, match="call no transformation of JAX on a function of the model"):
        stepped(kind, policy(), loss_fn)
