"""Arrays on a mesh under the step's own jit (S9): what is computed, sent, kept and given back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.results import Gradients
from tests.backends.jax.distributed import meshes
from tests.backends.jax.distributed.meshes import apart, bits, loss_fn, mesh, put, whole_batch

SQUARE = functools.partial(mesh, (2, 2), ("data", "model"))
PLACES: dict[str, tuple[Any, meshes.Spec]] = {
    "replicated": (mesh, meshes.replicated),
    "rows": (mesh, meshes.rows_sharded),
    "columns": (SQUARE, meshes.columns_sharded),
    "both": (SQUARE, meshes.both_sharded),
}


def wide() -> Any:
    """A function of three layers, 64 wide."""

    def apply_fn(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    keys = jax.random.split(jax.random.key(0), 3)
    params = [{"w": jax.random.normal(key, (64, 64)) / 8, "b": jnp.zeros(64)} for key in keys]
    return apply_fn, params


def wide_batch(step: int = 0) -> Any:
    return whole_batch(step, width=64, out=64)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("linen", "rows"),
        ("nnx", "rows"),
        ("equinox", "columns"),
        ("haiku", "replicated"),
        ("function", "both"),
    ],
)
def test_s09_parts_equal_one_device(make_kind: Any, kind: str, where: str) -> None:
    """50 steps; shardings stay, buffers are donated, and the second step compiles nothing."""
    made = make_kind(kind)
    on, spec = PLACES[where][0](), PLACES[where][1]
    optimizer = polyamp.adamw(1e-2, eps=1e-3)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, clip_norm=0.5, ema=polyamp.Ema(0.9))
    alone = polyamp.init(made.model, recipe, **made.options)
    state = polyamp.init(put(made.model, on, spec), recipe, **made.options)
    places = [leaf.sharding for leaf in jax.tree.leaves(state)]
    params = len(jax.tree.leaves(state.params))
    own = [leaf.sharding for leaf in state.averages["model"].values()]
    assert sorted(map(str, own)) == sorted(map(str, places[:params]))
    assert all(place.num_devices == 4 for place in places)
    for slot in state.opt_state.slots.values():
        assert [leaf.sharding for leaf in jax.tree.leaves(slot)] == places[:params]
    assert where == "replicated" or not all(place.is_fully_replicated for place in places)
    step, one = (polyamp.train_step(loss_fn, recipe) for _ in range(2))
    for number in range(50):
        batch = whole_batch(number)
        before = state
        state, result = step(state, jax.device_put(batch, NamedSharding(on, P("data"))))
        alone, expected = one(alone, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))
    after = [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert after == places
    assert apart(state.params, alone.params) < 1e-6
    assert apart(state.averages, alone.averages) < 1e-6
    assert apart(state.opt_state, alone.opt_state) < 1e-5
    np.testing.assert_allclose(float(result.loss), float(expected.loss), rtol=1e-5)
    np.testing.assert_allclose(float(result.grad_norm), float(expected.grad_norm), rtol=1e-5)
    assert step._run["jax"]._call._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "optimizer",
    [
        polyamp.nadam(1e-2, eps=1e-3, groups=[polyamp.Group(kind="vector", trainable_after=2, clip_norm=0.01)]),
        polyamp.lamb(1e-2, eps=1e-3),
        polyamp.adafactor(1e-2),
        polyamp.muon(1e-2, eps=1e-3, ns_coefficients=(2.0, -1.5, 0.5)),
        polyamp.schedule_free(1e-2, eps=1e-3),
    ],
    ids=lambda optimizer: optimizer.tag,
)
def test_s09_sharded_parameters_with_slots_of_other_shapes_train_as_on_one_device(
    make_kind: Any, optimizer: Any
) -> None:
    made = make_kind("linen")
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, clip_norm=0.5)
    alone = polyamp.init(made.model, recipe, **made.options)
    state = polyamp.init(put(made.model, PLACES["both"][0](), PLACES["both"][1]), recipe, **made.options)
    places = [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert all(place.num_devices == 4 for place in places)
    step, one = (polyamp.train_step(loss_fn, recipe) for _ in range(2))
    for number in range(5):
        state, _ = step(state, whole_batch(number))
        alone, _ = one(alone, whole_batch(number))
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == places
    assert apart(state.params, alone.params) < 1e-6
    assert apart(state.opt_state, alone.opt_state) < 1e-5


def test_s21_a_mixed_policy_on_four_devices_is_as_close_to_float32(make_kind: Any) -> None:
    ends = {}
    for policy, on in [("float32", None), ("mixed_float16", None), ("mixed_float16", mesh())]:
        made = make_kind("linen")
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.05, momentum=0.9))
        state = polyamp.init(made.model if on is None else put(made.model, on, meshes.rows_sharded), recipe)
        step = polyamp.train_step(loss_fn, recipe)
        for number in range(50):
            batch = whole_batch(number)
            state, _ = step(state, batch if on is None else put(batch, on, meshes.rows_sharded))
        ends[policy, on is not None] = state.params
    far = [apart(ends["mixed_float16", several], ends["float32", False]) for several in (False, True)]
    assert apart(ends["mixed_float16", True], ends["mixed_float16", False]) <= 2 * max(far)


@pytest.mark.parametrize(("kind", "spec"), [("linen", meshes.replicated), ("nnx", meshes.rows_sharded)])
def test_s09_an_overflow_in_any_shard_is_every_devices(make_kind: Any, kind: str, spec: meshes.Spec) -> None:
    """50 steps, every second of which overflows in one row, of each device in turn."""
    made = make_kind(kind, norm=True)
    recipe = polyamp.Recipe(
        policy="mixed_float16",
        optimizer=polyamp.adamw(1e-2),
        scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=3),
        clip_norm=1.0,
    )
    on = mesh()
    alone = polyamp.init(made.model, recipe, **made.options)
    state = polyamp.init(put(made.model, on, spec), recipe, **made.options)
    step, one = (polyamp.train_step(loss_fn, recipe, donate=False) for _ in range(2))
    for number in range(50):
        poisoned = (number * 5) % meshes.ROWS if number % 2 else None
        batch = whole_batch(number, poisoned=poisoned)
        before = state
        state, result = step(state, jax.device_put(batch, NamedSharding(on, P("data"))))
        alone, expected = one(alone, batch)
        for leaf in jax.tree.leaves(state):
            if leaf.is_fully_replicated:
                assert len({bits(leaf, device)[0] for device in range(4)}) == 1
        assert bool(result.skipped) == (poisoned is not None)
        assert (float(result.scale), int(result.step)) == (float(expected.scale), int(expected.step))
        if poisoned is not None:
            assert bits((state.params, state.opt_state, state.running.statistics)) == bits(
                (before.params, before.opt_state, before.running.statistics)
            )


@pytest.mark.parametrize("where", PLACES)
def test_s09_the_program_adds_one_small_all_reduce(where: str) -> None:
    """Against the same training by hand whose results lie where they lay before. Replicated gradients need none."""
    on, spec = PLACES[where][0](), PLACES[where][1]
    apply_fn, params = wide()
    params = put(params, on, spec)
    batch = put(wide_batch(), on, lambda _: P("data"))
    optimizer = optax.adamw(1e-2)
    opt_state = jax.tree.map(lambda leaf: put(leaf, on) if leaf.ndim == 0 else leaf, optimizer.init(params))

    def hand(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((apply_fn(params, batch["x"]) * batch["gain"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    places = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    by_hand = jax.jit(hand, out_shardings=(*places, NamedSharding(on, P()))).lower(params, opt_state, batch).compile()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2), clip_norm=1.0)
    state = polyamp.init((apply_fn, params), recipe)
    ours = meshes.compiled(loss_fn, recipe, state, batch)
    (arrays, sizes, _), (more, larger, reductions) = (meshes.sent(each.as_text()) for each in (by_hand, ours))
    small = [line for line in reductions if "f32[4]{" in line]
    assert len(small) == (where != "replicated")
    assert more["all-reduce"] <= arrays["all-reduce"] + len(small)
    assert larger["all-reduce"] <= sizes["all-reduce"] + 16 * len(small)
    for kind in meshes.COLLECTIVES[1:]:
        assert more[kind] <= arrays[kind], kind
        assert larger[kind] <= sizes[kind], kind
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert ours.memory_analysis().alias_size_in_bytes >= held


def test_s09_a_step_under_a_jit_of_ones_own_gathers_no_gradients() -> None:
    """There nothing says where the arrays lie; the norm is left to XLA in a form that it can divide."""
    on = mesh()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(1e-2), clip_norm=1.0)
    apply_fn, params = wide()
    state = polyamp.init((apply_fn, put(params, on, meshes.rows_sharded)), recipe)
    batch = put(wide_batch(), on, lambda _: P("data"))
    known, _, _ = meshes.sent(meshes.compiled(loss_fn, recipe, state, batch).as_text())
    step = polyamp.train_step(loss_fn, recipe, compile=False)
    own = jax.jit(step).lower(state, batch).compile()
    arrays, _, _ = meshes.sent(own.as_text())
    assert arrays["all-gather"] <= known["all-gather"]
    assert "f32[4096]" not in own.as_text()
    new, result = jax.jit(step)(state, batch)
    expected_state, expected = polyamp.train_step(loss_fn, recipe)(state, batch)
    np.testing.assert_allclose(float(result.grad_norm), float(expected.grad_norm), rtol=1e-6)
    assert apart(new.params, expected_state.params) < 1e-6


def test_explicit_axes_train_alike() -> None:
    """`jax.make_mesh` makes explicit axes from jax 0.9 on."""
    on = SQUARE(kind=AxisType.Explicit)
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2), clip_norm=0.1)
    apply_fn, params = wide()
    alone = polyamp.init((apply_fn, params), recipe)
    state = polyamp.init((apply_fn, put(params, on, meshes.columns_sharded)), recipe)
    step, one = (polyamp.train_step(loss_fn, recipe) for _ in range(2))
    places = [leaf.sharding for leaf in jax.tree.leaves(state)]
    for number in range(3):
        state, result = step(state, put(wide_batch(number), on, lambda _: P("data")))
        alone, expected = one(alone, wide_batch(number))
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == places
    assert step._run["jax"]._call._cache_size() == 1  # type: ignore[attr-defined]
    np.testing.assert_allclose(float(result.grad_norm), float(expected.grad_norm), rtol=2e-3)
    assert apart(state.params, alone.params) < 0.02
    if not hasattr(jax, "set_mesh"):  # an older jax
        return
    with jax.set_mesh(on):
        _, result = step(state, put(wide_batch(3), on, lambda _: P("data")))
    assert int(result.step) == 4


def test_s08_micro_batches_take_their_rows_from_every_shard() -> None:
    """No row is sent anywhere, and the result is that of the whole batch."""
    on = mesh()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=2)
    apply_fn, params = wide()
    state = polyamp.init((apply_fn, put(params, on)), recipe)
    batch = put(wide_batch(), on, lambda _: P("data"))
    arrays, _, _ = meshes.sent(meshes.compiled(loss_fn, recipe, state, batch).as_text())
    assert set(arrays) == {"all-reduce"}
    whole = recipe.replace(accumulate_steps=1)
    expected, _ = polyamp.train_step(loss_fn, whole)(polyamp.init((apply_fn, params), whole), wide_batch())

    def rows(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch), batch["y"][:, 0]

    state, result = polyamp.train_step(rows, recipe)(state, batch)
    assert apart(state.params, expected.params) < 1e-6
    numbers = np.arange(16).reshape(4, 2, 2).swapaxes(0, 1).reshape(2, 8)
    assert np.array_equal(np.asarray(result.aux), wide_batch()["y"][:, 0][numbers])


def test_init_puts_what_is_on_no_mesh_beside_the_parameters() -> None:
    """Also where the first parameter is not on it; the user's arrays stay."""
    on = mesh()
    params = {"a": jnp.ones(3), "b": put(jnp.ones((4, 3)), on, meshes.rows_sharded)}
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2))
    state = polyamp.init((lambda p, x: x @ p["b"] + p["a"], params), recipe)
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(state)} == {4}
    assert state.params["b"].sharding.spec == P("data")
    assert state.params["a"].sharding.is_fully_replicated
    step = polyamp.train_step(loss_fn, recipe)
    for number in range(2):
        state, _ = step(state, whole_batch(number))
    assert step._run["jax"]._call._cache_size() == 1  # type: ignore[attr-defined]
    assert params["b"].sharding.spec == P("data")


