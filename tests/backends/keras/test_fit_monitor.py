"""`MonitorCallback` on every Keras backend: the records of `fit` are those of `train_step`, and a switch traces nothing
again (S35)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp.errors import ArgumentError, LossScaleError
from polyamp.monitor.records import MonitorRecord, TensorStats

SCALER = polyamp.LossScaler(init_scale=2.0**10, growth_interval=4)
POLICIES = ("float32", "mixed_float16")
WAYS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tensorflow": [(policy, {"jit_compile": compiles}) for policy in POLICIES for compiles in (False, True)]
    + [("mixed_float16", {"run_eagerly": True})],
    "torch": [(policy, {}) for policy in POLICIES],
    "jax": [*((policy, {}) for policy in POLICIES), ("mixed_float16", {"run_eagerly": True})],
}
"""Policies, and how `fit` can run a step on each Keras backend."""
TRACES = keras.config.backend() != "torch"
"""Whether a step is traced. On torch Keras runs one step an execution."""


def make_model() -> Any:
    first, second = (keras.initializers.GlorotUniform(seed=seed) for seed in range(2))
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "tanh", kernel_initializer=first, name="hidden"),
            keras.layers.Dense(3, kernel_initializer=second, name="out"),
        ]
    )


def compile_plainly(model: Any, made: polyamp.Recipe, **options: Any) -> None:
    """Compile a model without XLA, which on TensorFlow takes long."""
    plain = {"jit_compile": False} if keras.config.backend() == "tensorflow" else {}
    polyamp_keras.compile(model, made, loss="mse", **{**plain, **options})


def rows(count: int = 48, *, bad: int | None = None) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    if bad is not None:
        x[bad] = np.inf
    return x, rng.normal(size=(count, 3)).astype(np.float32)


def recipe(policy: str = "mixed_float16", **changes: Any) -> polyamp.Recipe:
    given: dict[str, Any] = {"optimizer": polyamp.sgd(0.1), "scaler": SCALER, **changes}
    return polyamp.Recipe(policy=policy, **given)


def fitted(
    made: polyamp.Recipe, data: tuple[Any, Any], *, batch_size: int = 8, epochs: int = 1, **options: Any
) -> list[MonitorRecord]:
    """Records of a `fit` that reads every update."""
    model, monitor = make_model(), polyamp.Monitor(every=options.pop("every", 1), weights=True)
    compile_plainly(model, made, **options)
    callbacks = [polyamp_keras.MonitorCallback(monitor)]
    model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return monitor.records


def stepped(made: polyamp.Recipe, data: tuple[Any, Any], *, rows_per_step: int = 8) -> list[MonitorRecord]:
    """Records of `train_step` on the same batches."""
    monitor = polyamp.Monitor(every=1, weights=True)
    state = polyamp.init(make_model(), made)
    step = polyamp.train_step(
        lambda model, batch: polyamp.losses.mean_squared_error(model(batch[0]), batch[1]), made, monitor=monitor
    )
    x, y = data
    for begin in range(0, len(x), rows_per_step):
        part = slice(begin, begin + rows_per_step)
        state, _ = step(state, tuple(keras.ops.convert_to_tensor(each[part]) for each in (x, y)))
    return monitor.records


def moved_elements(one: TensorStats | None, other: TensorStats | None) -> int:
    """Return how many elements have another exponent."""
    assert one is not None
    assert other is not None
    assert one.elements == other.elements
    counts = np.zeros((2, 400), int)
    for row, stats in zip(counts, (one, other), strict=True):
        row[stats.first_exponent + 200 :][: len(stats.exponents)] = stats.exponents
    return int(np.abs(counts[0] - counts[1]).sum())


def assert_alike(records: list[MonitorRecord], wanted: list[MonitorRecord], *, moved: int = 2) -> None:
    assert len(records) == len(wanted)
    for one, other in zip(records, wanted, strict=True):
        for name in ("call", "step", "scale", "next_scale", "skipped", "skips", "word"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.loss == pytest.approx(other.loss, rel=1e-3, nan_ok=True)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3, nan_ok=True)
        assert [each.module for each in one.modules] == [each.module for each in other.modules]
        for own, theirs in zip(one.modules, other.modules, strict=True):
            assert moved_elements(own.gradients, theirs.gradients) <= moved
            assert moved_elements(own.weights, theirs.weights) <= moved
            assert own.update_ratio == pytest.approx(theirs.update_ratio, rel=1e-2)


@pytest.mark.parametrize(("policy", "options"), WAYS[keras.config.backend()])
def test_s35_the_records_are_those_of_train_step(policy: str, options: dict[str, Any]) -> None:
    made, data = recipe(policy), rows(bad=17)
    records = fitted(made, data, **options)
    assert [record.skipped for record in records] == [False, False, True, False, False, False]
    assert_alike(records, stepped(made, data))


def test_s35_a_window_is_one_call_with_its_mean_loss() -> None:
    """The last batch is smaller, and counts less."""
    made, data = recipe("float32", accumulate_steps=3), rows(44)
    records = fitted(made, data)
    assert [(record.call, record.step) for record in records] == [(1, 1), (2, 2)]
    x, y = data
    parts = [(x[:24], y[:24]), (x[24:], y[24:])]
    one_batch = made.replace(accumulate_steps=1)
    assert_alike(records[:1], stepped(one_batch, parts[0], rows_per_step=24))
    model = make_model()
    compile_plainly(model, one_batch)
    losses = [float(model.train_on_batch(*parts[0]))]
    model.reset_metrics()
    losses.append(float(model.train_on_batch(*parts[1])))
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-5)


def test_s35_a_window_that_is_open_goes_on_in_the_next_epoch() -> None:
    made, data = recipe("float32", accumulate_steps=2), rows(24)
    records = fitted(made, data, epochs=2)
    x, y = data
    both = np.tile(x, (2, 1)), np.tile(y, (2, 1))
    assert_alike(records, stepped(made.replace(accumulate_steps=1), both, rows_per_step=16))


@pytest.mark.parametrize("steps", [2, 4] if TRACES else [1])
def test_s35_of_an_execution_of_several_steps_the_last_is_read(steps: int) -> None:
    """The second execution of four has two batches."""
    made, data = recipe("float32"), rows(bad=17)
    records = fitted(made, data, every=2, steps_per_execution=steps)
    calls = [4, 6] if steps == 4 else [2, 4, 6]
    assert [record.call for record in records] == calls
    each = {record.call: record for record in fitted(made, data)}
    for one in records:
        wanted = each[one.call]
        assert (one.step, one.scale, one.skipped) == (wanted.step, wanted.scale, wanted.skipped)
        assert one.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert one.modules == wanted.modules or one.modules[0].update_ratio == pytest.approx(
            wanted.modules[0].update_ratio, rel=1e-4
        )
    assert [record.skips for record in records] == ([0, 1, 0] if len(calls) == 3 else [1, 0])


def test_s35_it_changes_no_step() -> None:
    weights = []
    for callbacks in ([], [polyamp_keras.MonitorCallback(polyamp.Monitor(every=2, weights=True))]):
        model = make_model()
        compile_plainly(model, recipe(optimizer=polyamp.adam(0.1), clip_norm=0.1))
        model.fit(*rows(bad=17), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        scale = [keras.ops.convert_to_numpy(variable.value) for variable in model.optimizer.scale_variables]
        weights.append([*model.get_weights(), *scale])
    for plain, watched in zip(*weights, strict=True):
        np.testing.assert_allclose(plain, watched, rtol=1e-5, atol=1e-6)


class Traced(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Counts how often the step is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.traces = [0]

    def call(self, x: Any) -> Any:
        self.traces[0] += 1
        return x


def test_s35_a_switch_traces_nothing_again() -> None:
    layer = Traced()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), layer])
    compile_plainly(model, recipe("float32"))
    monitor, counts, ran = polyamp.Monitor(every=2), [], []

    class Switch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            ran.append(batch)
            monitor.enabled, monitor.every = len(ran) % 5 != 0, 2 + len(ran) % 3

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            counts.append(layer.traces[0])

    callbacks = [Switch(), polyamp_keras.MonitorCallback(monitor)]
    for _ in range(2):
        model.fit(*rows(96), batch_size=8, verbose=0, callbacks=callbacks)
    assert monitor.calls == len(ran) == 24
    assert len(monitor.records) > 3
    assert not TRACES or counts[-1] == counts[5]  # once with figures, once without
    calls = monitor.calls
    model.fit(*rows(16), batch_size=8, verbose=0)
    assert not TRACES or layer.traces[0] == counts[-1]
    model.train_on_batch(*rows(8))  # Keras traces this one apart
    assert monitor.calls == calls


def test_s35_skips_are_counted_over_several_fits() -> None:
    """Steps without the monitor in between are no skips."""
    model, monitor = make_model(), polyamp.Monitor(every=4)
    compile_plainly(model, recipe())
    watch = polyamp_keras.MonitorCallback(monitor)
    for data, callbacks in ((rows(bad=17), [watch]), (rows(32), []), (rows(bad=1), [watch])):
        model.fit(*data, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    # 6 calls with a skip at 3, 4 steps that are not seen, 6 calls with a skip at 7
    assert [(record.call, record.step, record.skips) for record in monitor.records] == [
        (4, 3, 1),
        (8, 10, 1),
        (12, 14, 0),
    ]


class Twice(keras.Sequential):  # type: ignore[misc]  # Keras is untyped
    """Takes two updates of each batch."""

    def train_step(self, *arguments: Any) -> Any:
        result = super().train_step(*arguments)
        if keras.config.backend() == "jax":  # where a step takes and returns the state
            arguments = (result[1], arguments[1])
        return super().train_step(*arguments)


def test_s35_every_update_of_an_own_train_step_is_a_call() -> None:
    model, monitor = Twice([keras.Input((6,)), keras.layers.Dense(3)]), polyamp.Monitor(every=4)
    compile_plainly(model, recipe("float32"))
    watch = polyamp_keras.MonitorCallback(monitor)
    model.fit(*rows(bad=17), batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    assert [(record.call, record.step, record.skips) for record in monitor.records] == [
        (4, 4, 0),
        (8, 6, 2),
        (12, 10, 0),
    ]
    model, monitor = Twice([keras.Input((6,)), keras.layers.Dense(3, kernel_initializer="ones")]), polyamp.Monitor(1)
    compile_plainly(model, recipe("float32", accumulate_steps=2))
    x, y = rows(8)
    loss = float(np.square(x.sum(1, keepdims=True) - y).mean())  # of both passes, between which nothing is updated
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[polyamp_keras.MonitorCallback(monitor)])
    assert [record.loss for record in monitor.records] == pytest.approx([loss], rel=1e-5)


def test_s35_a_step_that_raises_is_no_call() -> None:
    model, monitor = make_model(), polyamp.Monitor(every=1)
    polyamp_keras.compile(model, recipe("float32"), loss="mse", run_eagerly=True)

    def batches() -> Any:
        x, y = rows(16)
        yield x[:8], y[:8]
        yield x[8:, :4], y[8:]

    with pytest.raises(ValueError, match="incompatible with the layer"):
        model.fit(batches(), verbose=0, shuffle=False, callbacks=[polyamp_keras.MonitorCallback(monitor)])
    assert monitor.calls == 1
    assert len(monitor.records) == 1
    assert model.optimizer.figures is None


def test_s35_without_a_scaler_the_norm_is_there() -> None:
    made, data = recipe("float32", scaler=None), rows(16)
    assert_alike(fitted(made, data), stepped(made, data))


def test_s35_a_model_of_model_compile_says_its_policy() -> None:
    model, monitor = make_model(), polyamp.Monitor(every=1)
    model.compile(polyamp_keras.LossScaleOptimizer(keras.optimizers.SGD(0.1), SCALER), loss="mse", jit_compile=False)
    with pytest.raises(ArgumentError, match="policy must say in which dtype 'sequential"):
        model.fit(*rows(8), verbose=0, callbacks=[polyamp_keras.MonitorCallback(monitor)])
    model.fit(*rows(8), verbose=0, callbacks=[polyamp_keras.MonitorCallback(monitor, "float32")])
    assert [record.scale for record in monitor.records] == [SCALER.init_scale]
    model.compile("sgd")
    with pytest.raises(LossScaleError, match=r"Received: keras\..*SGD"):
        model.fit(*rows(8), verbose=0, callbacks=[polyamp_keras.MonitorCallback(monitor, "float32")])
    watches = [polyamp_keras.MonitorCallback(monitor, "float32") for _ in range(2)]
    compile_plainly(model, recipe("float32"))
    with pytest.raises(ArgumentError, match="callbacks must have one MonitorCallback"):
        model.fit(*rows(8), verbose=0, callbacks=watches)
    with pytest.raises(ArgumentError, match=r"monitor must be a polyamp\.Monitor\. Received: 3"):
        polyamp_keras.MonitorCallback(3)  # type: ignore[arg-type]  # the mistake
