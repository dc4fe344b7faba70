"""Two processes on loopback under MultiWorkerMirroredStrategy, with a kill timeout: one decision, and no hang.

Run as a program, this file is one of the two workers; its first line is what it saw, as JSON. After that it trains
with Keras's own scaler until it hangs.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SECONDS = 400
ROOT = Path(__file__).parents[4]
OVERFLOWS = {1: 0, 2: 1}
"""Step -> the worker whose gradients overflow in it: each in turn, between two steps that are applied."""
LOOPS = ("custom", "fit", "train_step")


def start_workers(folder: Path) -> list[subprocess.Popen[str]]:
    """Two workers, which write their errors into the folder."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    workers = []
    for index in range(2):
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, __file__, str(folder)]
        with (folder / f"errors_{index}").open("w") as errors:
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True))
    return workers


def next_line(worker: subprocess.Popen[str]) -> str:
    """What a worker prints next; nothing from one that hung and was killed for it, or failed."""
    assert worker.stdout is not None
    killer = threading.Timer(SECONDS, worker.kill)
    killer.start()
    line = worker.stdout.readline()
    killer.cancel()
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started = start_workers(folder)
    yield started
    for worker in started:
        worker.kill()
        worker.communicate()


@pytest.fixture(scope="module")
def results(workers: list[subprocess.Popen[str]], folder: Path) -> list[dict[str, Any]]:
    """What each of the two workers saw, by loop."""
    lines = [next_line(worker) for worker in workers]
    assert all(lines), [(folder / f"errors_{index}").read_text()[-3000:] for index in range(2)]
    return [json.loads(line) for line in lines]


@functools.cache
def train_alone(loop: str) -> dict[str, Any]:
    """The same training in this process."""
    return train(loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_overflow_on_one_worker_skips_on_both(results: list[dict[str, Any]], loop: str) -> None:
    first, second = (result[loop] for result in results)
    assert first == second, "scale, counts and weights must be identical, bit for bit"
    assert first["scales"] == [16.0, 8.0, 4.0, 4.0]
    assert (first["iterations"], first["skipped"]) == (2, 2)
    for step in range(4):
        assert (first["weights"][step] == first["weights"][step + 1]) == (step in OVERFLOWS)
    assert np.isfinite(np.array(first["weights"][-1])).all()


@pytest.mark.parametrize("loop", LOOPS)
def test_two_workers_train_as_one_process(results: list[dict[str, Any]], loop: str) -> None:
    alone = train_alone(loop)
    np.testing.assert_allclose(results[0][loop]["weights"][-1], alone["weights"][-1], rtol=1e-5)


def test_fit_evaluate_and_predict_give_the_numbers_of_one_process(results: list[dict[str, Any]]) -> None:
    alone, together = train_alone("fit"), results[0]["fit"]
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-5)
    assert np.isfinite([loss for step, loss in enumerate(alone["losses"]) if step not in OVERFLOWS]).all()
    np.testing.assert_allclose(together["evaluated"], alone["evaluated"], rtol=1e-5)
    np.testing.assert_allclose(together["predicted"], alone["predicted"], rtol=1e-5)


def test_s09_statistics_and_aux_and_what_is_sent(results: list[dict[str, Any]]) -> None:
    """An overflow on each worker in turn, six times: after every step all weights, statistics among them, are equal."""
    first, second = (result["statistics"] for result in results)
    assert first["after"] == second["after"]
    assert [first["after"][step] == first["after"][step + 1] for step in range(12)] == [False, True] * 6
    assert first["aux"] != second["aux"], "each process has its own"
    assert np.array(first["aux"]).shape == (1, 4)
    assert first["collectives"] == 1, "one reduction of everything, as a loop by hand has one of its gradients"
    assert first["kept"] == second["kept"]


def test_s23_what_one_worker_uses_and_another_does_not_is_refused_on_both(results: list[dict[str, Any]]) -> None:
    for result in results:
        kind, message, same, goes_on = result["apart"]
        assert (kind, same, goes_on) == ("UnsupportedError", True, True)
        assert "one process and not in another" in message
        assert "first/kernel, first/bias, second/kernel, second/bias" in message
        assert "neither" not in message


def test_s33_workers_save_together_and_any_number_goes_on(results: list[dict[str, Any]], folder: Path) -> None:
    first, second = (result["checkpoints"] for result in results)
    assert first["saved"] == second["saved"] == first["restored"] == second["restored"]
    assert first["straight"] == second["straight"] == first["resumed"] == second["resumed"]
    said = json.loads((folder / "checkpoint" / "polyamp.json").read_text())
    assert (said["processes"], list(said["files"])) == (2, ["state.safetensors"])
    for found, kind in ((first, "CheckpointError: rank 1 could not read "), (second, "IsADirectoryError: ")):
        assert found["refused"].startswith(kind)
    assert repr(weights(restored(folder / "checkpoint").model)) == first["saved"]
    assert repr(weights(restored(folder / "file").model)) == first["saved"]