def test_s10_the_norm_of_shards_holds_over_the_whole_range_of_float32() -> None:
    on = SQUARE()
    specs = [P("data"), P(None, "model"), P(("data", "model")), P()]
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.0), scaler=polyamp.LossScaler())
    places = [NamedSharding(on, spec) for spec in specs]
    state = polyamp.init((lambda p, x: x, [jax.device_put(jnp.ones((8, 4)), place) for place in places]), recipe)
    for exponent in (-120, -70, -40, 0, 50, 64, 100, 120):
        rng = np.random.default_rng(0)
        arrays = [np.ldexp(rng.uniform(0.5, 1.0, (8, 4)), exponent).astype(np.float32) for _ in specs]
        values = [jax.device_put(a, place) for a, place in zip(arrays, places, strict=True)]
        gradients = Gradients(values, state.running, None)
        _, result = polyamp.apply_gradients(state, gradients)
        expected = np.linalg.norm(np.concatenate([a.ravel().astype(np.float64) for a in arrays]))
        np.testing.assert_allclose(float(result.grad_norm), expected, rtol=1e-6)
        assert not bool(result.skipped)
    for number in range(len(specs)):
        values[number] = jax.device_put(np.full((8, 4), np.nan, np.float32), places[number])
        _, result = polyamp.apply_gradients(state, Gradients(values, state.running, None))
        assert bool(result.skipped)
        values[number] = jnp.ones((8, 4))
