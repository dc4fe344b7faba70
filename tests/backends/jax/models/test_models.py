"""Every kind of JAX model: trained under each policy, with inner dtypes, running statistics and random streams."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import core, linen, nnx

import polyamp
from polyamp.errors import ModelError, PolicyError, UnsupportedError

POLICIES = {"float32": "float32", "mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


TRAINED = [("linen", policy) for policy in POLICIES]
TRAINED += [(kind, "mixed_float16") for kind in ("nnx", "equinox", "haiku", "function")]


@pytest.mark.parametrize(("kind", "policy"), TRAINED)
def test_it_trains_and_computes_in_the_policys_dtype(
    make_kind: Any, kind: str, policy: str, recipe: Any, batch: Any, loss_fn: Any, backend: Any, products: Any
) -> None:
    made = make_kind(kind)
    chosen = recipe(policy, optimizer=polyamp.adam(1e-2))
    state = polyamp.init(made.model, chosen, **made.options)
    step = polyamp.train_step(loss_fn, chosen)
    losses = []
    for _ in range(15):
        state, result = step(state, batch())
        losses.append(float(result.loss))
    assert losses[-1] < 0.7 * losses[0]
    assert int(result.step) == 15
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    run = backend.value_and_grad(loss_fn, compile=False)
    found = products(lambda s, b: run([s], b), state, batch())
    assert len(found) >= 8, "three forward products and at least five backward ones"
    assert set(found) == {(POLICIES[policy],) * 2}
    gradients = jax.eval_shape(lambda s, b: polyamp.value_and_grad(loss_fn)(s, b)[1].values, state, batch())
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}


def test_the_users_own_arrays_are_never_donated_and_the_model_comes_back_in_its_native_form(
    make: Any, recipe: Any, batch: Any, loss_fn: Any
) -> None:
    made, chosen = make(dropout=True), recipe("mixed_bfloat16")
    mine = [leaf for leaf in jax.tree.leaves(made.model) if isinstance(leaf, jax.Array)]
    before = [np.array(jax.random.key_data(x) if x.dtype.name.startswith("key") else x) for x in mine]
    state = polyamp.init(made.model, chosen, **made.options)
    start = [np.array(leaf) for leaf in jax.tree.leaves(state.params)]
    step = polyamp.train_step(loss_fn, chosen)
    for _ in range(2):
        state, _ = step(state, batch())
    assert not any(leaf.is_deleted() for leaf in mine)
    after = [np.array(jax.random.key_data(x) if x.dtype.name.startswith("key") else x) for x in mine]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    model = state.model
    assert type(model) is type(made.model)
    assert jax.tree.structure(model) == jax.tree.structure(made.model)
    again, trained = (jax.tree.leaves(each.params) for each in (polyamp.init(model, chosen, **made.options), state))
    assert all(np.array_equal(a, b) for a, b in zip(again, trained, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(start, trained, strict=True))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "mixed_float16") for kind in ("linen", "nnx", "equinox", "haiku")), ("linen", "float32")],
)
def test_running_statistics_move_with_applied_steps_only(
    make_kind: Any, kind: str, policy: str, recipe: Any, batch: Any, loss_fn: Any, backend: Any
) -> None:
    """And a model comes back with them."""
    made = make_kind(kind, norm=True)
    chosen = recipe(policy, scaler=polyamp.LossScaler(init_scale=2.0**8))
    state = polyamp.init(made.model, chosen, **made.options)
    step = polyamp.train_step(loss_fn, chosen)

    def running() -> dict[str, Any]:
        return {name: v for name, v in backend.export_state(state).items() if name.startswith("running/")}

    start = running()
    assert start
    assert {v.dtype.name for v in start.values()} <= {"float32", "int32", "bool"}
    state, result = step(state, batch(0, gain=np.inf))
    assert bool(result.skipped)
    skipped = running()
    assert all(start[name].tobytes() == skipped[name].tobytes() for name in start)
    state, result = step(state, batch(0))
    assert not bool(result.skipped)
    applied = running()
    moved = [name for name in start if start[name].tobytes() != applied[name].tobytes()]
    assert len(moved) >= 2, "mean and variance"
    assert all(applied[name].dtype == start[name].dtype for name in start)
    assert jax.tree.structure(state.model) == jax.tree.structure(made.model)
    for _ in range(2):  # an eqx.nn.State may be used only once; the training state must outlive that
        again = polyamp.init(state.model, chosen, **made.options)
        assert len(jax.tree.leaves(again.running)) == len(jax.tree.leaves(state.running))


def test_running_statistics_are_those_of_plain_flax(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    made = make_kind("linen", norm=True)
    module, variables = made.model
    _, changed = module.apply(variables, batch()["x"], mutable=["batch_stats"])
    state = polyamp.init(made.model, recipe("float32"))
    state, _ = polyamp.train_step(loss_fn, recipe("float32"))(state, batch())
    for mine, plain in zip(
        jax.tree.leaves(state.running.statistics), jax.tree.leaves(core.unfreeze(changed)), strict=True
    ):
        np.testing.assert_allclose(mine, plain, rtol=1e-6)


def output_and_loss(model: Any, batch: Any) -> Any:
    output = model(batch["x"])
    return jnp.mean(output * batch["gain"]), output


def test_every_call_every_micro_batch_and_every_step_has_its_own_mask(make: Any, recipe: Any, batch: Any) -> None:
    """A skipped step too: its mask must not come back."""
    made = make(dropout=True)

    def twice(model: Any, batch: Any) -> Any:
        first, second = model(batch["x"]), model(batch["x"])
        return jnp.mean((first + second) * batch["gain"]), (first, second)

    chosen = recipe(accumulate_steps=2)
    state = polyamp.init(made.model, chosen, **made.options)
    step = polyamp.train_step(twice, chosen)
    masks = []
    for gain in (np.inf, np.inf, 1.0):
        state, result = step(state, [batch(gain=gain), batch(gain=gain)])
        assert bool(result.skipped) == (gain == np.inf)
        masks += [np.array(part) for pair in result.aux for part in pair]
    assert len(masks) == 12
    assert all(not np.array_equal(masks[i], masks[j]) for i in range(12) for j in range(i))


def test_two_examples_of_one_batch_have_different_masks_in_equinox(make_kind: Any, recipe: Any) -> None:
    made = make_kind("equinox", dropout=True)
    state = polyamp.init(made.model, recipe("float32"), **made.options)
    same = {"x": np.ones((2, 4), np.float32), "gain": np.ones((2, 3), np.float32)}
    _, result = polyamp.train_step(output_and_loss, recipe("float32"))(state, same)
    assert not np.array_equal(result.aux[0], result.aux[1])


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (key, kind)
        for key, kinds in ((jax.random.key(0), ("linen", "equinox")), (jax.random.PRNGKey(0), ("haiku", "function")))
        for kind in kinds
    ],
    ids=["typed-linen", "typed-equinox", "raw-haiku", "raw-function"],
)
def test_both_styles_of_keys_are_accepted(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, key: Any, kind: str
) -> None:
    """As seeds are, which the other tests pass."""
    made = make_kind(kind, dropout=True)
    options = {**made.options, "rngs": {"dropout": key} if kind == "linen" else key}
    state = polyamp.init(made.model, recipe(), **options)
    state, result = polyamp.train_step(loss_fn, recipe())(state, batch())
    assert np.isfinite(float(result.loss))
    assert not key.is_deleted()


def test_an_override_holds_in_its_module_and_ends_behind_it(
    make: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any, products: Any
) -> None:
    made = make()
    policy = polyamp.Policy("mixed_float16", overrides={made.layers[1]: "float32"})
    state = polyamp.init(made.model, recipe(policy), **made.options)
    autocast = policy.autocast(state.model)
    x = jnp.asarray(batch()["x"])
    forward = jax.vmap(autocast) if "axis_name" in made.options else autocast
    narrow, wide = ("float16", "float16"), ("float32", "float32")
    assert products(forward, x) == [narrow, wide, narrow]
    state, result = polyamp.train_step(loss_fn, recipe(policy))(state, batch())
    assert np.isfinite(float(result.loss))


def test_an_override_that_matches_nothing_names_the_nearest(make: Any, recipe: Any) -> None:
    made = make()
    wrong = made.layers[1] + "x"
    with pytest.raises(PolicyError, match="matches no module path. Nearest: '" + made.layers[1]):
        polyamp.init(made.model, recipe(polyamp.Policy("mixed_float16", overrides={wrong: "float32"})), **made.options)


def test_an_override_against_a_modules_own_dtype_is_refused(recipe: Any, batch: Any, loss_fn: Any) -> None:
    linen_module = linen.Dense(3, dtype=jnp.float16)
    sequence = linen.Sequential([linen_module])
    variables = sequence.init(jax.random.key(0), jnp.ones((1, 4)))
    policy = polyamp.Policy("mixed_float16", overrides={"layers_0": "float32"})
    with pytest.raises(PolicyError, match="'layers_0' the dtype float32, but it was built with dtype=float16"):
        polyamp.train_step(loss_fn, recipe(policy))(polyamp.init((sequence, variables), recipe(policy)), batch())

    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.head = nnx.Linear(4, 3, dtype=jnp.float16, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.head(x)

    policy = polyamp.Policy("mixed_float16", overrides={"head": "float32"})
    with pytest.raises(PolicyError, match="'head' the dtype float32, but it was built with dtype=float16"):
        polyamp.train_step(loss_fn, recipe(policy))(polyamp.init(Holder(), recipe(policy)), batch())


def test_haiku_state_may_be_given_as_three_items(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    transformed, (params, running) = make_kind("haiku", norm=True).model
    state = polyamp.init((transformed, params, running), recipe())
    state, result = polyamp.train_step(loss_fn, recipe())(state, batch())
    assert np.isfinite(float(result.loss))
    assert len(state.model) == 3


def test_autocast_of_an_nnx_module_changes_it_as_a_call_would(make_kind: Any, batch: Any) -> None:
    model = make_kind("nnx", norm=True, dropout=True).model
    before = np.array(model.norm.mean[...])
    autocast = polyamp.Policy("mixed_float16").autocast(model)
    first, second = autocast(batch()["x"]), autocast(batch()["x"])
    assert not np.array_equal(before, model.norm.mean[...])
    assert not np.array_equal(first, second)
    assert model.norm.mean[...].dtype == np.float32


def test_several_calls_in_one_loss_move_the_statistics_twice(make_kind: Any, recipe: Any, batch: Any) -> None:
    def twice(model: Any, batch: Any) -> Any:
        return jnp.mean(model(batch["x"]) + model(batch["x"]))

    def once(model: Any, batch: Any) -> Any:
        return jnp.mean(model(batch["x"]))

    means = []
    for loss in (once, twice):
        made = make_kind("linen", norm=True)
        state = polyamp.init(made.model, recipe("float32"))
        state, _ = polyamp.train_step(loss, recipe("float32"))(state, batch())
        means.append(np.array(state.running.statistics["batch_stats"]["norm"]["mean"]))
    np.testing.assert_allclose(means[1], 1.9 * means[0], rtol=1e-5)


def test_frozen_dicts_are_accepted(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    module, variables = make_kind("linen", norm=True).model
    state = polyamp.init((module, core.freeze(variables)), recipe())
    state, result = polyamp.train_step(loss_fn, recipe())(state, batch())
    assert int(result.step) == 1


class Counted(eqx.Module):
    """Integer arrays are not trained."""

    weight: jax.Array
    table: jax.Array

    def __call__(self, x: Any) -> Any:
        return (x @ self.weight)[:, self.table]


def test_integer_arrays_of_an_equinox_module_are_kept(recipe: Any, batch: Any, loss_fn: Any, backend: Any) -> None:
    module = Counted(jnp.ones((4, 3)), jnp.array([2, 1, 0]))
    state = polyamp.init(module, recipe())
    state, _ = polyamp.train_step(loss_fn, recipe())(state, batch())
    assert state.model.table.tolist() == [2, 1, 0]
    assert {name for name, _ in backend.named_gradients(polyamp.value_and_grad(loss_fn)(state, batch())[1])} == {
        "weight"
    }


def bare_haiku() -> Any:
    return hk.transform(lambda x: hk.Linear(2)(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (linen.Dense(2), r"pass the model as \(linen_module, variables\)"),
        ((linen.Dense(2), {"kernel": jnp.ones((2, 2))}), "with its 'params' collection"),
        (bare_haiku(), r"pass a haiku model as \(hk.Transformed, params\)"),
        ((lambda p, x: x, {"w": jnp.ones(2), "n": jnp.array(3)}), "parameter 'n' has dtype int32"),
        ((lambda p, x: x, {"w": jnp.ones(2), "n": "text"}), "parameter 'n' has dtype str"),
        ((1, {"w": jnp.ones(2)}), "model must be an nnx.Module"),
    ],
    ids=["linen", "only_params", "haiku", "integer", "text", "number"],
)
def test_half_a_model_is_refused_with_advice(model: Any, message: str, recipe: Any) -> None:
    with pytest.raises(ModelError, match=message):
        polyamp.init(model, recipe(), backend="jax")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nnx", {"rngs": {"dropout": 0}}, "holds its own nnx.Rngs"),
        ("linen", {"rngs": 0}, "rngs must map stream names"),
        ("linen", {"rngs": {"dropout": 0.5}}, r"rngs\['dropout'\] must be an integer seed"),
        ("haiku", {"rngs": {"a": 0, "b": 1}}, "one random key"),
        ("linen", {"axis_name": "batch"}, "axis_name= maps an equinox module"),
        ("linen", {"rng": 0}, "Received: rng=.*Did you mean 'rngs'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    make_kind: Any, recipe: Any, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        polyamp.init(make_kind(kind).model, recipe(), **options)


def test_running_state_that_changes_its_structure_is_refused(recipe: Any, batch: Any, loss_fn: Any) -> None:
    class Growing(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.Dense(3)(x)
            if self.is_mutable_collection("history"):
                self.variable("history", "first" if self.is_initializing() else "second", lambda: x)
            return x

    module = Growing()
    variables = module.init(jax.random.key(0), batch()["x"])
    assert set(variables) == {"params", "history"}
    with pytest.raises(ModelError, match=r"running state changed its structure.*sown intermediates"):
        polyamp.train_step(loss_fn, recipe())(polyamp.init((module, variables), recipe()), batch())
    state = polyamp.init((module, {"params": variables["params"]}), recipe())
    _, result = polyamp.train_step(loss_fn, recipe())(state, batch())
    assert np.isfinite(float(result.loss))


def test_only_the_library_in_use_is_imported() -> None:
    code = """
