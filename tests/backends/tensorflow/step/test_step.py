"""The TensorFlow step: one graph, nothing moved by a skip, errors as they are, traps of Keras's own loss scaling."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp.errors import BatchError, LossError, UnsupportedError
from polyamp_tensorflow.step.tensorflow_only import graph_function

pytestmark = pytest.mark.filterwarnings("ignore:float16 on TensorFlow's CPU")
BACKEND = polyamp_tensorflow.BACKEND
HARNESS = BACKEND.testing()
TRACES = {
    1: [8, 8, 8, 8, 16, 8, 4, 4, 2, 2, 2, 2, 4, 4, 4, 4, 8, 4],
    2: [16, 16, 16, 16, 32, 32, 16, 16, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32],
}
"""S16: hysteresis -> the scale after each step of OVERFLOWS."""
OVERFLOWS = [1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def dropout_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=3),
            keras.layers.Dense(3),
        ]
    )


def snapshot(state: Any, *but: str) -> dict[str, bytes]:
    return {n: v.tobytes() for n, v in BACKEND.export_state(state).items() if not n.startswith(but)}


@pytest.mark.parametrize(("policy", "hysteresis"), [("float32", 1), ("mixed_float16", 2)])
def test_scale_follows_the_reference_trace(policy: str, hysteresis: int) -> None:
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=4, hysteresis=hysteresis)
    made = recipe(policy, scaler=scaler)
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    scales = [float(step(state, batch(i, gain=np.inf if bad else 1.0))[1].scale) for i, bad in enumerate(OVERFLOWS)]
    assert scales == TRACES[hysteresis]


def test_scale_stops_at_its_floor_and_the_next_finite_step_trains() -> None:
    made = recipe(scaler=polyamp.LossScaler(on_stuck="ignore"))
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    for _ in range(200):
        state, result = step(state, batch(gain=np.nan))
    assert float(result.scale) == 2.0**-14
    assert int(state.scale_state.skipped) == 200
    state, result = step(state, batch())
    assert not bool(result.skipped)
    assert all(np.isfinite(value).all() for value in BACKEND.export_state(state).values())


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_overflow_leaves_everything_but_scale_and_rng_bit_for_bit(policy: str) -> None:
    made = recipe(policy, optimizer=polyamp.adamw(1e-2), scaler=polyamp.LossScaler(init_scale=16.0), clip_norm=1.0)
    state = polyamp.init(dropout_model(), made)
    step = polyamp.train_step(loss_fn, made)
    step(state, batch(0))
    before, seed = (
        snapshot(state, "loss_scale/", "rng/"),
        snapshot(state, "model", "running", "optimizer", "loss_scale"),
    )
    _, result = step(state, batch(1, gain=np.inf))
    assert bool(result.skipped)
    assert snapshot(state, "loss_scale/", "rng/") == before
    assert {"running/batch_normalization/moving_mean", "optimizer/iteration", "step"} <= set(before)
    assert int(state.optimizer.iterations) == int(state.step) == 1
    after = snapshot(state, "model", "running", "optimizer", "loss_scale")
    assert after["rng/dropout/seed_0"] != seed["rng/dropout/seed_0"], "the mask that overflowed would come back"


def test_value_and_grad_moves_nothing_but_the_random_numbers() -> None:
    state = polyamp.init(dropout_model(), recipe())
    before = snapshot(state)
    run = polyamp.value_and_grad(loss_fn)
    loss, gradients = run(state, batch())
    between = snapshot(state)
    assert {name for name, value in between.items() if value != before[name]} == {"rng/dropout/seed_0"}
    again, _ = run(state, batch())
    assert float(loss) != float(again), "another mask"
    assert set(gradients.running) == {"batch_normalization/moving_mean", "batch_normalization/moving_variance"}
    moved = snapshot(state)
    polyamp.apply_gradients(state, gradients)
    changed = {name for name, value in snapshot(state).items() if value != moved[name]}
    assert {f"running/{n}" for n in gradients.running} <= changed
    assert "rng/dropout/seed_0" not in changed, "the first call's stream would bring back the second's mask"


def masks(model: Any, item: Any) -> Any:
    """The loss, and what dropout left of ones."""
    return loss_fn(model, item), model.layers[2](tf.ones((2, 8)), training=True)


@pytest.mark.parametrize("compile", [True, False])
def test_micro_batches_by_hand_draw_the_masks_of_a_window(compile: bool) -> None:  # noqa: A002
    whole = batch(size=8)
    parts = [{name: value[2 * i : 2 * i + 2] for name, value in whole.items()} for i in range(4)]
    made = recipe(accumulate_steps=4)
    window = polyamp.init(dropout_model(), made)
    step = polyamp.train_step(masks, made, compile=compile)
    wanted = [step(window, item)[1].aux.numpy() for item in (whole, whole)]
    by_hand = polyamp.init(dropout_model(), made)
    run = polyamp.value_and_grad(masks, compile=compile)
    found = []
    for _ in range(2):
        calls = [run(by_hand, part) for part in parts]
        found.append(np.stack([aux.numpy() for (_, aux), _ in calls]))
        polyamp.apply_gradients(by_hand, calls[0][1])
    assert np.array_equal(found, wanted)
    assert len({mask.tobytes() for four in wanted for mask in four}) == 8
    assert exported_seeds(by_hand) == exported_seeds(window)


def exported_seeds(state: Any) -> dict[str, bytes]:
    return {name: value for name, value in snapshot(state).items() if name.startswith("rng/")}


def test_an_error_puts_the_random_numbers_back() -> None:
    state = polyamp.init(dropout_model(), recipe())
    before = snapshot(state)

    def failing(model: Any, item: Any) -> Any:
        model(item["x"])
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        polyamp.value_and_grad(failing, compile=False)(state, batch())
    assert snapshot(state) == before


@pytest.mark.parametrize("init_scale", [1.0, 1024.0, 32768.0])
def test_states_that_share_a_layer(init_scale: float) -> None:
    """The shared layer's gradient is that of the whole loss in each state, unscaled once."""
    shared = keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(0.5), name="shared")
    heads = [keras.layers.Dense(1, kernel_initializer="ones", name=name) for name in ("left", "right")]
    models = [keras.Sequential([keras.Input((4,)), shared, head]) for head in heads]
    made = recipe(optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=init_scale))
    states = [polyamp.init(model, made) for model in models]
    x = batch()["x"]

    def both(models: Any, item: Any) -> Any:
        return keras.ops.mean(models[0](item)) + 3.0 * keras.ops.mean(models[1](item))

    before = shared.kernel.numpy()
    value, gradients = polyamp.value_and_grad(both)(states, x)
    wanted = np.repeat(4.0 * x.mean(axis=0)[:, None], 4, axis=1)
    for own in gradients:
        np.testing.assert_allclose(own.values["shared/kernel"].numpy(), wanted, rtol=1e-5, atol=1e-7)
    polyamp.apply_gradients(states, gradients)
    # each state has an optimizer, and each makes its step
    np.testing.assert_allclose(before - shared.kernel.numpy(), 0.2 * wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(heads[1].kernel.numpy(), 1 - 0.1 * 3 * (x @ before).mean(axis=0)[:, None], rtol=1e-5)
    assert float(value) == pytest.approx(4 * (x @ before).mean() * 4, rel=1e-5)


def test_the_two_halves_equal_the_step() -> None:
    made = recipe(optimizer=polyamp.adam(1e-2), scaler=polyamp.LossScaler.static(1024.0), clip_norm=0.1)
    whole, halves = polyamp.init(HARNESS.mlp(layers()), made), polyamp.init(HARNESS.mlp(layers()), made)
    step, run = polyamp.train_step(loss_fn, made), polyamp.value_and_grad(loss_fn)
    for i in range(3):
        step(whole, batch(i))
        polyamp.apply_gradients(halves, run(halves, batch(i))[1])
    left, right = BACKEND.export_state(whole), BACKEND.export_state(halves)
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-6, err_msg=name)


