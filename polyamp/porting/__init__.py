"""Transfer of models and their training state to other frameworks without loss.

`polyamp.port(source, target)` does the whole transfer. This package has its parts:

- `export`, `load`: a model in the canonical layout.
- `save`, `open`: the file of such a model.
- `training_state`: a training state in the canonical layout.
- `training`: a model that is trained without polyamp.
- `register`, with `Form`, `Rule`, `same` and `operations`: support for a custom layer.
"""

from __future__ import annotations

from polyamp.porting.check import Batch
from polyamp.porting.convert import save
from polyamp.porting.files.canonical_file import open  # noqa: A004  # public name
from polyamp.porting.layouts import operations
from polyamp.porting.layouts.canonical_model import Canonical, Layer
from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.layer_registration import register
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.model_side import export
from polyamp.porting.port import load
from polyamp.porting.port_report import PortReport
from polyamp.porting.states.port_state import StateReport, training_state
from polyamp.porting.states.training_side import Training, training
from polyamp.porting.states.training_state import TrainingState

__all__ = [
    "Batch",
    "Canonical",
    "Form",
    "Layer",
    "Lazy",
    "PortReport",
    "Rule",
    "StateReport",
    "Training",
    "TrainingState",
    "export",
    "load",
    "open",
    "operations",
    "register",
    "same",
    "save",
    "training",
    "training_state",
]


def __dir__() -> list[str]:
    return __all__
