"""Models and their training state move to another framework, and nothing is lost on the way.

`polyamp.port(source, target)` does it whole. Here are its parts: a model in the canonical layout (`export`, `load`),
its file (`save`, `open`), a training state in the canonical layout (`training_state`), a model that is trained without
polyamp (`training`), and the way to teach it a layer of your own (`register`, with `Form`, `Rule`, `same` and
`operations`).
"""

from __future__ import annotations

from polyamp.porting.check import Batch
from polyamp.porting.convert import save
from polyamp.porting.files.files import open  # noqa: A004  # the name that users call
from polyamp.porting.layouts import operations
from polyamp.porting.layouts.canonical import Canonical, Layer
from polyamp.porting.layouts.forms import Form, Rule, same
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.layouts.register import register
from polyamp.porting.port import load
from polyamp.porting.report import PortReport
from polyamp.porting.side import export
from polyamp.porting.states.canonical import TrainingState
from polyamp.porting.states.port_state import StateReport, training_state
from polyamp.porting.states.sides import Training, training

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
