"""`dir` of the package and of a state: what users need, and no internals; the loss of `compile` as Keras takes it."""

from __future__ import annotations

import pydoc
import re

import keras

import polyamp
import polyamp_tensorflow

COMMON = ["backend", "groups", "model", "recipe", "scale_state", "step"]


def test_the_packages_names_are_its_public_ones() -> None:
    assert dir(polyamp_tensorflow) == sorted(polyamp_tensorflow.__all__)


def test_a_states_names_are_what_users_need() -> None:
    state = polyamp.init(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    )
    shown = [name for name in dir(state) if not name.startswith("__")]
    assert shown == sorted([*COMMON, "averages", "optimizer", "plan", "strategy", "variables"])
    assert all(hasattr(state, name) for name in shown)
    listed = set(re.findall(r"^ \|  (\w+)(?:\(| =|$)", pydoc.plain(pydoc.render_doc(state)), re.MULTILINE))
    internals = {name for name in type.__dir__(type(state)) if not name.startswith("_")} - set(shown)
    assert listed & internals == set(), "help lists internals"
    assert internals, "there is something to hide"


def test_compile_takes_the_loss_by_place_as_keras_does() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    polyamp_tensorflow.compile(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)), "mae")
    history = model.fit(keras.ops.zeros((4, 2)), keras.ops.ones((4, 1)), verbose=0)
    assert model.loss == "mae"
    assert history.history["loss"] == [1.0]
