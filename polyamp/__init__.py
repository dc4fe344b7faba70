"""polyamp: one `Policy` / `LossScaler` API for mixed-precision training in PyTorch, TensorFlow and JAX.

Importing it imports no framework. Heavy modules are imported at their first use. Docstrings and messages cite rules by
their numbers, such as S12; the command `polyamp rules S12` prints the rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp._version import __version__

if TYPE_CHECKING:
    from polyamp import losses, parity, porting, schedules
    from polyamp.contract.backend import Backend, BackendInfo, State
    from polyamp.contract.casting_report import CastingReport
    from polyamp.contract.explain import explain
    from polyamp.contract.registry import BackendStatus, backends
    from polyamp.diagnosis.diagnose import diagnose
    from polyamp.doctor.capabilities import capabilities
    from polyamp.doctor.device_capabilities import Capabilities
    from polyamp.doctor.float8_plan import float8_plan
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
    from polyamp.linter.lint import lint
    from polyamp.monitor.monitor import Monitor
    from polyamp.nonfinite.find_nonfinite import find_nonfinite
    from polyamp.nonfinite.replay import replay
    from polyamp.parity.compare import compare
    from polyamp.porting.port import port
    from polyamp.recipe import optimizers
    from polyamp.recipe.dialects.dialect_report import DialectReport, dialect_report
    from polyamp.recipe.ema import Ema
    from polyamp.recipe.float8 import Float8
    from polyamp.recipe.groups import Group, no_decay
    from polyamp.recipe.optimizers import *  # noqa: F403  # every optimizer
    from polyamp.recipe.policy import Policy
    from polyamp.recipe.recipe import Recipe
    from polyamp.recipe.scaler import LossScaler, LossScaleState
    from polyamp.results import Gradients, StepResult
    from polyamp.train.averages import averaged, averaged_model
    from polyamp.train.checkpoint import load_extra, restore, save
    from polyamp.train.refresh import refresh
    from polyamp.train.step import apply_gradients, init, train_step, value_and_grad
    from polyamp.train.trainable_parameters import parameters

_MODULES = (
    *("losses", "parity", "porting", "schedules"),
    *("backend_lookup", "framework_detection"),
    *("contract", "errors", "recipe", "records", "results", "rules", "train", "trees"),
)
"""Modules that are attributes of the package without an explicit import: the public ones, and those that user code
reaches as `polyamp.errors.PolicyError`. Those of the second row the library imports so itself."""
_EXPORTS = {
    "contract.backend": ("Backend", "BackendInfo", "State"),
    "contract.explain": ("explain",),
    "contract.registry": ("BackendStatus", "backends"),
    "contract.casting_report": ("CastingReport",),
    "diagnosis.diagnose": ("diagnose",),
    "doctor.capabilities": ("capabilities",),
    "doctor.device_capabilities": ("Capabilities",),
    "doctor.float8_plan": ("float8_plan",),
    "errors": (
        *("ArgumentError", "BackendError", "BackendNotInstalledError", "BatchError", "CheckpointError"),
        *("GradientError", "LossError", "LossScaleError", "LossScaleStuckError", "ModelError", "PolicyError"),
        *("PolyampError", "PortError", "RecipeError", "ReplicaError", "StateError", "TraceError", "UnsupportedError"),
    ),
    "linter.lint": ("lint",),
    "monitor.monitor": ("Monitor",),
    "nonfinite.find_nonfinite": ("find_nonfinite",),
    "nonfinite.replay": ("replay",),
    "parity.compare": ("compare",),
    "porting.port": ("port",),
    "recipe.dialects.dialect_report": ("DialectReport", "dialect_report"),
    "recipe.ema": ("Ema",),
    "recipe.float8": ("Float8",),
    "recipe.groups": ("Group", "no_decay"),
    "recipe.policy": ("Policy",),
    "recipe.recipe": ("Recipe",),
    "recipe.scaler": ("LossScaleState", "LossScaler"),
    "results": ("Gradients", "StepResult"),
    "train.averages": ("averaged", "averaged_model"),
    "train.checkpoint": ("load_extra", "restore", "save"),
    "train.trainable_parameters": ("parameters",),
    "train.refresh": ("refresh",),
    "train.step": ("apply_gradients", "init", "train_step", "value_and_grad"),
}
"""Submodule -> its public names. A name is imported at its first use: polyamp provides plugins, so pytest imports this
package in every session of an environment that contains it."""

_OTHER_HINTS = {
    "GradScaler": "polyamp_torch.GradScaler takes the place of torch.amp.GradScaler. polyamp.LossScaler describes how "
    "the loss is scaled, in every framework.",
    "LossScaleOptimizer": "polyamp_tensorflow.LossScaleOptimizer takes the place of Keras's.",
    "apply_policy": "polyamp_tensorflow.apply_policy(model, policy) puts a policy on a built Keras model.",
    "compile": "polyamp_tensorflow.compile(model, recipe, loss=...) prepares a Keras model for fit. In torch and JAX "
    "polyamp.train_step(loss_fn, recipe) makes the step. Its option compile=True compiles it in torch; JAX compiles it "
    "by itself.",
    "autocast": "policy.autocast(fn_or_model) runs a function or a model under a policy in every framework, and "
    "polyamp_torch.autocast takes the place of torch.autocast.",
    "scaled_value_and_grad": "polyamp_jax.scaled_value_and_grad(fun, scaler) takes the place of jax.value_and_grad.",
}
"""Name that users look for here -> its location in the package of one framework."""

__all__ = [
    "ArgumentError",
    "Backend",
    "BackendError",
    "BackendInfo",
    "BackendNotInstalledError",
    "BackendStatus",
    "BatchError",
    "Capabilities",
    "CastingReport",
    "CheckpointError",
    "DialectReport",
    "Ema",
    "Float8",
    "GradientError",
    "Gradients",
    "Group",
    "LossError",
    "LossScaleError",
    "LossScaleState",
    "LossScaleStuckError",
    "LossScaler",
    "ModelError",
    "Monitor",
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
    "apply_gradients",
    "averaged",
    "averaged_model",
    "backends",
    "capabilities",
    "compare",
    "diagnose",
    "dialect_report",
    "explain",
    "find_nonfinite",
    "float8_plan",
    "init",
    "lint",
    "load_extra",
    "losses",
    "no_decay",
    "parameters",
    "parity",
    "port",
    "porting",
    "refresh",
    "replay",
    "restore",
    "save",
    "schedules",
    "train_step",
    "value_and_grad",
]
_NAMES: list[str]
if TYPE_CHECKING:
    __all__ += optimizers.__all__
else:
    _NAMES = __all__
    del __all__  # `__getattr__` adds the optimizers, whose names stand in `recipe.optimizers` alone


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return names


def __getattr__(name: str) -> Any:
    from importlib import import_module

    value: Any
    home = next((home for home, names in _EXPORTS.items() if name in names), None)
    if name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    elif home is not None:
        value = getattr(import_module(f"{__name__}.{home}"), name)
    elif name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'polyamp' has no attribute {name!r}.")
    else:
        specs = vars(import_module(f"{__name__}.recipe.optimizers"))
        if name == "__all__":
            value = sorted([*_NAMES, *specs["__all__"]])
        elif name in specs["__all__"]:
            value = specs[name]
        else:
            raise AttributeError(f"module 'polyamp' has no attribute {name!r}.{_suggest_name(name)}")
    globals()[name] = value
    return value


def _suggest_name(name: str) -> str:
    from polyamp.errors import did_you_mean

    if name in _OTHER_HINTS:
        return f" It is a framework's own object: {_OTHER_HINTS[name]}"
    return did_you_mean(name, __dir__())
