"""The engine of this Keras backend has the verbs of its protocol."""

from __future__ import annotations

import inspect

from polyamp_keras.engine import ENGINE, KerasEngine, StepEngine


def test_an_engine_has_the_verbs_of_its_protocol(backend: str) -> None:
    protocol = KerasEngine if backend == "tensorflow" else StepEngine
    for name, verb in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            given = list(inspect.signature(getattr(ENGINE, name)).parameters)
            assert given == list(inspect.signature(verb).parameters)[1:], name
