"""polyamp: one `Policy` / `LossScaler` API for mixed-precision training in PyTorch, TensorFlow and JAX.

Importing it imports no framework. What is heavy is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp import lookup
from polyamp._version import __version__

if TYPE_CHECKING:
    from types import ModuleType

    from polyamp import losses, parity, porting, schedules
    from polyamp.contract.backend import Backend, BackendInfo, State
    from polyamp.contract.registry import BackendStatus, backends, explain
    from polyamp.contract.report import CastingReport
    from polyamp.errors import (
        ArgumentError,
        BackendError,
        BackendNotInstalledError,
        BatchError,
        CheckpointError,
        GradientError,
        LossError,
        LossScaleError,
        LossScaleStuckError,
        ModelError,
        PolicyError,
        PolyampError,
        PortError,
        RecipeError,
        ReplicaError,
        StateError,
        TraceError,
        UnsupportedError,
    )
    from polyamp.parity.compare import compare
    from polyamp.porting.port import port
    from polyamp.recipe.groups import Group, no_decay
    from polyamp.recipe.optimizers import adagrad, adam, adamw, lion, rmsprop, sgd
    from polyamp.recipe.policy import Policy
    from polyamp.recipe.recipe import Recipe
    from polyamp.recipe.scaler import LossScaler
    from polyamp.results import Gradients, StepResult
    from polyamp.rules.scale import LossScaleState
    from polyamp.train.checkpoint import restore, save
    from polyamp.train.parameters import parameters
    from polyamp.train.refresh import refresh
    from polyamp.train.step import apply_gradients, init, train_step, value_and_grad

_MODULES = (
    *("losses", "parity", "porting", "schedules"),
    *("arrays", "contract", "dtypes", "errors", "recipe", "records", "results", "rules", "train", "trees"),
)
"""Modules that are here as attributes without an import of their own: the public ones, and what some code reaches as
`polyamp.errors.PolicyError`."""
_HOMES = {
    "contract.backend": ("Backend", "BackendInfo", "State"),
    "contract.registry": ("BackendStatus", "backends", "explain"),
    "contract.report": ("CastingReport",),
    "errors": (
        *("ArgumentError", "BackendError", "BackendNotInstalledError", "BatchError", "CheckpointError"),
        *("GradientError", "LossError", "LossScaleError", "LossScaleStuckError", "ModelError", "PolicyError"),
        *("PolyampError", "PortError", "RecipeError", "ReplicaError", "StateError", "TraceError", "UnsupportedError"),
    ),
    "parity.compare": ("compare",),
    "porting.port": ("port",),
    "recipe.groups": ("Group", "no_decay"),
    "recipe.optimizers": ("adagrad", "adam", "adamw", "lion", "rmsprop", "sgd"),
    "recipe.policy": ("Policy",),
    "recipe.recipe": ("Recipe",),
    "recipe.scaler": ("LossScaler",),
    "results": ("Gradients", "StepResult"),
    "rules.scale": ("LossScaleState",),
    "train.checkpoint": ("restore", "save"),
    "train.parameters": ("parameters",),
    "train.refresh": ("refresh",),
    "train.step": ("apply_gradients", "init", "train_step", "value_and_grad"),
}
"""Module below this package -> the public names that it holds. A name is imported when it is first asked for: pytest
imports this package in every session of an environment that has it, because polyamp brings plugins."""

_ELSEWHERE = {
    "GradScaler": "polyamp_torch.GradScaler takes the place of torch.amp.GradScaler. polyamp.LossScaler describes how "
    "the loss is scaled, in every framework.",
    "LossScaleOptimizer": "polyamp_tensorflow.LossScaleOptimizer takes the place of Keras's.",
    "apply_policy": "polyamp_tensorflow.apply_policy(model, policy) puts a policy on a built Keras model.",
    "autocast": "policy.autocast(fn_or_model) runs a function or a model under a policy in every framework, and "
    "polyamp_torch.autocast takes the place of torch.autocast.",
    "scaled_value_and_grad": "polyamp_jax.scaled_value_and_grad(fun, scaler) takes the place of jax.value_and_grad.",
}
"""What people look for here -> where it is: a name of one framework stands in that framework's package."""

__all__ = [
    "ArgumentError",
    "Backend",
    "BackendError",
    "BackendInfo",
    "BackendNotInstalledError",
    "BackendStatus",
    "BatchError",
    "CastingReport",
    "CheckpointError",
    "GradientError",
    "Gradients",
    "Group",
    "LossError",
    "LossScaleError",
    "LossScaleState",
    "LossScaleStuckError",
    "LossScaler",
    "ModelError",
    "Policy",
    "PolicyError",
    "PolyampError",
    "PortError",
    "Recipe",
    "RecipeError",
    "ReplicaError",
    "State",
    "StateError",
    "StepResult",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "adagrad",
    "adam",
    "adamw",
    "apply_gradients",
    "backends",
    "compare",
    "explain",
    "init",
    "lion",
    "losses",
    "no_decay",
    "parameters",
    "parity",
    "port",
    "porting",
    "refresh",
    "restore",
    "rmsprop",
    "save",
    "schedules",
    "sgd",
    "train_step",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    from importlib import import_module

    value: Any
    if name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'polyamp' has no attribute {name!r}.{_meant(name)}")
        value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def _registry() -> ModuleType:
    from polyamp.contract import registry

    return registry


def _meant(name: str) -> str:
    from polyamp.errors import did_you_mean

    if name.startswith("__"):
        return ""
    if name in _ELSEWHERE:
        return f" It is a framework's own object: {_ELSEWHERE[name]}"
    return did_you_mean(name, __all__)


lookup.offer(_registry)
