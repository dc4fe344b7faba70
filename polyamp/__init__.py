"""polyamp: one `Policy` / `LossScaler` API for mixed-precision training in PyTorch, TensorFlow and JAX.

Importing it imports no framework. Heavy modules are imported at their first use. Docstrings and messages cite rules by
their numbers, such as S12; the command `polyamp rules S12` prints the rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp._version import __version__ as __version__

if TYPE_CHECKING:
    from polyamp import losses as losses
    from polyamp import parity as parity
    from polyamp import porting as porting
    from polyamp import schedules as schedules
    from polyamp.contract.backend import Backend as Backend
    from polyamp.contract.backend import BackendInfo as BackendInfo
    from polyamp.contract.backend import State as State
    from polyamp.contract.casting_report import CastingReport as CastingReport
    from polyamp.contract.explain import explain as explain
    from polyamp.contract.registry import BackendStatus as BackendStatus
    from polyamp.contract.registry import backends as backends
    from polyamp.diagnosis.diagnose import diagnose as diagnose
    from polyamp.doctor.capabilities import capabilities as capabilities
    from polyamp.doctor.device_capabilities import Capabilities as Capabilities
    from polyamp.doctor.float8_plan import float8_plan as float8_plan
    from polyamp.errors import ArgumentError as ArgumentError
    from polyamp.errors import BackendError as BackendError
    from polyamp.errors import BackendNotInstalledError as BackendNotInstalledError
    from polyamp.errors import BatchError as BatchError
    from polyamp.errors import CheckpointError as CheckpointError
    from polyamp.errors import GradientError as GradientError
    from polyamp.errors import LossError as LossError
    from polyamp.errors import LossScaleError as LossScaleError
    from polyamp.errors import LossScaleStuckError as LossScaleStuckError
    from polyamp.errors import ModelError as ModelError
    from polyamp.errors import PolicyError as PolicyError
    from polyamp.errors import PolyampError as PolyampError
    from polyamp.errors import PortError as PortError
    from polyamp.errors import RecipeError as RecipeError
    from polyamp.errors import ReplicaError as ReplicaError
    from polyamp.errors import StateError as StateError
    from polyamp.errors import TraceError as TraceError
    from polyamp.errors import UnsupportedError as UnsupportedError
    from polyamp.linter.lint import lint as lint
    from polyamp.monitor.monitor import Monitor as Monitor
    from polyamp.nonfinite.find_nonfinite import find_nonfinite as find_nonfinite
    from polyamp.nonfinite.replay import replay as replay
    from polyamp.parity.compare import compare as compare
    from polyamp.porting.port import port as port
    from polyamp.recipe.dialects.dialect_report import DialectReport as DialectReport
    from polyamp.recipe.dialects.dialect_report import dialect_report as dialect_report
    from polyamp.recipe.ema import Ema as Ema
    from polyamp.recipe.float8 import Float8 as Float8
    from polyamp.recipe.groups import Group as Group
    from polyamp.recipe.groups import no_decay as no_decay
    from polyamp.recipe.optimizers import *  # noqa: F403  # every optimizer
    from polyamp.recipe.policy import Policy as Policy
    from polyamp.recipe.recipe import Recipe as Recipe
    from polyamp.recipe.scaler import LossScaler as LossScaler
    from polyamp.recipe.scaler import LossScaleState as LossScaleState
    from polyamp.results import Gradients as Gradients
    from polyamp.results import StepResult as StepResult
    from polyamp.train.averages import averaged as averaged
    from polyamp.train.averages import averaged_model as averaged_model
    from polyamp.train.checkpoint import load_extra as load_extra
    from polyamp.train.checkpoint import restore as restore
    from polyamp.train.checkpoint import save as save
    from polyamp.train.refresh import refresh as refresh
    from polyamp.train.step import apply_gradients as apply_gradients
    from polyamp.train.step import init as init
    from polyamp.train.step import train_step as train_step
    from polyamp.train.step import value_and_grad as value_and_grad
    from polyamp.train.trainable_parameters import parameters as parameters

_PUBLIC_MODULES = ("losses", "parity", "porting", "schedules")
_MODULES = (
    *_PUBLIC_MODULES,
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
            names = (name for names in _EXPORTS.values() for name in names)
            value = sorted(["__version__", *_PUBLIC_MODULES, *names, *specs["__all__"]])
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
