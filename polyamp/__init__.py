"""polyamp: one `Policy` / `LossScaler` API for mixed-precision training in PyTorch, TensorFlow and JAX.

Importing it imports no framework. What is heavy is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp import schedules
from polyamp._version import __version__
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
    StateError,
    TraceError,
    UnsupportedError,
)
from polyamp.recipe.groups import Group, no_decay
from polyamp.recipe.optimizers import adagrad, adam, adamw, lion, rmsprop, sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, StepResult
from polyamp.rules.scale import LossScaleState
from polyamp.train.step import apply_gradients, init, train_step, value_and_grad

if TYPE_CHECKING:
    from polyamp import losses, parity, porting
    from polyamp.parity.compare import compare
    from polyamp.porting.port import port
    from polyamp.train.checkpoint import restore, save
    from polyamp.train.parameters import parameters
    from polyamp.train.refresh import refresh

_LAZY = {
    "compare": ("polyamp.parity.compare", "compare"),
    "losses": ("polyamp.losses", None),
    "parameters": ("polyamp.train.parameters", "parameters"),
    "parity": ("polyamp.parity", None),
    "port": ("polyamp.porting.port", "port"),
    "porting": ("polyamp.porting", None),
    "refresh": ("polyamp.train.refresh", "refresh"),
    "restore": ("polyamp.train.checkpoint", "restore"),
    "save": ("polyamp.train.checkpoint", "save"),
}

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
    if name not in _LAZY:
        raise AttributeError(f"module 'polyamp' has no attribute {name!r}.{_meant(name)}")
    import importlib

    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def _meant(name: str) -> str:
    from polyamp.errors import did_you_mean

    if name.startswith("__"):
        return ""
    if name in _ELSEWHERE:
        return f" It is a framework's own object: {_ELSEWHERE[name]}"
    return did_you_mean(name, __all__)
