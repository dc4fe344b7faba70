"""Optimizer specs with PyTorch's defaults and formulas (S21): one class each in `optimizer_formulas`.

`polyamp.recipe.optimizer_spec` describes what a spec consists of; docs/guides/add_an_optimizer.md adds one.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from polyamp.recipe.optimizer_formulas.adafactor import adafactor
from polyamp.recipe.optimizer_formulas.adagrad import adagrad
from polyamp.recipe.optimizer_formulas.adam import adam, adamw
from polyamp.recipe.optimizer_formulas.lamb import lamb
from polyamp.recipe.optimizer_formulas.lion import lion
from polyamp.recipe.optimizer_formulas.muon import muon
from polyamp.recipe.optimizer_formulas.nadam import nadam, nadamw
from polyamp.recipe.optimizer_formulas.rmsprop import rmsprop
from polyamp.recipe.optimizer_formulas.schedule_free import schedule_free
from polyamp.recipe.optimizer_formulas.sgd import sgd
from polyamp.recipe.optimizer_spec import Spec

__all__ = [  # noqa: RUF022  # the order of `SPECS`, in which messages and pages list them
    "sgd",
    "adam",
    "adamw",
    "rmsprop",
    "adagrad",
    "lion",
    "nadam",
    "nadamw",
    "lamb",
    "adafactor",
    "muon",
    "schedule_free",
]

SPECS: tuple[type[Spec], ...] = tuple(globals()[name] for name in __all__)

if TYPE_CHECKING:
    OptimizerSpec = Spec
else:
    OptimizerSpec = functools.reduce(operator.or_, SPECS)
    """Any optimizer spec; in a recipe file a table with `type = "adamw"` etc."""


def is_spec(value: Any) -> bool:
    """Return True for a polyamp spec, False for a framework's own optimizer."""
    return isinstance(value, Spec)