def test_one_trace_for_equal_shapes_whatever_the_values() -> None:
    traces: list[int] = []

    def counted(model: Any, item: Any) -> Any:
        traces.append(1)
        return loss_fn(model, item) * item["weight"]

    made = recipe()
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(counted, made)
    for i in range(5):
        step(state, {**batch(i), "weight": float(i)})
    assert len(traces) == 1


@pytest.mark.parametrize("count", [2, 8])
def test_accumulation_does_not_unroll(count: int) -> None:
    traces: list[int] = []

    def counted(model: Any, item: Any) -> Any:
        traces.append(1)
        loss = loss_fn(model, item)
        return loss, {"loss": loss, "absent": None}

    made = recipe(accumulate_steps=count)
    state = polyamp.init(HARNESS.mlp(layers()), made)
    _, result = polyamp.train_step(counted, made)(state, batch())
    assert len(traces) == 2
    assert result.aux["absent"] is None
    assert tuple(result.aux["loss"].shape) == (count,)


def test_running_statistics_flow_through_micro_batches() -> None:
    item = batch()
    model = HARNESS.normalized_mlp(layers())
    x = (item["x"] @ layers()[0].kernel + layers()[0].bias).reshape(2, 4, -1)
    made = recipe(accumulate_steps=2)
    polyamp.train_step(loss_fn, made)(polyamp.init(model, made), item)
    mean = 0.9 * (0.1 * x[0].mean(0)) + 0.1 * x[1].mean(0)
    np.testing.assert_allclose(model.get_layer("norm0").moving_mean.numpy(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"compile": False}, {"jit_compile": True}, {"jit_compile": False}])
