"""The state as a pytree: under jit, donation and tree maps, traced once, saved and restored bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.recipe.scaler import LossScaleState
from polyamp_jax import BACKEND, JaxState


def test_repr_shows_what_matters_in_every_condition(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    state = polyamp.init(make_kind("linen").model, recipe())
    policy = "policy=Policy(param='float32', compute='float16', output='float32') [mixed: float32 master weights]"
    device = BACKEND.info().devices[0]
    assert repr(state) == f"JaxState(backend='jax', device='{device}', parameters=139, {policy}, scale=32768, step=0)"
    seen: list[str] = []

    def look(state: Any) -> Any:
        seen.append(repr(state))
        return state

    jax.jit(look)(state)
    assert "device='traced'" in seen[0]
    assert "scale=traced, step=traced" in seen[0]
    assert "device='ndarray'" in repr(jax.tree.map(np.asarray, state))
    polyamp.train_step(loss_fn, recipe())(state, batch())
    assert "scale=donated, step=donated" in repr(state)


def test_it_goes_through_tree_map_and_jit_whole(make: Any, recipe: Any) -> None:
    made = make(dropout=True)
    state = polyamp.init(made.model, recipe(), **made.options)
    for other in (jax.tree.map(lambda leaf: leaf, state), jax.jit(lambda s: s)(state)):
        assert isinstance(other, JaxState)
        assert jax.tree.structure(other) == jax.tree.structure(state)
        assert other.recipe == state.recipe
        mine, theirs = BACKEND.export_state(state), BACKEND.export_state(other)
        assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
    marked = jax.tree.unflatten(jax.tree.structure(state), [object()] * len(jax.tree.leaves(state)))
    assert isinstance(marked, JaxState), "unflattening must not look at the leaves"


def test_a_copied_state_has_the_one_backend(make_kind: Any, recipe: Any) -> None:
    state = polyamp.init(make_kind("linen").model, recipe())
    assert copy.deepcopy(state).backend is state.backend is BACKEND
    assert pickle.loads(pickle.dumps(BACKEND)) is BACKEND


def test_two_states_of_one_model_have_one_structure(make_kind: Any, recipe: Any) -> None:
    for kind in ("linen", "nnx", "haiku", "function"):
        made = make_kind(kind)
        first, second = (polyamp.init(made.model, recipe(), **made.options) for _ in range(2))
        assert jax.tree.structure(first) == jax.tree.structure(second)
        other = polyamp.init(made.model, recipe(clip_norm=1.0), **made.options)
        assert jax.tree.structure(first) != jax.tree.structure(other)


def pointers(tree: Any) -> list[int]:
    """Where the leaves lie in memory."""
    keys = jax.dtypes.prng_key
    leaves = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x for x in jax.tree.leaves(tree))
    return [leaf.unsafe_buffer_pointer() for leaf in leaves]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "mixed_float16") for kind in ("linen", "nnx", "equinox", "haiku", "function")), ("linen", "float32")],
)
def test_no_leaf_is_weakly_typed_and_no_two_share_a_buffer(
    make_kind: Any, kind: str, policy: str, recipe: Any, batch: Any, loss_fn: Any
) -> None:
    made = make_kind(kind, dropout=True)
    state = polyamp.init(made.model, recipe(policy, optimizer=polyamp.adamw(1e-3)), **made.options)
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))
    assert len(set(pointers(state))) == len(pointers(state))
    after, result = polyamp.train_step(loss_fn, state.recipe)(state, batch())
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(after))
    assert len(set(pointers((after, result)))) == len(pointers((after, result)))


OPTIMIZERS = {
    "adamw": polyamp.adamw(polyamp.schedules.warmup_cosine(1e-3, 2, 9)),
    "adagrad": polyamp.adagrad(1e-2),
    "native": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


@pytest.mark.parametrize(
    ("policy", "name"),
    [("float32", "native"), ("mixed_float16", "adamw"), ("mixed_float16", "adagrad"), ("bf16-true", "adamw")],
)
def test_one_trace_for_all_steps(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, policy: str, name: str) -> None:
    traces = []

    def counted(model: Any, batch: Any) -> Any:
        traces.append(1)
        return loss_fn(model, batch)

    made = make_kind("linen", norm=policy != "bf16-true", dropout=True)
    model = made.model
    if policy == "bf16-true":
        model = (model[0], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model[1]))
    chosen = recipe(policy, optimizer=OPTIMIZERS[name], clip_norm=1.0)
    state = polyamp.init(model, chosen, **made.options)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    step = polyamp.train_step(counted, chosen)
    for i in range(5):
        state, _ = step(state, batch(i, gain=np.inf if i == 2 else 1.0))
    assert len(traces) == 1
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    other = polyamp.init(model, chosen, **made.options)
    step(other, batch())
    assert len(traces) == 1, "a second state of the same model and recipe is the same program"


def test_one_trace_and_one_compilation_when_the_parameters_are_committed(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, variables = make_kind("linen", norm=True).model
    state = polyamp.init((module, jax.device_put(variables, jax.devices()[0])), recipe(optimizer=polyamp.adam(1e-3)))
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    step = polyamp.train_step(loss_fn, state.recipe)
    state, _ = step(state, batch())
    with caplog.at_level("WARNING"), jax.log_compiles():
        state, _ = step(state, batch())
    assert not [record for record in caplog.records if "Compiling" in record.message]


def test_two_scale_states_can_be_donated_together() -> None:
    scaler = polyamp.LossScaler()
    both = (scaler.init("jax"), scaler.init("jax"))
    new = jax.jit(lambda a, b: (scaler.update(a, True), scaler.update(b, False)), donate_argnums=(0, 1))(*both)
    assert [float(s.scale) for s in new] == [32768.0, 16384.0]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(both))
    assert float(scaler.init("jax").scale) == 32768.0, "a later default must not be a deleted array"


def test_results_outlive_the_donation_of_their_state(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    for chosen in (recipe(), recipe("float32")):
        state = polyamp.init(make_kind("linen").model, chosen)
        step = polyamp.train_step(loss_fn, chosen)
        results = []
        for i in range(4):
            state, result = step(state, batch(i))
            results.append(result)
        assert [int(r.step) for r in results] == [1, 2, 3, 4]
        assert all(np.isfinite([float(r.scale), float(r.loss), float(r.grad_norm)]).all() for r in results)


def test_donation_can_be_turned_off(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    state = polyamp.init(make_kind("linen").model, recipe())
    step = polyamp.train_step(loss_fn, recipe(), donate=False)
    (_, first), (_, second) = step(state, batch()), step(state, batch())
    assert float(first.loss) == float(second.loss)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_state_whose_optimizer_keeps_the_parameters_can_be_donated(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any
) -> None:
    keeper = optax.GradientTransformation(
        lambda params: params, lambda g, s, p: (jax.tree.map(lambda x: -0.1 * x, g), s)
    )
    chosen = recipe(optimizer=keeper)
    state = polyamp.init(make_kind("linen").model, chosen)
    state, result = polyamp.train_step(loss_fn, chosen)(state, batch())
    assert int(result.step) == 1


def test_every_field_of_the_scaler_survives_jit(backend: Any) -> None:
    """jmp's pytree loses its floor under jit: 64 became 1."""
    scaler = polyamp.LossScaler(init_scale=128.0, min_scale=64.0, hysteresis=2)
    state = scaler.init("jax")
    update = jax.jit(scaler.update)
    for _ in range(5):
        state = update(state, jnp.asarray(False))
    assert [backend.to_numpy(x).item() for x in state] == [64.0, 0, -1, 5, 4]
    assert [leaf.dtype.name for leaf in state] == ["float32"] + ["int32"] * 4
    assert not any(leaf.weak_type for leaf in state)
    assert isinstance(state, LossScaleState)


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox", "haiku", "function"])
def test_resuming_is_bit_identical_with_statistics_and_dropout(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any, tmp_path: Path, kind: str
) -> None:
    made = make_kind(kind, norm=kind != "function", dropout=True)
    scaler = polyamp.LossScaler(init_scale=64.0, growth_interval=2)
    chosen = recipe(optimizer=polyamp.adamw(1e-2), accumulate_steps=2, scaler=scaler)
    step = polyamp.train_step(loss_fn, chosen)

    def run(state: Any, first: int, last: int) -> Any:
        for i in range(first, last):
            state, _ = step(state, batch(i, gain=np.inf if i == 1 else 1.0))
        return state

    def fresh() -> Any:
        return polyamp.init(made.model, chosen, **made.options)

    state = run(fresh(), 0, 3)
    polyamp.save(state, tmp_path / "checkpoint")
    straight = backend.export_state(run(state, 3, 6))
    assert {"step", "loss_scale/scale", "loss_scale/stuck"} <= set(straight)
    assert any(name.startswith("rng/") for name in straight)
    restored = polyamp.restore(fresh(), tmp_path / "checkpoint")
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(restored))
    resumed = backend.export_state(run(restored, 3, 6))
    assert {k: v.tobytes() for k, v in straight.items()} == {k: v.tobytes() for k, v in resumed.items()}