def test_keras_own_scaler_hangs_where_polyamp_skips(
    results: list[dict[str, Any]], workers: list[subprocess.Popen[str]]
) -> None:
    """It takes the flag before the gradients are summed: one worker waits for a sum that the other never makes."""
    assert len(results) == 2, "polyamp's trainings have ended in both"
    assert [next_line(worker) for worker in workers] == ["one finite step\n"] * 2
    time.sleep(5)
    assert all(worker.poll() is None for worker in workers), "none has failed"
    for worker in workers:
        worker.kill()
    outputs = [next_line(worker) for worker in workers]
    assert outputs.count("both steps\n") < 2


def train(loop: str, strategy: Any = None) -> dict[str, Any]:
    """Four steps of a small model; every worker's batch is its half of the same eight rows."""
    import keras
    import tensorflow as tf

    import polyamp
    from polyamp_tensorflow import LossScaleOptimizer
    from polyamp_tensorflow import compile as compile_model

    rows = slice(0, 8)
    if strategy is None:
        strategy = tf.distribute.get_strategy()
    else:
        rows = slice(4 * strategy.cluster_resolver.task_id, 4 * strategy.cluster_resolver.task_id + 4)
    batches = make_batches(OVERFLOWS)
    scaler = polyamp.LossScaler(init_scale=16.0)
    with strategy.scope():
        model = make_model()
        inner = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
        recipe = polyamp.Recipe(optimizer=inner, scaler=scaler, clip_norm=1.0)
        if loop == "train_step":
            state = polyamp.init(model, recipe)
        elif loop == "custom":
            optimizer = LossScaleOptimizer(inner, scaler, clip_norm=1.0)
            optimizer.build(model.trainable_variables)
        else:
            compile_model(model, recipe, loss="mse")
            optimizer = model.optimizer
    seen: dict[str, Any] = {"scales": [], "weights": [weights(model)], "losses": []}
    if loop == "train_step":
        step = polyamp.train_step(loss_fn, recipe)
        skipped = 0
        for x, y in batches:
            _, result = step(state, (x[rows], y[rows]))
            skipped += bool(result.skipped)
            seen["losses"].append(float(result.loss))
            seen["scales"].append(float(result.scale))
            seen["weights"].append(weights(model))
        return {**seen, "losses": repr(seen["losses"]), "iterations": int(result.step), "skipped": skipped}
    step_function = tf.function(lambda x, y: strategy.run(replica_step(model, optimizer, strategy), args=(x, y)))
    for x, y in batches:
        if loop == "custom":
            step_function(tf.constant(x[rows]), tf.constant(y[rows]))
        else:
            seen["losses"] += model.fit(dataset(x, y), shuffle=False, verbose=0).history["loss"]
        seen["scales"].append(float(optimizer.scale_state.scale))
        seen["weights"].append(weights(model))
    if loop == "fit":
        seen["predicted"] = float(model.predict(dataset(*make_batches({})[0]), verbose=0).sum())
        seen["evaluated"] = model.evaluate(dataset(*make_batches({})[0]), verbose=0)
    return {**seen, "iterations": int(optimizer.iterations.numpy()), "skipped": optimizer.skipped_steps}


def loss_fn(model: Any, batch: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(tf.square(model(batch[0]) - batch[1])) + tf.add_n(model.losses)


def statistics(strategy: Any) -> dict[str, Any]:
    """A model with running statistics: after each of twelve steps everything, and what the step's graph sends."""
    import keras
    import tensorflow as tf

    import polyamp
    from polyamp_tensorflow import LossScaleOptimizer

    index = strategy.cluster_resolver.task_id
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2), scaler=polyamp.LossScaler(init_scale=1024.0), clip_norm=1.0)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1, kernel_regularizer="l2")]
        model = keras.Sequential([keras.Input((4,)), *layers])
        state = polyamp.init(model, recipe)
        optimizer = LossScaleOptimizer(polyamp.sgd(0.1), recipe.loss_scaler)
        optimizer.build(model.trainable_variables)
    step = polyamp.train_step(lambda m, b: (loss_fn(m, b), b[1][:, 0]), recipe)
    seen: dict[str, Any] = {"after": [repr(weights(model))]}
    for number in range(12):
        x, y = make_batches({0: number // 2 % 2} if number % 2 else {})[0]
        _, result = step(state, (x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]))
        assert bool(result.skipped) == bool(number % 2)
        seen["after"].append(repr([*weights(model), *(np.asarray(v).tolist() for v in state.optimizer.variables)]))
    seen["aux"] = result.aux.numpy().tolist()
    (program,) = [program.function for programs in state.programs.values() for program in programs.values()]
    graph = program.get_concrete_function((tf.TensorSpec((4, 4)), tf.TensorSpec((4, 1)))).graph.as_graph_def()
    nodes = [*graph.node, *(node for own in graph.library.function for node in own.node_def)]
    seen["collectives"] = sum("Collective" in node.op and "Group" not in node.op for node in nodes)

    def kept(x: Any, y: Any) -> None:
        with optimizer.keep_statistics(model):
            replica_step(model, optimizer, strategy)(x, y)

    x, y = (tf.constant(part[4 * index : 4 * index + 4]) for part in make_batches({})[1])
    tf.function(lambda x, y: strategy.run(kept, args=(x, y)))(x, y)
    return {**seen, "kept": repr(weights(model))}


def restored(path: Path | None, strategy: Any = None) -> Any:
    """A new state, with what a checkpoint holds."""
    import contextlib

    import keras

    import polyamp

    recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2), scaler=polyamp.LossScaler(init_scale=1024.0), clip_norm=1.0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        keras.utils.set_random_seed(7)
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        state = polyamp.init(keras.Sequential([keras.Input((4,)), *layers]), recipe)
    return state if path is None else polyamp.restore(state, path)