def test_eager_and_xla_agree_with_the_graph(options: dict[str, Any]) -> None:
    made = recipe(optimizer=polyamp.adam(1e-2), scaler=polyamp.LossScaler(init_scale=16.0), accumulate_steps=2)
    flat = []
    for chosen in ({}, options):
        state = polyamp.init(HARNESS.mlp(layers()), made)
        step = polyamp.train_step(loss_fn, made, **chosen)
        for i in range(3):
            step(state, batch(i, gain=np.inf if i == 1 else 1.0))
        flat.append(np.concatenate([part.ravel() for layer in HARNESS.weights(state) for part in layer]))
        assert int(state.step) == 2
    np.testing.assert_allclose(flat[0], flat[1], rtol=1e-5, atol=1e-7)


def jit_of(policy: str, **options: Any) -> Any:
    made = recipe(policy)
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made, **options)
    step(state, batch())
    ((program,),) = [list(programs.values()) for programs in state.programs.values()]
    return program.function._jit_compile


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="XLA is chosen for float16 on a CPU")
def test_float16_on_a_cpu_goes_through_xla_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_function, "_float16_warned", [])
    assert jit_of("mixed_bfloat16") is False
    assert jit_of("float32") is False
    with pytest.warns(UserWarning, match="compiles this with XLA") as caught:
        chosen = [jit_of("mixed_float16"), jit_of("mixed_float16")]
    assert chosen == [True, True]
    assert len(caught) == 1
    assert jit_of("mixed_float16", jit_compile=False) is False


def test_a_model_that_xla_cannot_compile_is_refused_with_the_way_out() -> None:
    def strange(model: Any, item: Any) -> Any:
        return loss_fn(model, item) + tf.strings.to_number(tf.strings.as_string(item["y"][0, 0]))

    made = recipe("mixed_bfloat16")
    state = polyamp.init(HARNESS.mlp(layers()), made)
    with pytest.raises(UnsupportedError, match="Pass jit_compile=False"):
        polyamp.train_step(strange, made, jit_compile=True)(state, batch())


def test_contradictory_options_are_refused() -> None:
    made = recipe()
    state = polyamp.init(HARNESS.mlp(layers()), made)
    with pytest.raises(UnsupportedError, match="compile=False as well"):
        polyamp.train_step(loss_fn, made, compile=False, jit_compile=True)(state, batch())


def test_clip_comes_after_unscaling() -> None:
    flat = []
    for scale in (1.0, 2.0**14):
        made = recipe(optimizer=polyamp.sgd(1.0), scaler=polyamp.LossScaler.static(scale), clip_norm=0.1)
        state = polyamp.init(HARNESS.mlp(layers()), made)
        _, result = polyamp.train_step(loss_fn, made)(state, batch())
        flat.append(np.concatenate([part.ravel() for layer in HARNESS.weights(state) for part in layer]))
        assert float(result.grad_norm) > 0.1
    start = np.concatenate([part.ravel() for layer in layers() for part in layer])
    assert np.array_equal(flat[0], flat[1])
    np.testing.assert_allclose(np.linalg.norm(flat[0] - start), 0.1, rtol=1e-5)