def test_restoring_keeps_the_placement(make_kind: Any, recipe: Any) -> None:
    module, variables = make_kind("linen").model
    for placed in (variables, jax.device_put(variables, jax.devices()[0])):
        state = polyamp.init((module, placed), recipe())
        again = BACKEND.import_state(state, BACKEND.export_state(state))
        assert [x.committed for x in jax.tree.leaves(again)] == [x.committed for x in jax.tree.leaves(state)]


SHARDED = """
import jax, numpy as np, polyamp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adam(1e-2), clip_norm=1.0)
loss_fn = lambda m, b: polyamp.losses.mean_squared_error(m(b["x"]) * b["g"], b["y"])
rng = np.random.default_rng(0)
params = {"w": rng.normal(size=(4, 2)).astype("f4")}
batches = [{"x": rng.normal(size=(8, 4)).astype("f4"), "y": np.ones((8, 2), "f4"), "g": np.ones((8, 2), "f4")}
           for _ in range(4)]
batches[2]["g"][7] = np.inf
apply_fn = lambda p, x: x @ p["w"]
results = []
for place in (lambda tree, spec: tree, put):
    state = polyamp.init((apply_fn, place(params, P())), recipe, backend="jax")
    step = polyamp.train_step(loss_fn, recipe)
    skips = []
    for batch in batches:
        state, result = step(state, place(batch, P("data")))
        skips.append(bool(result.skipped))
    results.append((skips, float(result.scale), np.asarray(state.params["w"])))
assert results[0][0] == results[1][0] == [False, False, True, False], results
assert results[0][1] == results[1][1]
np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-3)
assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(state))
print("ok")
"""


