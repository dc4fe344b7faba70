"""What is refused before the first step: settings of an optimizer's members, optimizers of other models, `trainable`
that changes after init."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.conformance.problems import batch, loss_fn, recipe
from polyamp.errors import LossScaleError, ModelError, RecipeError, UnsupportedError
from polyamp_tensorflow import LossScaleOptimizer
from polyamp_tensorflow import compile as compile_model

SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 2}


def make_model() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(3, name="b")])


def by_map(**settings: Any) -> Any:
    """An optimizer of two, the second one with these settings."""
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*bias": keras.optimizers.SGD(0.1, **settings)})
    )


def by_function(**settings: Any) -> Any:
    """The same; its members are known once it is built."""
    weights, biases = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, **settings)
    return keras.optimizers.MultiOptimizer(lambda variable: biases if "bias" in variable.path else weights)


def built(optimizer: Any, model: Any, **options: Any) -> LossScaleOptimizer:
    wrapped = LossScaleOptimizer(optimizer, **options)
    wrapped.build(model.trainable_variables)
    return wrapped


@pytest.mark.parametrize("make", [by_map, by_function])
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_members_setting_that_would_act_twice_is_refused_in_a_recipe(setting: str, make: Any) -> None:
    value = SETTINGS[setting]
    message = rf"SGD\({setting}={value}\) would act before polyamp's finite check"
    with pytest.raises(RecipeError, match=message):
        polyamp.init(make_model(), recipe(optimizer=make(**{setting: value})))
    model = make_model()
    with pytest.raises(RecipeError, match=message):
        compile_model(model, recipe("mixed_bfloat16", optimizer=make(**{setting: value})), loss="mse")
    assert [layer.compute_dtype for layer in model.layers] == ["float32", "float32"]
    assert not model.compiled


@pytest.mark.parametrize("make", [by_map, by_function])
def test_two_clips_by_the_global_norm_are_refused_in_a_recipe(make: Any) -> None:
    message = r"SGD\(global_clipnorm=1.0\) and clip_norm=0.5 both clip"
    clipped = recipe(optimizer=make(global_clipnorm=1.0), clip_norm=0.5)
    with pytest.raises(RecipeError, match=message):
        polyamp.init(make_model(), clipped)
    with pytest.raises(RecipeError, match=message):
        compile_model(make_model(), clipped.replace(optimizer=make(global_clipnorm=1.0)), loss="mse")


@pytest.mark.parametrize("make", [by_map, by_function])
def test_a_members_setting_that_would_act_twice_is_refused_in_a_loss_scale_optimizer(make: Any) -> None:
    with pytest.raises(RecipeError, match=r"SGD\(gradient_accumulation_steps=2\) would count micro-batches"):
        built(make(gradient_accumulation_steps=2), make_model())
    with pytest.raises(RecipeError, match=r"SGD\(global_clipnorm=1.0\) and clip_norm=0.5 both clip"):
        built(make(global_clipnorm=1.0), make_model(), clip_norm=0.5)
    assert built(make(clipnorm=1.0), make_model(), clip_norm=0.5).built


def test_a_setting_that_came_after_the_constructor_is_refused() -> None:
    inner = keras.optimizers.SGD(0.1)
    optimizer = LossScaleOptimizer(inner)
    inner.gradient_accumulation_steps = 2
    with pytest.raises(RecipeError, match=r"SGD\(gradient_accumulation_steps=2\)"):
        optimizer.build(make_model().trainable_variables)


@pytest.mark.parametrize("member", [False, True])
@pytest.mark.parametrize("how", ["init", "compile", "LossScaleOptimizer"])
def test_an_optimizer_of_another_model_is_refused_and_nothing_has_changed(how: str, member: bool) -> None:
    used = keras.optimizers.SGD(0.1)
    used.build(make_model().trainable_variables)
    optimizer = used
    if member:
        optimizer = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.1), {".*bias": used})
        )
    model = make_model()
    made = recipe("mixed_bfloat16", optimizer=optimizer)
    entrance = {
        "init": lambda: polyamp.init(model, made),
        "compile": lambda: compile_model(model, made, loss="mse"),
        "LossScaleOptimizer": lambda: built(optimizer, model),
    }[how]
    with pytest.raises(RecipeError, match="this SGD is already built for other variables: another model's"):
        entrance()
    assert [layer.compute_dtype for layer in model.layers] == ["float32", "float32"]
    assert not model.compiled
    assert optimizer.built is not member


def test_an_optimizer_that_is_chosen_for_other_variables_of_the_same_model_is_refused() -> None:
    model = make_model()
    used = keras.optimizers.SGD(0.1)
    used.build(model.layers[0].trainable_variables)
    multi = keras.optimizers.MultiOptimizer(lambda variable: used)
    with pytest.raises(RecipeError, match="this MultiOptimizer is already built for other variables"):
        built(multi, model)


def test_a_loss_scale_optimizer_of_another_model_is_refused() -> None:
    model = make_model()
    optimizer = built(keras.optimizers.SGD(0.1), model)
    with pytest.raises(RecipeError, match="this LossScaleOptimizer is already built for other variables"):
        optimizer.build(make_model().trainable_variables)
    optimizer.build(model.trainable_variables)
    compile_model(model, recipe(optimizer=optimizer.inner_optimizer), loss="mse")
    compile_model(model, recipe(optimizer=optimizer.inner_optimizer), loss="mse")
    assert model.optimizer.inner_optimizer is optimizer.inner_optimizer


def on_replicas(strategy: Any, optimizer: Callable[[], Any], *, inside: bool = True) -> None:
    if inside:
        with strategy.scope():
            polyamp.init(make_model(), recipe(optimizer=optimizer()))
    else:
        native = optimizer()
        with strategy.scope():
            polyamp.init(make_model(), recipe(optimizer=native))


def test_init_refuses_an_optimizer_that_cannot_work_on_replicas(two_cpus: Any) -> None:
    settings: dict[str, Any] = {"use_ema": True, "ema_overwrite_frequency": 2}
    makers: list[Callable[[], Any]] = [
        lambda: keras.optimizers.SGD(0.1, **settings),
        lambda: by_map(**settings),
        lambda: by_function(**settings),
    ]
    for make in makers:
        with pytest.raises(UnsupportedError, match=r"ema_overwrite_frequency=.*fails on several replicas"):
            on_replicas(two_cpus, make)
    with pytest.raises(LossScaleError, match=r"created outside of strategy\.scope\(\)"):
        on_replicas(two_cpus, lambda: keras.optimizers.SGD(0.1), inside=False)
    on_replicas(two_cpus, lambda: keras.optimizers.SGD(0.1, use_ema=True))


def refusal(then: Callable[[Any], None], *, frozen: bool = False) -> str:
    """What the three entrances say after a change of the model; nothing of it has moved."""
    model = make_model()
    model.layers[0].trainable = not frozen
    made = recipe()
    state = polyamp.init(model, made)
    step = polyamp.train_step(loss_fn, made)
    value_and_grad = polyamp.value_and_grad(loss_fn)
    step(state, batch())
    _, gradients = value_and_grad(state, batch())
    then(model)
    before = state.export()
    messages = set()
    calls: list[Callable[[], Any]] = [
        lambda: step(state, batch()),
        lambda: value_and_grad(state, batch()),
        lambda: polyamp.apply_gradients(state, gradients),
    ]
    for call in calls:
        with pytest.raises(ModelError) as caught:
            call()
        messages.add(str(caught.value))
    assert all(np.array_equal(value, before[name]) for name, value in state.export().items())
    (message,) = messages
    return message


def freeze_layer(model: Any) -> None:
    model.layers[0].trainable = False


def freeze_variable(model: Any) -> None:
    model.layers[0].kernel.trainable = False


def freeze_all(model: Any) -> None:
    model.trainable = False


@pytest.mark.parametrize("then", [freeze_layer, freeze_variable, freeze_all])
def test_a_layer_that_was_frozen_after_init_is_refused(then: Callable[[Any], None]) -> None:
    assert refusal(then) == (
        "parameter 'a/kernel' was frozen after init. To train the others, state = polyamp.refresh(state): what stayed "
        "keeps its optimizer state. Or set trainable back."
    )


def test_a_layer_that_was_unfrozen_after_init_is_refused() -> None:
    def unfreeze(model: Any) -> None:
        model.layers[0].trainable = True

    assert refusal(unfreeze, frozen=True) == (
        "parameter 'a/kernel' was unfrozen after init, so no optimizer holds it. To train it too, state = "
        "polyamp.refresh(state): what stayed keeps its optimizer state. Or set trainable back."
    )


def test_a_frozen_layer_that_is_frozen_and_thawed_in_between_is_no_change() -> None:
    model = make_model()
    made = recipe()
    state = polyamp.init(model, made)
    step = polyamp.train_step(loss_fn, made)
    model.layers[0].trainable = False
    model.layers[0].trainable = True
    _, result = step(state, batch())
    assert int(result.step) == 1


def test_a_model_that_is_built_at_the_first_step_may_be_frozen_until_then() -> None:
    model = keras.Sequential([keras.layers.Dense(8, name="a"), keras.layers.Dense(3, name="b")])
    made = recipe()
    state = polyamp.init(model, made)
    model.layers[0].trainable = False
    step = polyamp.train_step(loss_fn, made)
    step(state, batch())
    assert list(state.variables.parameters) == ["b/kernel", "b/bias"]
    model.layers[0].trainable = True
    with pytest.raises(ModelError, match="'a/kernel' was unfrozen after init"):
        step(state, batch())


def test_variables_without_keras_have_no_flag_to_change() -> None:
    class Line(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
        def __init__(self) -> None:
            super().__init__()
            self.slope = tf.Variable(tf.ones((4, 3)))

        def __call__(self, x: Any) -> Any:
            return x @ self.slope

    made = recipe()
    state = polyamp.init(Line(), made)
    _, result = polyamp.train_step(loss_fn, made)(state, batch())
    assert int(result.step) == 1