def test_indexed_slices_of_an_embedding() -> None:
    table = np.arange(12, dtype=np.float32).reshape(6, 2)

    def mean_output(model: Any, item: Any) -> Any:
        return tf.reduce_sum(model(item))

    flat = []
    for policy in ("float32", "mixed_bfloat16"):
        made = recipe(policy, optimizer=polyamp.sgd(1.0), accumulate_steps=2)
        embedding = keras.layers.Embedding(6, 2, embeddings_initializer=keras.initializers.Constant(table))
        state = polyamp.init(keras.Sequential([keras.Input((3,)), embedding]), made)
        polyamp.train_step(mean_output, made)(state, np.array([[1, 1, 4], [1, 0, 4]], np.int32))
        flat.append(table - embedding.embeddings.numpy())
    assert np.array_equal(flat[0][:, 0], [0.5, 1.5, 0, 0, 1, 0])
    assert np.array_equal(flat[0], flat[1])


def test_errors_of_loss_fn_arrive_as_they_are() -> None:
    class OwnError(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    def failing(model: Any, item: Any) -> Any:
        model(item["x"])
        raise OwnError(7)

    for options in ({}, {"compile": False}):
        made = recipe()
        state = polyamp.init(dropout_model(), made)
        before = snapshot(state)
        with pytest.raises(OwnError) as caught:
            polyamp.train_step(failing, made, **options)(state, batch())
        assert (type(caught.value), caught.value.code, str(caught.value)) == (OwnError, 7, "code 7")
        assert snapshot(state) == before
    with pytest.raises(LossError, match=r"^loss_fn must return a scalar loss. Received shape: \(8, 3\)"):
        polyamp.train_step(lambda model, item: model(item["x"]), recipe())(state, batch())


def test_a_leaf_that_is_no_array_is_refused() -> None:
    made = recipe()
    state = polyamp.init(HARNESS.mlp(layers()), made)
    with pytest.raises(BatchError, match=r"Received: batch\['.*'\] is an object"):
        polyamp.train_step(loss_fn, made)(state, {**batch(), "extra": object()})


def test_programs_go_with_their_step() -> None:
    import gc

    made = recipe()
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    step(state, batch())
    assert len(state.programs) == 1
    del step
    gc.collect()
    assert len(state.programs) == 0


def test_a_16_bit_loss_is_upcast_before_scaling() -> None:
    made = recipe(polyamp.Policy(compute="float16", output="float16"), scaler=polyamp.LossScaler.static(2.0**15))
    state = polyamp.init(HARNESS.mlp(layers()), made)
    seen: list[Any] = []

    def narrow_loss(model: Any, item: Any) -> Any:
        loss = tf.reduce_mean(model(item["x"])) + 4.0
        seen.append(loss.dtype)
        return loss

    _, result = polyamp.train_step(narrow_loss, made)(state, batch())
    assert seen == [tf.float16]
    assert not bool(result.skipped)
    assert result.loss.dtype == tf.float32
    assert float(result.loss) > 2.0, "times 2^15 that is inf in float16"


def spectral_model() -> Any:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(3, kernel_initializer=keras.initializers.RandomNormal(stddev=3.0))
    return keras.Sequential([keras.Input((4,)), keras.layers.SpectralNormalization(dense)])


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_skipped_step_leaves_a_kernel_that_the_forward_pass_rewrites(accumulate_steps: int) -> None:
    """SpectralNormalization divides its layer's kernel by its norm in place, in the forward pass."""
    made = recipe(accumulate_steps=accumulate_steps, scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(spectral_model(), made)
    step = polyamp.train_step(loss_fn, made)
    before = snapshot(state, "loss_scale")
    _, result = step(state, batch(0, gain=np.inf))
    assert bool(result.skipped)
    polyamp.value_and_grad(loss_fn)(state, batch(0))
    assert snapshot(state, "loss_scale") == before
    _, result = step(state, batch(0))
    assert not bool(result.skipped)
    moved = {name for name, value in snapshot(state, "loss_scale").items() if value != before[name]}
    assert {name.rpartition("/")[2] for name in moved} >= {"kernel", "bias", "vector_u"}


def test_an_applied_step_updates_the_kernel_that_the_forward_pass_wrote() -> None:
    made = recipe(optimizer=polyamp.sgd(0.1))
    state = polyamp.init(spectral_model(), made)
    polyamp.train_step(loss_fn, made)(state, batch(0))
    by_hand = spectral_model()
    with tf.GradientTape() as tape:
        loss = loss_fn(lambda x: by_hand(x, training=True), {k: tf.constant(v) for k, v in batch(0).items()})
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, by_hand.trainable_variables), by_hand.trainable_variables)
    for mine, other in zip(state.model.weights, by_hand.weights, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-6, atol=1e-7)
