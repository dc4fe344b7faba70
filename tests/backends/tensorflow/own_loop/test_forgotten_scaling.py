"""A `scale_loss` that was forgotten is noticed in each function that forgets it, and nowhere else."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import LossScaleError
from polyamp_tensorflow import LossScaleOptimizer

FORGOTTEN = r"scale_loss\(\) was not"


def make(**options: Any) -> tuple[Any, Any]:
    variable = keras.Variable(np.ones(2, np.float32))
    scaler = polyamp.LossScaler(init_scale=4.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), scaler, **options)
    optimizer.build([variable])
    return variable, optimizer


def scaled_gradients(variable: Any, optimizer: Any) -> Any:
    with tf.GradientTape() as tape:
        scaled = optimizer.scale_loss(tf.reduce_sum(tf.square(variable.value)))
    return tape.gradient(scaled, [variable.value])


def plain_gradients(variable: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(variable.value))
    return tape.gradient(loss, [variable.value])


def train(variable: Any, optimizer: Any) -> None:
    optimizer.apply(scaled_gradients(variable, optimizer), [variable])


def forget(variable: Any, optimizer: Any) -> None:
    optimizer.apply(plain_gradients(variable), [variable])


def compiled(function: Any, *arguments: Any) -> Any:
    return tf.function(lambda: function(*arguments), autograph=False)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_second_function_that_forgets_is_noticed(accumulate_steps: int) -> None:
    made = make(accumulate_steps=accumulate_steps)
    step = compiled(train, *made)
    for _ in range(2):
        step()
    before = made[0].numpy()
    with pytest.raises(LossScaleError, match=FORGOTTEN):
        compiled(forget, *made)()
    assert np.array_equal(made[0].numpy(), before)
    step()


def test_a_loop_that_forgets_beside_a_function_that_does_not_is_noticed() -> None:
    made = make()
    compiled(train, *made)()
    with pytest.raises(LossScaleError, match=FORGOTTEN):
        forget(*made)
    train(*made)
    with pytest.raises(LossScaleError, match=FORGOTTEN):
        forget(*made)


def test_a_second_function_on_replicas_that_forgets_is_noticed(two_cpus: Any) -> None:
    with two_cpus.scope():
        made = make()

    def on_both(function: Any) -> Any:
        return tf.function(lambda: two_cpus.run(function, args=made), autograph=False)

    on_both(train)()
    on_both(train)()
    with pytest.raises(LossScaleError, match=FORGOTTEN):
        on_both(forget)()


def test_a_function_within_a_function_that_forgets_is_noticed() -> None:
    made = make()
    compiled(compiled(train, *made))()
    with pytest.raises(LossScaleError, match=FORGOTTEN):
        compiled(compiled(forget, *made))()


def eager_scaling(variable: Any, optimizer: Any) -> None:
    apply = tf.function(lambda gradients: optimizer.apply(gradients, [variable]), autograph=False)
    for _ in range(3):
        apply(scaled_gradients(variable, optimizer))


def eager_applying(variable: Any, optimizer: Any) -> None:
    scale = compiled(scaled_gradients, variable, optimizer)
    for _ in range(3):
        optimizer.apply(scale(), [variable])


def two_functions(variable: Any, optimizer: Any) -> None:
    scale = compiled(scaled_gradients, variable, optimizer)
    apply = tf.function(lambda gradients: optimizer.apply(gradients, [variable]), autograph=False)
    for _ in range(3):
        apply(scale())


def two_functions_of_which_one_is_gone(variable: Any, optimizer: Any) -> None:
    gradients = compiled(scaled_gradients, variable, optimizer)()
    tf.function(lambda: optimizer.apply(gradients, [variable]), autograph=False)()


def scaling_inside_of_the_function(variable: Any, optimizer: Any) -> None:
    scale = compiled(scaled_gradients, variable, optimizer)
    for _ in range(2):  # two outer functions, of which the second finds the inner one traced
        compiled(lambda: optimizer.apply(scale(), [variable]))()


def applying_inside_of_the_function(variable: Any, optimizer: Any) -> None:
    apply = tf.function(lambda gradients: optimizer.apply(gradients, [variable]), autograph=False)
    for _ in range(2):
        compiled(lambda: apply(scaled_gradients(variable, optimizer)))()


def scaling_under_a_condition(variable: Any, optimizer: Any) -> None:
    def step(flag: Any) -> None:
        gradients = tf.cond(
            flag, lambda: scaled_gradients(variable, optimizer), lambda: scaled_gradients(variable, optimizer)
        )
        optimizer.apply(gradients, [variable])

    for flag in (True, False):
        tf.function(step, autograph=False)(tf.constant(flag))


def scaling_in_a_loop(variable: Any, optimizer: Any) -> None:
    def step() -> None:
        def body(index: Any, total: Any) -> Any:
            return index + 1, total + scaled_gradients(variable, optimizer)[0]

        _, total = tf.while_loop(lambda index, _: index < 2, body, (tf.constant(0), tf.zeros(2)))
        optimizer.apply([total / 2.0], [variable])

    compiled(step)()


def the_whole_step_in_a_loop(variable: Any, optimizer: Any) -> None:
    def body(index: Any) -> Any:
        train(variable, optimizer)
        return (index + 1,)

    compiled(lambda: tf.while_loop(lambda index: index < 3, body, (tf.constant(0),)))()


def two_updates_of_one_loss(variable: Any, optimizer: Any) -> None:
    def step() -> None:
        gradients = scaled_gradients(variable, optimizer)
        optimizer.apply(gradients, [variable])
        tf.cond(variable.value[0] < 1.0, lambda: optimizer.apply(gradients, [variable]), lambda: None)

    compiled(step)()


def a_window_that_is_left_open(variable: Any, optimizer: Any) -> None:
    """Scaled gradients stay in a variable until the third one, or until what is left is applied by another function."""
    total = tf.Variable(tf.zeros(2))
    count = tf.Variable(0)

    def update() -> None:
        optimizer.apply([total.read_value()], [variable])
        total.assign(tf.zeros(2))

    def step() -> None:
        total.assign_add(scaled_gradients(variable, optimizer)[0])
        tf.cond(tf.equal(count.assign_add(1) % 3, 0), update, lambda: None)

    run = compiled(step)
    for _ in range(4):
        run()
    compiled(update)()
    run()
    update()


def shapes_that_change(variable: Any, optimizer: Any) -> None:
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(x) * tf.reduce_sum(variable.value))
        optimizer.apply(tape.gradient(scaled, [variable.value]), [variable])

    for length in (1, 2, 3):
        step(tf.ones(length))


def a_step_that_failed_while_it_was_traced(variable: Any, optimizer: Any) -> None:
    def fails() -> None:
        scaled_gradients(variable, optimizer)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        compiled(fails)()
    compiled(train, variable, optimizer)()


def test_a_loop_that_forgets_after_one_that_does_not_is_noticed() -> None:
    made = make()
    the_whole_step_in_a_loop(*made)

    def body(index: Any) -> Any:
        forget(*made)
        return (index + 1,)

    with pytest.raises(LossScaleError, match=FORGOTTEN):
        compiled(lambda: tf.while_loop(lambda index: index < 3, body, (tf.constant(0),)))()


@pytest.mark.parametrize(
    "right",
    [
        eager_scaling,
        eager_applying,
        two_functions,
        two_functions_of_which_one_is_gone,
        scaling_inside_of_the_function,
        applying_inside_of_the_function,
        scaling_under_a_condition,
        scaling_in_a_loop,
        the_whole_step_in_a_loop,
        two_updates_of_one_loss,
        a_window_that_is_left_open,
        shapes_that_change,
        a_step_that_failed_while_it_was_traced,
    ],
)
@pytest.mark.parametrize(("accumulate_steps", "after_a_whole_step"), [(1, False), (2, True)])
def test_what_scales_is_left_alone(right: Any, accumulate_steps: int, after_a_whole_step: bool) -> None:
    variable, optimizer = make(accumulate_steps=accumulate_steps)
    if after_a_whole_step:
        compiled(train, variable, optimizer)()
    before, count = variable.numpy(), int(optimizer.iterations)
    right(variable, optimizer)
    if int(optimizer.iterations) > count:
        assert (variable.numpy() < before).all()
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_keras_fit_beside_a_loop_of_ones_own(jit_compile: bool) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=4.0))
    model.compile(optimizer, loss="mse", jit_compile=jit_compile, steps_per_execution=2)
    x, y = np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32)
    model.fit(x, y, batch_size=2, verbose=0)
    model.fit(x, y, batch_size=4, verbose=0)
    assert int(optimizer.iterations) == 6
    variables = model.trainable_variables

    def own(scale: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            loss = optimizer.scale_loss(loss) if scale else loss
        optimizer.apply(tape.gradient(loss, variables), variables)

    compiled(own, True)()
    with pytest.raises(LossScaleError, match=FORGOTTEN):
        compiled(own, False)()
