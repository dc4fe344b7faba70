"""S29: parts of a JAX model by numbers from the end, by slices and by two names; methods of equinox under overrides."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp.errors import TraceError, UnsupportedError
from tests.backends.jax.models.two_parts import WIDTH

X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    @property
    def kernel(self) -> Any:
        return self.linear.kernel[...]

    def project(self, x: Any) -> Any:
        return x @ self.linear.kernel[...]


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        blocks = [NnxBlock(rngs) for _ in range(3)]
        self.blocks = nnx.List(blocks) if hasattr(nnx, "List") else blocks  # from flax 0.12
        self.tied = self.blocks[2]

    def block(self, number: int) -> NnxBlock:
        return self.blocks[number]  # type: ignore[no-any-return]


class EquinoxBlock(eqx.Module):
    kernel: Any

    def project(self, x: Any) -> Any:
        return x @ self.kernel


class Equinox(eqx.Module):
    blocks: list[EquinoxBlock]

    def __init__(self) -> None:
        self.blocks = [EquinoxBlock(jax.random.normal(jax.random.key(n), (WIDTH, WIDTH))) for n in range(3)]


def seen(model: Any, policy: polyamp.Policy, look: Any) -> Any:
    """What `look(model, x)` gives in a loss."""
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))

    def loss_fn(model: Any, x: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model.params)), look(model, x)

    return polyamp.train_step(loss_fn, recipe)(polyamp.init(model, recipe), X)[1].aux


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("kind", [Nnx, Equinox])
def test_s29_a_part_has_its_path_by_whatever_way_it_is_reached(kind: Any, mode: Any) -> None:
    """Its parameters, and the override of its path, also where the method itself computes."""
    policy = polyamp.Policy("mixed_float16", mode=mode, overrides={"blocks/2": "float32"})

    def look(model: Any, x: Any) -> Any:
        ways = [model.blocks[2], model.blocks[-1], model.blocks[1:][1], model.blocks[-2:][-1]]
        kernels = [jax.tree.leaves(way.params)[0] for way in ways]
        return [way.project(x) for way in ways], kernels, model.blocks[-2].project(x)

    projected, kernels, narrow = seen(kind(), policy, look)
    assert all(kernel.dtype == "float32" for kernel in kernels)
    for output, kernel in zip(projected, kernels, strict=True):
        np.testing.assert_array_equal(kernel, kernels[0])
        np.testing.assert_allclose(output, X @ np.asarray(kernel), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(narrow, np.asarray(narrow).astype(np.float16))


def test_s29_a_shared_nnx_part_has_its_parameters_under_each_name() -> None:
    def look(model: Any, x: Any) -> Any:
        return model.tied.params["linear"]["kernel"], model.blocks[2].params["linear"]["kernel"]

    tied, own = seen(Nnx(), polyamp.Policy("mixed_float16"), look)
    np.testing.assert_array_equal(tied, own)


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s29_a_method_that_hands_out_a_module_is_refused(mode: Any) -> None:
    """Outside of its model it is under no policy, and its running statistics would be lost."""
    with pytest.raises(UnsupportedError, match=r"model\.block\(\.\.\.\) returns a module.*model\.blocks\[0\]"):
        seen(Nnx(), polyamp.Policy("mixed_float16", mode=mode), lambda model, x: model.block(0).project(x))


def test_s29_parameters_of_a_model_outside_of_a_step_are_those_of_now() -> None:
    model = Nnx()
    bound = polyamp.Policy("mixed_float16").autocast(model)
    bound.blocks[0].project(X)
    kernel = model.blocks[0].linear.kernel
    kernel[...] = jnp.full((WIDTH, WIDTH), 7.0)
    assert float(polyamp.parameters(bound)["blocks/0/linear/kernel"][0, 0]) == 7.0


def test_reading_an_nnx_model_takes_no_square_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nnx.Module):
        def __init__(self) -> None:
            layers = [nnx.Param(jnp.ones(())) for _ in range(100)]
            self.layers = nnx.List(layers) if hasattr(nnx, "List") else layers
            self.gain = nnx.Param(jnp.ones(()))

    state = polyamp.init(Wide(), polyamp.Recipe(policy="float32"))
    named: list[Any] = []
    keystr = jax.tree_util.keystr
    monkeypatch.setattr(jax.tree_util, "keystr", lambda *args, **kwargs: (named.append(1), keystr(*args, **kwargs))[1])
    polyamp.value_and_grad(lambda model, x: sum(model.gain[...] * x.sum() for _ in range(4)))(state, X)
    assert len(named) < 5000


class Dropped(eqx.Module):
    gain: Any
    drop: eqx.nn.Dropout

    def scaled(self, x: Any) -> Any:
        return x * self.gain

    def __call__(self, x: Any, *, key: Any) -> Any:
        return self.drop(self.scaled(x), key=key)


class NnxDropped(nnx.Module):
    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.ones(()))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def scaled(self, x: Any) -> Any:
        return x * self.gain[...]

    def __call__(self, x: Any) -> Any:
        return self.drop(self.scaled(x))


class NnxNormed(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

    def scaled(self, x: Any) -> Any:
        return x * self.norm.scale[...]

    def __call__(self, x: Any) -> Any:
        return self.norm(x)


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("kind", ["equinox", "nnx", "statistics"])
def test_s20_a_mapped_model_that_draws_or_counts_is_refused(kind: str, mode: Any) -> None:
    """Every row would have the mask of the first one; a part that has nothing to hand on is mapped."""
    made: Any = {
        "equinox": lambda: Dropped(jnp.ones(()), eqx.nn.Dropout(0.5)),
        "nnx": NnxDropped,
        "statistics": NnxNormed,
    }[kind]
    recipe = polyamp.Recipe(policy=polyamp.Policy("mixed_float16", mode=mode), optimizer=polyamp.sgd(0.1))
    options = {"rngs": 0} if kind == "equinox" else {}

    def value(loss_fn: Any) -> Any:
        return polyamp.value_and_grad(loss_fn)(polyamp.init(made(), recipe, **options), X[:, :, None])[0]

    with pytest.raises(TraceError, match=r"model is called under jax\.vmap.*axis_name='batch'"):
        value(lambda model, x: jnp.mean(jax.vmap(model)(x)))
    assert np.isfinite(value(lambda model, x: jnp.mean(jax.vmap(model.scaled)(x))))
    if kind == "equinox":
        keys = jax.random.split(jax.random.key(0), len(X))
        assert np.isfinite(value(lambda model, x: jnp.mean(jax.vmap(lambda x, key: model(x, key=key))(x, keys))))