import sys
import jax.numpy as jnp
import polyamp
recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
state = polyamp.init((lambda p, x: x @ p["w"], {"w": jnp.ones((2, 2))}), recipe)
state, result = polyamp.train_step(lambda m, b: jnp.mean(m(b)), recipe)(state, jnp.ones((2, 2)))
print(sorted({"flax", "equinox", "haiku", "torch", "tensorflow", "keras"} & set(sys.modules)), int(result.step))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[] 1", done.stderr


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return x + linen.Dense(4, name="dense")(x)


class Lifted(linen.Module):
    """Blocks inside flax's rematerialisation and scan."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.remat(Block)(name="saved")(x)
        scan = linen.scan(
            lambda block, carry, _: (block(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(Block(name="blocks"), x, None)
        return linen.Dense(3, name="head")(x)


@pytest.mark.parametrize("wide", [None, "saved/dense", "head"])
def test_overrides_reach_into_lifted_linen_modules(
    recipe: Any, batch: Any, loss_fn: Any, products: Any, wide: str | None
) -> None:
    module = Lifted()
    policy = polyamp.Policy("mixed_bfloat16", overrides={wide: "float32"} if wide else {})
    state = polyamp.init((module, module.init(jax.random.key(0), batch()["x"])), recipe(policy))
    found = products(policy.autocast(state.model), jnp.asarray(batch()["x"]))
    names = ["saved/dense", "blocks/dense", "head"]
    assert found == [("float32",) * 2 if name == wide else ("bfloat16",) * 2 for name in names]
    _, result = polyamp.train_step(loss_fn, recipe(policy))(state, batch())
    assert np.isfinite(float(result.loss))


@pytest.mark.parametrize("compiled", [True, False])
def test_float64_batches_from_numpy_are_computed_in_the_policys_dtype(
    make_kind: Any, recipe: Any, batch: Any, compiled: bool
) -> None:
    seen = []

    def apply_fn(params: Any, x: Any) -> Any:
        seen.append(x.dtype.name)
        return x @ params["w"]

    for mode, inside in (("cast", "float16"), ("autocast", "float32")):
        chosen = recipe(polyamp.Policy("mixed_float16", mode=mode))
        state = polyamp.init((apply_fn, {"w": jnp.ones((4, 3))}), chosen)
        step = polyamp.train_step(lambda model, x: jnp.mean(model(x)), chosen, compile=compiled)
        step(state, batch()["x"].astype(np.float64))
        assert seen.pop() == inside, "in autocast mode Python sees the program as it declares itself"


def _products(state: Any, batch: Any, loss_fn: Any, chosen: Any, backend: Any) -> list[str]:
    """Result dtypes of every matrix product and convolution of a step."""
    text = str(jax.make_jaxpr(backend.train_step(loss_fn, chosen, compile=False))(state, batch))
    return re.findall(r":(\w+)\[[^\]]*\] = (?:dot_general|conv_general_dilated)", text)


def test_modules_that_promote_do_not_leave_the_rest_in_float32(recipe: Any, backend: Any) -> None:
    """nnx's BatchNorm and Embed return float32 whatever they are given."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(5, 4, rngs=rngs)
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.second = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(self.norm(self.first(self.embed(x))))

    chosen = recipe("mixed_bfloat16")
    state = polyamp.init(Net(nnx.Rngs(0)), chosen)
    batch = {"x": np.arange(4, dtype=np.int32), "y": np.ones((4, 3), np.float32)}

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    dtypes = _products(state, batch, loss_fn, chosen, backend)
    assert len(dtypes) >= 4
    assert set(dtypes) == {"bf16"}


def test_a_step_inside_ones_own_vmap_never_looks_at_the_host(recipe: Any, backend: Any) -> None:
    chosen = recipe("float32", scaler=polyamp.LossScaler(init_scale=4.0, patience=2))
    state = polyamp.init((lambda p, x: x @ p["w"], {"w": jnp.ones((3, 1))}), chosen)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    step = polyamp.train_step(lambda m, b: jnp.mean(jnp.square(m(b))), chosen)
    many = jax.vmap(step, in_axes=(0, None))
    for _ in range(5):
        stacked, result = many(stacked, jnp.ones((2, 3)))
    assert result.step.tolist() == [5, 5]
