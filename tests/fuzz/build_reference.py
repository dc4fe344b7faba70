"""A description as the NumPy reference's MLP, where it is one. Called by the worker."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

import polyamp
from polyamp.reference import MLP
from tests.fuzz.grammar import Description
from tests.fuzz.problem import Weights

_BODY: Final = re.compile(r"((^| )dense( batch_norm)? relu)*")


class Net(MLP):
    """An MLP that returns a list of one output, as the others do."""

    def with_arrays(self, parameters: Any, running: Any) -> Net:
        """The same network around other arrays."""
        return Net(parameters, running, self.observe)

    def __call__(self, x: Any, plan: Any = None) -> Any:
        """A list of one output per head."""
        return [super().__call__(x, plan)]

    def _dense(self, path: str, h: Any, plan: Any) -> Any:
        if f"{path}/bias" in self.parameters:
            return super()._dense(path, h, plan)
        zeros = np.zeros(self.parameters[f"{path}/kernel"].shape[1], np.float32)  # a constant, not a parameter
        return MLP({**self.parameters, f"{path}/bias": zeros}, self.running)._dense(path, h, plan)


def can(description: Description) -> bool:
    """Whether the reference has such a network; its modules have names of its own, so overrides do not fit.

    Its MLP has a relu after every layer but the last, which a description that was made smaller may lack."""
    if description["kind"] != "mlp" or description["policy"].get("overrides"):
        return False
    return _BODY.fullmatch(" ".join(layer["op"] for layer in description["layers"])) is not None


def _names(description: Description) -> dict[str, str]:
    """The description's name of each layer -> the reference's."""
    found: dict[str, str] = {}
    number = 0
    for layer in [*description["layers"], *description["heads"]]:
        op = layer.get("op", "dense")
        if op == "dense":
            found[layer["name"]] = f"dense{number}"
            number += 1
        elif op == "batch_norm":
            found[layer["name"]] = f"norm{number - 1}"
    return found


def build(description: Description, weights: Weights) -> Net:
    """The network with these weights."""
    parameters: Weights = {}
    running: Weights = {}
    names = _names(description)
    for path, value in weights.items():
        name, _, array = path.partition("/")
        where = running if array in ("mean", "variance") else parameters
        where[f"{names[name]}/{array}"] = np.array(value)
    return Net(parameters, running)


def running(state: Any, description: Description, updates: int) -> Weights:
    """Running statistics by the description's names."""
    return _renamed(state.model.running, description)


def parameters(state: Any, description: Description) -> Weights:
    """The parameters by the description's names."""
    return _renamed(state.model.parameters, description)


def averages(state: Any, description: Description) -> Weights:
    """The averages of the parameters, likewise."""
    return _renamed(polyamp.averaged_model(state).parameters, description)


def _renamed(arrays: Weights, description: Description) -> Weights:
    back = {own: name for name, own in _names(description).items()}
    return {f"{back[path.partition('/')[0]]}/{path.partition('/')[2]}": value for path, value in arrays.items()}