def checkpoints(strategy: Any, folder: Path) -> dict[str, str]:
    """Two workers save, go on, and go on once more from what they saved; then one of them names no checkpoint."""
    import tensorflow as tf

    import polyamp

    index, state = strategy.cluster_resolver.task_id, restored(None, strategy)

    def squares(model: Any, batch: Any) -> Any:
        return tf.reduce_mean(tf.square(model(batch[0]) - batch[1]))

    def on(state: Any, first: int, last: int) -> str:
        step = polyamp.train_step(squares, state.recipe)
        for x, y in make_batches({1: 1})[first:last]:
            step(state, (x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]))
        return repr(weights(state.model))

    seen = {"saved": on(state, 0, 3)}
    polyamp.save(state, folder / "checkpoint")
    polyamp.save(state, folder / "file", sharded=False)
    seen["straight"] = on(state, 3, 4)
    other = restored(folder / "checkpoint", strategy)
    seen["restored"] = repr(weights(other.model))
    seen["resumed"] = on(other, 3, 4)
    try:
        polyamp.restore(other, folder / "checkpoint" if index == 0 else folder)
    except Exception as error:  # noqa: BLE001  # what it is, is what the test asks
        seen["refused"] = f"{type(error).__name__}: {error}"
    return seen


def apart(strategy: Any) -> list[Any]:
    """Each worker's loss depends on a head of its own; then on the same one."""
    import keras
    import tensorflow as tf

    import polyamp

    recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2))
    with strategy.scope():
        x = keras.Input((4,))
        heads = [keras.layers.Dense(1, name=name)(x) for name in ("first", "second", "neither")]
        state = polyamp.init(keras.Model(x, heads), recipe)
    index, before = strategy.cluster_resolver.task_id, weights(state.model)
    batch = np.ones((4, 4), np.float32)
    try:
        polyamp.train_step(lambda m, b: tf.reduce_mean(m(b)[index] ** 2), recipe)(state, batch)
        found: list[Any] = ["nothing", ""]
    except Exception as error:  # noqa: BLE001  # what it is, is what the test asks
        found = [type(error).__name__, str(error)]
    same = weights(state.model) == before
    _, result = polyamp.train_step(lambda m, b: tf.reduce_mean(m(b)[0] ** 2), recipe)(state, batch)
    return [*found, same, int(result.step) == 1]


def train_with_keras(strategy: Any) -> None:
    """One finite step, then one that overflows on the second worker, with Keras's own scaler."""
    import keras
    import tensorflow as tf

    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=16.0)
        optimizer.build(model.trainable_variables)
    step_function = tf.function(lambda x, y: strategy.run(replica_step(model, optimizer, strategy), args=(x, y)))
    for number, (x, y) in enumerate(make_batches({1: 1})[:2]):
        step_function(tf.constant(x[4 * index : 4 * index + 4]), tf.constant(y[4 * index : 4 * index + 4]))
        weights(model)
        print(("one finite step", "both steps")[number], flush=True)
    time.sleep(SECONDS)  # a worker that ends is noticed by the other, which then stops waiting


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, kernel_regularizer="l2")]
    )


def make_batches(bad: dict[int, int]) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    batches = []
    for step in range(4):
        x = rng.normal(size=(8, 4)).astype("float32")
        if step in bad:
            x[4 * bad[step]] = np.inf
        batches.append((x, rng.normal(size=(8, 1)).astype("float32")))
    return batches


def dataset(x: Any, y: Any) -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)


def replica_step(model: Any, optimizer: Any, strategy: Any) -> Any:
    import tensorflow as tf

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) + tf.add_n(model.losses)
            scaled = optimizer.scale_loss(loss / strategy.num_replicas_in_sync)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    return step


def weights(model: Any) -> list[float]:
    return [float(number) for value in model.get_weights() for number in value.ravel()]


if __name__ == "__main__":
    import tensorflow as tf

    from tests import garbage

    garbage.search_seldom()
    both = tf.distribute.MultiWorkerMirroredStrategy()
    everything: dict[str, Any] = {loop: train(loop, both) for loop in LOOPS}
    everything |= {"checkpoints": checkpoints(both, Path(sys.argv[1]))}
    print(json.dumps({**everything, "statistics": statistics(both), "apart": apart(both)}), flush=True)
    train_with_keras(both)