def test_a_batch_sharded_over_two_devices_takes_one_decision() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **flags})
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("again", [dataclasses.replace, lambda state: jax.tree.map(lambda leaf: leaf, state)])
@pytest.mark.parametrize("halves", [False, True])
def test_s17_a_state_made_anew_between_two_steps_is_still_watched(again: Any, *, halves: bool) -> None:
    """The count belonged to the object: whoever rebuilt the state between two steps trained on in silence."""
    scaler = polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    made = polyamp.Recipe(scaler=scaler, optimizer=polyamp.sgd(0.1))
    bad = {"x": np.full((2, 2), np.nan, np.float32), "y": np.zeros((2, 1), np.float32)}

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    def loop() -> None:
        state = polyamp.init((lambda params, x: x @ params["w"], {"w": jnp.ones((2, 1))}), made)
        step = polyamp.train_step(loss_fn, made)
        for _ in range(6):
            if halves:
                state = again(state)
                _, gradients = polyamp.value_and_grad(loss_fn)(state, bad)
                state, _ = polyamp.apply_gradients(state, gradients)
            else:
                state, _ = step(again(state), bad)

    with pytest.raises(polyamp.LossScaleStuckError, match="2 steps in a row"):
        loop()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (optax.adam(0.125), optax.adam(0.5), "chain[1].scale.step_size: -0.125 -> -0.5"),
        (optax.adam(0.125), optax.adam(0.125, b1=0.5), "chain[0].scale_by_adam.b1: 0.9 -> 0.5"),
        (
            optax.sgd(optax.cosine_decay_schedule(0.5, 10)),
            optax.sgd(optax.cosine_decay_schedule(0.5, 20)),
            "cosine_decay_schedule.decay_steps: 10.0 -> 20.0",
        ),
        (
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.125),
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
            "inject_hyperparams.numeric_hps.learning_rate: 0.125 -> 0.5",
        ),
    ],
    ids=["rate", "moment", "schedule", "injected"],
)
def test_s22_what_an_optax_optimizer_closes_over_is_compared(tmp_path: Path, old: Any, new: Any, said: str) -> None:
    def fresh(optimizer: Any) -> Any:
        model = (lambda params, x: x @ params["w"], {"w": jnp.ones((2, 2))})
        return polyamp.init(model, polyamp.Recipe(optimizer=optimizer))

    polyamp.save(fresh(old), tmp_path / "checkpoint")
    polyamp.restore(fresh(old), tmp_path / "checkpoint")
    with pytest.raises(polyamp.CheckpointError) as caught:
        polyamp.restore(fresh(new), tmp_path / "checkpoint")
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert line.startswith("  optimizer.")
    assert line.endswith(said)
    restored = polyamp.restore(fresh(new), tmp_path / "checkpoint", on_change="accept")
    hyperparams = getattr(restored.opt_state, "hyperparams", {"learning_rate": 0.5})
    assert float(hyperparams["learning_rate"]) == 0.5, "what inject_hyperparams keeps in the state is the code's too"


def test_saving_a_donated_state_says_so(tmp_path: Path, make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    state = polyamp.init(make_kind("linen").model, recipe())
    polyamp.train_step(loss_fn, recipe(), donate=False)(state, batch())
    polyamp.save(state, tmp_path / "kept")
    polyamp.train_step(loss_fn, recipe())(state, batch())
    with pytest.raises(polyamp.CheckpointError, match=r"was donated to a step.* the step returned.* donate=False"):
        polyamp.save(state, tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
