"""Models and their training state move to another framework, and nothing is lost on the way.

`polyamp.port(source, target)` does it whole. Here are its parts: a model in the canonical layout (`export`, `load`),
its file (`save`, `open`), a training state in the canonical layout (`training_state`), a model that is trained without
polyamp (`training`), and the way to teach it a layer of your own (`register`, with `Form`, `Rule`, `same` and
`operations`).
"""

from __future__ import annotations

from polyamp.porting import operations
from polyamp.porting.canonical import Canonical, Layer
from polyamp.porting.check import Batch
from polyamp.porting.convert import save
from polyamp.porting.files import open  # noqa: A004  # the name that users call
from polyamp.porting.forms import Form, Rule, same
from polyamp.porting.lazy import Lazy
from polyamp.porting.port import load
from polyamp.porting.register import register
from polyamp.porting.report import PortReport
from polyamp.porting.side import export
from polyamp.porting.state_canonical import TrainingState
from polyamp.porting.state_sides import Training, training
from polyamp.porting.states import StateReport, training_state

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
