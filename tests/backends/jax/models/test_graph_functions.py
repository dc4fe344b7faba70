"""S29: an nnx model in `loss_fn` under flax's own graph functions, and the variables that a forward pass creates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
import polyamp_jax
from polyamp.errors import ModelError, RecipeError, TraceError, UnsupportedError
from polyamp_jax import compat

WIDTH = 6
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MODES = ["autocast", "cast"]


class Loss(nnx.Variable):
    """A variable that a forward pass makes, as in flax's VAE example."""


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mean = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.log_variance = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        mean, log_variance = self.mean(x), self.log_variance(x)
        self.kl = Loss(jnp.mean(0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1.0 - log_variance, axis=-1)))
        return mean + jnp.exp(0.5 * log_variance) * jax.random.normal(self.rngs.noise(), mean.shape)


class VAE(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0, noise=1)
        self.encoder = Encoder(rngs)
        self.decoder = nnx.Linear(3, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.decoder(self.encoder(x)))


def vae_loss(model: Any, x: Any) -> Any:
    """flax's example as it stands."""
    y = model(x)
    losses = nnx.pop(model, Loss)
    kl = sum(jax.tree.leaves(losses), 0.0)
    return jnp.mean((y - x) ** 2) + 0.1 * kl, kl


class Features(nnx.Module):
    """Sows what it computes, and is called twice in one pass."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        y = self.layer(x)
        self.sow(nnx.Intermediate, "features", y)
        return nnx.relu(y)


def sown(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Intermediate))["features"]


def twice_loss(model: Any, x: Any) -> Any:
    y = model(model(x))
    first, second = sown(model)
    return jnp.mean(y**2) + 0.1 * jnp.mean(first * second), jnp.mean(first)


def twice_by_hand(model: Any, x: Any) -> Any:
    loss, aux = twice_loss(model, x)
    nnx.pop(model, nnx.Intermediate)
    return loss, aux


def trained(
    model: Any, loss_fn: Any, policy: Any, steps: int = 4, **settings: Any
) -> tuple[Any, list[float], list[Any]]:
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), scaler=None, **settings)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
    losses, auxes = [], []
    for _ in range(steps):
        state, result = step(state, X)
        losses.append(float(result.loss))
        auxes.append(result.aux)
    return state, losses, auxes


def by_hand(model: Any, loss_fn: Any, steps: int = 4) -> tuple[Any, list[float], list[Any]]:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses, auxes = [], []
    for _ in range(steps):
        (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, X)
        optimizer.update(model, grads)
        losses.append(float(loss))
        auxes.append(aux)
    return model, losses, auxes


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "loss_fn", "hand"), [(VAE, vae_loss, vae_loss), (Features, twice_loss, twice_by_hand)], ids=["vae", "sow"]
)
def test_s29_what_a_forward_pass_creates_is_read_and_popped_as_by_hand(
    kind: Any, loss_fn: Any, hand: Any, mode: Any
) -> None:
    """Today: KL = 0.0, and "the model's running state changed its structure"."""
    state, losses, auxes = trained(kind(), loss_fn, polyamp.Policy("float32", mode=mode))
    model, expected, own = by_hand(kind(), hand)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(auxes, own, rtol=1e-4)
    assert abs(float(own[0])) > 1e-3
    for one, other in zip(
        jax.tree.leaves(nnx.state(state.model, nnx.Param)), jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert not jax.tree.leaves(nnx.state(state.model, nnx.Any(Loss, nnx.Intermediate)))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "loss_fn"), [(VAE, vae_loss), (Features, twice_loss)], ids=["vae", "sow"])
def test_s8_what_a_forward_pass_creates_is_fresh_in_every_micro_batch(kind: Any, loss_fn: Any, mode: Any) -> None:
    _, _, auxes = trained(kind(), loss_fn, polyamp.Policy("mixed_float16", mode=mode), accumulate_steps=4)
    assert all(aux.shape == (4,) for aux in auxes)
    whole = trained(kind(), loss_fn, polyamp.Policy("mixed_float16", mode=mode), steps=1)[2][0]
    np.testing.assert_allclose(np.mean(auxes[0]), whole, rtol=2e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("mode", MODES)
def test_s29_what_is_sown_has_the_output_dtype(mode: Any) -> None:
    def loss_fn(model: Any, x: Any) -> Any:
        y = model(x)
        dtypes.append(str(sown(model)[0].dtype))
        return jnp.mean(y**2), y

    dtypes: list[str] = []
    trained(Features(), loss_fn, polyamp.Policy("mixed_float16", mode=mode), steps=1)
    assert set(dtypes) == {"float32"}


class Nested(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        blocks = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]
        self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.target = nnx.Variable(jnp.full((3,), 2.0))

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.drop(self.norm(x))


@pytest.mark.parametrize("mode", MODES)
def test_s29_flaxs_functions_see_every_variable_and_module(mode: Any) -> None:
    own = Nested()
    expected = {
        "split": float(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(nnx.split(own, nnx.Param, nnx.RngState, ...)[3]))),
        "modules": [(path, type(m).__name__) for path, m in compat.walk_nnx_modules(own)],
        "variables": len(jax.tree.leaves(nnx.variables(own))),
        "leaves": len(jax.tree.leaves(own)),
    }
    assert expected["split"] == 6.0 + WIDTH

    def loss_fn(model: Any, x: Any) -> Any:
        rest = nnx.split(model, nnx.Param, nnx.RngState, ...)[3]
        found["split"] = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(rest))
        found["modules"] = [(path, type(m).__name__) for path, m in compat.walk_nnx_modules(model)]
        found["variables"] = len(jax.tree.leaves(nnx.variables(model)))
        found["leaves"] = len(jax.tree.leaves(model))
        assert isinstance(model, Nested)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}
        kernels = [m.kernel for _, m in compat.walk_nnx_modules(model) if isinstance(m, nnx.Linear)]
        found["cast"] = {str(kernel[...].dtype) for kernel in kernels}
        called = [m(x) for _, m in compat.walk_nnx_modules(model) if isinstance(m, nnx.Linear)]
        found["called"] = {str(y.dtype) for y in called}
        model.target[...] += 1.0
        return jnp.mean(model(x) ** 2) + jnp.mean(called[0]), found["split"]

    found: dict[str, Any] = {}
    state, _, auxes = trained(own, loss_fn, polyamp.Policy("mixed_float16", mode=mode), steps=1)
    assert float(auxes[0]) == expected.pop("split")
    assert {name: found[name] for name in expected} == expected
    assert found["called"] == {"float32"}
    assert found["cast"] == {"float32" if mode == "autocast" else "float16"}
    assert float(state.model.target[0]) == 3.0
    assert type(state.model) is Nested


def test_s5_a_module_that_flax_hands_out_follows_overrides(products: Any, backend: Any) -> None:
    policy = polyamp.Policy("mixed_float16", overrides={"blocks/1": "float32"})
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Nested(), recipe)

    def loss_of(number: int) -> Any:
        def loss_fn(model: Any, x: Any) -> Any:
            (module,) = (module for path, module in compat.walk_nnx_modules(model) if path == ("blocks", number))
            return jnp.mean(module(x) ** 2)

        return loss_fn

    for number, dtype in ((0, "float16"), (1, "float32")):
        step = backend.train_step(loss_of(number), recipe, compile=False)
        assert set(products(step, state, X)) == {(dtype, dtype)}


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="flax has nnx.capture from 0.12")
@pytest.mark.parametrize("mode", MODES)
def test_s29_flaxs_capture_gives_what_the_forward_pass_sows(mode: Any) -> None:
    def loss_fn(model: Any, x: Any) -> Any:
        y, intermediates = nnx.capture(model, nnx.Intermediate)(x)
        return jnp.mean(y**2), jnp.mean(intermediates["features"][0] ** 2)

    _, losses, auxes = trained(Features(), loss_fn, polyamp.Policy("float32", mode=mode), steps=2)
    _, expected, own = by_hand(Features(), loss_fn, steps=2)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(auxes, own, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_s29_what_an_earlier_call_left_in_the_model_is_not_part_of_the_state() -> None:
    model = Features()
    model(X)
    _, losses, _ = trained(model, twice_loss, "float32", steps=2)
    np.testing.assert_allclose(losses, by_hand(Features(), twice_by_hand, steps=2)[1], rtol=1e-5)
    assert len(sown(model)) == 1, "the user's own model keeps it"


def test_s12_a_skipped_step_leaves_what_it_popped_alone() -> None:
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(0.1))
    state = polyamp.init(VAE(), recipe)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state, state.running.statistics))
    step = polyamp.train_step(vae_loss, recipe)
    state, result = step(state, np.where(X[0, 0] == X, np.inf, X).astype(np.float32))
    assert bool(result.skipped)
    for one, other in zip(
        jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state, state.running.statistics)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    state, result = step(state, X)
    assert np.isfinite(float(result.loss))
    assert float(result.aux) > 0.0


def _keeps(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def _takes_out(model: Any, x: Any) -> Any:
    nnx.pop(model, nnx.BatchStat)
    return jnp.mean(x) + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _pops_parameters(model: Any, x: Any) -> Any:
    nnx.pop(model, nnx.Param)
    return jnp.mean(model(x))


def _merges(model: Any, x: Any) -> Any:
    return jnp.mean(nnx.merge(*nnx.split(model))(x))


def _clones(model: Any, x: Any) -> Any:
    return jnp.mean(nnx.clone(model).encoder.mean(x))


def _switches(model: Any, x: Any) -> Any:
    model.set_attributes(use_running_average=True)
    return jnp.mean(model(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (_keeps, TraceError, r"creates 'encoder/kl' \(Loss\) and leaves it in the model.*nnx\.pop\(model, Loss\)"),
        (_takes_out, TraceError, r"takes 'norm/\w+' out of the model.*nnx\.state\(model"),
        (_pops_parameters, TraceError, r"a parameter was taken out of the model"),
        (_merges, RecipeError, r"nor a copy that nnx\.merge, nnx\.clone or jax\.tree\.map makes"),
        (_clones, RecipeError, r"nor a copy that nnx\.merge"),
        (_switches, UnsupportedError, r"model\.set_attributes is a method of VAE's base class"),
    ],
)
def test_s29_what_cannot_be_kept_is_said_by_name(loss_fn: Any, error: Any, message: str, mode: Any) -> None:
    with pytest.raises(error, match=message):
        trained(VAE(), loss_fn, polyamp.Policy("mixed_float16", mode=mode), steps=1)


def test_s29_a_call_that_changes_a_setting_is_an_error() -> None:
    class Counts(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
            self.calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return self.layer(x)

    with pytest.raises(TraceError, match=r"model\(\.\.\.\) changes what the model is made of"):
        trained(Counts(), _keeps, "float32", steps=1)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("through", ["model", "bound"])
def test_s29_in_a_loop_of_ones_own_what_is_created_is_in_the_users_model(mode: Any, through: str) -> None:
    """`policy.autocast(model)` and `scaled_value_and_grad`: popped from the model, or from the one under the policy."""
    policy, scaler = polyamp.Policy("float32", mode=mode), polyamp.LossScaler(init_scale=8.0)

    def loss_fn(model: Any, x: Any) -> Any:
        bound = policy.autocast(model)
        y = bound(x)
        kl = sum(jax.tree.leaves(nnx.pop(model if through == "model" else bound, Loss)))
        return jnp.mean((y - x) ** 2) + 0.1 * kl, kl

    model, own = VAE(), VAE()
    graded = polyamp_jax.scaled_value_and_grad(loss_fn, scaler, has_aux=True)
    (loss, kl), grads, finite = graded(scaler.init("jax"), model, X)
    (expected, kl_own), grads_own = nnx.value_and_grad(vae_loss, has_aux=True)(own, X)
    assert bool(finite)
    np.testing.assert_allclose((loss, kl), (expected, kl_own), rtol=1e-5)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_own), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert not hasattr(model.encoder, "kl")
    features = Features()
    bound = policy.autocast(features)
    assert isinstance(bound, Features)
    bound(X)
    bound(X)
    assert len(sown(features)) == len(sown(bound)) == 2
    nnx.pop(features, nnx.Intermediate)
    assert not hasattr(bound, "features")


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_s29_the_two_halves_see_what_the_forward_pass_creates() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(VAE(), recipe)
    (value, kl), grads = polyamp.value_and_grad(vae_loss)(state, X)
    expected, kl_own = vae_loss(VAE(), X)
    np.testing.assert_allclose((value, kl), (expected, kl_own), rtol=1e-5)
    state, _ = polyamp.apply_gradients(state, grads)
    with pytest.raises(ModelError, match=r"model\.encoder is a part of it"):
        polyamp.value_and_grad(lambda model, x: (polyamp.parameters(model.encoder), jnp.mean(x))[1])(state, X)
