"""Compiled training step, `train_step(compile=True)`: one graph per state, and checks for unsupported cases."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from typing import Any, Final

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules import step_checks
from polyamp.rules.accumulation import Accumulation
from polyamp.rules.batches import micro_batches
from polyamp.rules.loss_weights import WeightFunction
from polyamp_torch.arrays import to_device
from polyamp_torch.precision.torch_only.autocast_region_stack import shield
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.compiled_graph import CompiledGraph, GraphGroups
from polyamp_torch.step.torch_only.compiled_native_optimizer import CompiledNativeGraph
from polyamp_torch.step.torch_only.interrupts import DeferInterrupts

COMPILE_OPTIONS: Final = ("backend", "mode", "options", "dynamic")
"""Accepted keys of `compile={...}`: arguments of `torch.compile`."""


_ENGINE_FUNCTIONS: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "fully_shard",
    "tensor_parallel": "parallelize_module",
    "fsdp2+tensor_parallel": "fully_shard and parallelize_module",
}


class CompiledStep:
    """Compiled step of one loss function, with a separate graph for each state.

    Args:
        loss_fn: the user's loss function.
        recipe: the step's recipe.
        options: arguments of `torch.compile`, from `COMPILE_OPTIONS`.
        weight: the user's `weight=`, or None.

    Raises:
        UnsupportedError: an option, or the recipe, is not supported.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        recipe: Recipe,
        options: Mapping[str, Any],
        weight: WeightFunction | None = None,
    ) -> None:
        step_checks.check_options(options, COMPILE_OPTIONS, function="train_step(compile={...})", backend="torch")
        if recipe.policy.overrides and recipe.policy.mode == "cast":
            raise UnsupportedError(
                "train_step(compile=...) takes overrides in mode='autocast' only. Received: overrides="
                f"{dict(recipe.policy.overrides)}, mode='cast'. Use compile=False or mode='autocast'."
            )
        if _reads_attribute(getattr(loss_fn, "__code__", None), "requires_grad"):
            raise UnsupportedError(
                "train_step(compile=...): loss_fn reads requires_grad, which torch's compiler takes for False of every "
                "parameter, so that what depends on it would be left out. polyamp.parameters(model).values() are the "
                "trained ones; or use compile=False."
            )
        self._loss_fn = loss_fn
        self._recipe = recipe
        self._options = dict(options)
        self._weight = weight
        self._graphs: weakref.WeakKeyDictionary[TorchState, CompiledGraph] = weakref.WeakKeyDictionary()

    def __call__(self, state: TorchState, batch: Any) -> StepResult:
        """Run one step on one state.

        Raises:
            UnsupportedError: the model or `loss_fn` cannot be compiled; the message has the remedy.
        """
        recipe = self._recipe
        batches, window = micro_batches(to_device(batch, state.device, state.plan.param), recipe.accumulate_steps)
        with DeferInterrupts() as interrupts, state.lock, shield():
            return self._stepped(state, batches, window, interrupts)

    def _stepped(
        self, state: TorchState, batches: list[Any], window: Accumulation, interrupts: DeferInterrupts
    ) -> StepResult:
        state.check_unchanged()
        if state.replicas.engine.name is not None:
            raise UnsupportedError(
                f"train_step(compile=True) compiles the step of one process. Received: a model held by "
                f"{_ENGINE_FUNCTIONS[state.replicas.engine.name]}. Use compile=False, and compile the model: "
                "model.compile() before it is wrapped or sharded."
            )
        graph = self._graphs.get(state)
        if not is_spec(self._recipe.optimizer):
            return self._with_native(graph, state, batches, window, interrupts)
        groups = GraphGroups.of(state)
        if graph is None or graph.groups != groups:  # the options are constants in the graph
            with interrupts.allowed:
                graph = CompiledGraph(
                    self._loss_fn, self._recipe, self._options, state, batches[0], groups, self._weight
                )
            self._graphs[state] = graph
        return graph.step(state, batches, window, interrupts)

    def _with_native(
        self,
        graph: CompiledGraph | None,
        state: TorchState,
        batches: list[Any],
        window: Accumulation,
        interrupts: DeferInterrupts,
    ) -> StepResult:
        """Run a step with a torch optimizer, which runs outside of the graph."""
        if graph is None:
            with interrupts.allowed:
                graph = CompiledNativeGraph(
                    self._loss_fn, self._recipe, self._options, state, batches[0], None, self._weight
                )
            self._graphs[state] = graph
        return graph.step(state, batches, window, interrupts)


def _reads_attribute(code: Any, name: str) -> bool:
    """Return whether a function's code, or nested code in it, reads an attribute of this name."""
    if not isinstance(code, types.CodeType):
        return False
    return name in code.co_names or any(_reads_attribute(inner, name) for inner in code.co_consts)
