"""S27 in JAX: against optax's own masks, constants of one program, and kinds by nnx's and equinox's classes."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
from polyamp import Group, PolyampError, no_decay, schedules
from polyamp_jax.arrays import XP

COSINE = schedules.warmup_cosine(0.05, 2, 10)


def apply_fn(params: Any, x: Any) -> Any:
    h = jnp.tanh(x @ params["body"]["kernel"] + params["body"]["bias"])
    return h @ params["head"]["kernel"] + params["head"]["bias"]


def params() -> Any:
    rng = np.random.default_rng(0)
    sizes = {"body": (4, 8), "head": (8, 3)}
    return {
        name: {"kernel": jnp.asarray(rng.normal(size=size), jnp.float32), "bias": jnp.zeros(size[1])}
        for name, size in sizes.items()
    }


def batch(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_s27_as_optax_masks_and_multi_transform(name: str) -> None:
    def decayed(rate: Any) -> Any:
        def mask(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", tree)

        if name == "adamw":
            return optax.adamw(rate, weight_decay=0.3, mask=mask)
        return optax.chain(optax.masked(optax.add_decayed_weights(0.3), mask), optax.sgd(rate, momentum=0.9))

    theirs = optax.multi_transform(
        {"body": decayed(lambda count: 0.1 * COSINE(count, XP)), "head": decayed(0.02)},
        {part: {"kernel": part, "bias": part} for part in ("body", "head")},
    )
    spec = polyamp.adamw(COSINE) if name == "adamw" else polyamp.sgd(COSINE, momentum=0.9)
    groups = [*no_decay("bias"), Group("body", learning_rate_scale=0.1), Group("head", learning_rate=0.02)]
    mine = spec.replace(weight_decay=0.3, groups=groups)
    ends = []
    for optimizer in (mine, theirs):
        made = polyamp.Recipe(optimizer=optimizer)
        state: Any = polyamp.init((apply_fn, params()), made)
        step = polyamp.train_step(loss_fn, made)
        for seed in range(5):
            state, _ = step(state, batch(seed))
        ends.append(state.params)
    for one, other in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6)


def test_s27_the_program_has_one_norm_one_choice_and_no_more_than_without_groups() -> None:
    """The hyperparameters are constants: the compiled program does no more operations of a kind that costs."""

    def operations(optimizer: Any) -> dict[str, int]:
        made = polyamp.Recipe(optimizer=optimizer, scaler="dynamic")
        state: Any = polyamp.init((apply_fn, params()), made)
        run = polyamp.train_step(loss_fn, made)
        run(state, batch(0))
        inner: Any = run._run["jax"]
        text = inner.lower(polyamp.init((apply_fn, params()), made), batch(0)).as_text()
        return {name: text.count(f"stablehlo.{name}") for name in ("select", "sqrt", "dot_general", "if", "reduce ")}

    plain = polyamp.adamw(0.01, weight_decay=0.3)
    assert operations(plain.replace(groups=no_decay("bias"))) == operations(plain)


def test_s27_kinds_of_nnx_and_equinox_modules() -> None:
    class Mine(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.wte = nnx.Embed(6, 4, rngs=rngs)
            self.odd = nnx.LayerNorm(4, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
            self.temperature = nnx.Param(jnp.ones(()))

    class Other(eqx.Module):
        wte: Any
        odd: Any
        layers: list[Any]
        temperature: Any

    keys = jax.random.split(jax.random.key(0), 2)
    other = Other(
        eqx.nn.Embedding(6, 4, key=keys[0]), eqx.nn.LayerNorm(4), [eqx.nn.Linear(4, 4, key=keys[1])], jnp.ones(())
    )
    expected = {
        "bias": {"odd/bias", "layers/0/bias"},
        "norm": {"odd/scale", "odd/bias"},
        "embedding": {"wte/embedding"},
    }
    for model, spelled in ((Mine(), {}), (other, {"odd/scale": "odd/weight", "wte/embedding": "wte/weight"})):
        for kind, paths in expected.items():
            made = polyamp.Recipe(optimizer=polyamp.adamw(weight_decay=0.5, groups=no_decay(kind)))
            groups = polyamp.init(model, made).groups
            assert groups is not None
            spared = {path for path in groups.numbers if groups.of(path).spec.weight_decay == 0.0}
            assert spared == {spelled.get(path, path) for path in paths}, kind


def test_s27_kinds_of_haiku_by_name() -> None:
    def forward(x: Any) -> Any:
        h = hk.Embed(6, 4)(x)
        return hk.Linear(3)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(h))

    transformed = hk.without_apply_rng(hk.transform(forward))
    variables = transformed.init(jax.random.key(0), jnp.zeros((2,), jnp.int32))
    made = polyamp.Recipe(optimizer=polyamp.adamw(weight_decay=0.5, groups=no_decay("bias", "norm", "embedding")))
    groups = polyamp.init((transformed, variables), made).groups
    assert groups is not None
    assert [path for path in groups.numbers if groups.of(path).spec.weight_decay] == ["linear/w"]
    odd = {"w": jnp.ones((2, 2)), "alpha": jnp.ones(2)}
    with pytest.raises(PolyampError, match=r"'alpha' .*cannot be told from its name"):
        polyamp.init((lambda params, x: x @ params["w"] * params["alpha"], odd), made)


def test_s27_a_variable_of_two_nnx_modules_is_what_either_makes_of_it() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.a_head, self.wte = nnx.Linear(4, 4, use_bias=False, rngs=rngs), nnx.Embed(4, 4, rngs=rngs)
            self.a_head.kernel = self.wte.embedding

    for groups in (no_decay("embedding"), [Group("wte", weight_decay=0.0)], [Group("a_head/kernel", weight_decay=0.0)]):
        found = polyamp.init(Tied(), polyamp.Recipe(optimizer=polyamp.adamw(weight_decay=0.5, groups=groups))).groups
        assert found is not None
        assert [member.spec.weight_decay for member in found.each()] == [0.0]
