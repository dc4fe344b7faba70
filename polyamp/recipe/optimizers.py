"""Optimizer specs with PyTorch's defaults and formulas (S21): one class each in `optimizer_formulas`.

`polyamp.recipe.optimizer_spec` describes what a spec consists of; docs/guides/add_an_optimizer.md adds one.
"""

from __future__ import annotations

from typing import Any

from polyamp.recipe.optimizer_formulas.adafactor import Adafactor
from polyamp.recipe.optimizer_formulas.adagrad import Adagrad
from polyamp.recipe.optimizer_formulas.adam import Adam, AdamW
from polyamp.recipe.optimizer_formulas.lamb import Lamb
from polyamp.recipe.optimizer_formulas.lion import Lion
from polyamp.recipe.optimizer_formulas.muon import Muon
from polyamp.recipe.optimizer_formulas.nadam import NAdam, NAdamW
from polyamp.recipe.optimizer_formulas.rmsprop import RMSprop
from polyamp.recipe.optimizer_formulas.schedule_free import ScheduleFreeAdamW
from polyamp.recipe.optimizer_formulas.sgd import SGD
from polyamp.recipe.optimizer_spec import Spec

__all__ = [
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "nadamw",
    "rmsprop",
    "schedule_free",
    "sgd",
]

OptimizerSpec = (
    SGD | Adam | AdamW | RMSprop | Adagrad | Lion | NAdam | NAdamW | Lamb | Adafactor | Muon | ScheduleFreeAdamW
)
"""Any optimizer spec; in a recipe file a table with `type = "adamw"` etc."""
SPECS: tuple[type[OptimizerSpec], ...] = (
    SGD,
    Adam,
    AdamW,
    RMSprop,
    Adagrad,
    Lion,
    NAdam,
    NAdamW,
    Lamb,
    Adafactor,
    Muon,
    ScheduleFreeAdamW,
)

sgd = SGD
adam = Adam
adamw = AdamW
rmsprop = RMSprop
adagrad = Adagrad
lion = Lion
nadam = NAdam
nadamw = NAdamW
lamb = Lamb
adafactor = Adafactor
muon = Muon
schedule_free = ScheduleFreeAdamW


def is_spec(value: Any) -> bool:
    """Return True for a polyamp spec, False for a framework's own optimizer."""
    return isinstance(value, Spec)
