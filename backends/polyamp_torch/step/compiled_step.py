"""`train_step(compile=True)`: which graph a state's step has, and what cannot be compiled. Called by the backend."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from typing import Any, Final

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules import refusals
from polyamp.rules.batches import micro_batches
from polyamp.rules.weights import WeightFunction
from polyamp.rules.window import Window
from polyamp_torch.arrays import to_device
from polyamp_torch.precision.shield import shield
from polyamp_torch.step.compiled import Graph, Groups
from polyamp_torch.step.compiled_native import NativeGraph
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.state import TorchState

OPTIONS: Final = ("backend", "mode", "options", "dynamic")
"""What `compile={...}` may hold: arguments of `torch.compile`."""


_ENGINES: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "fully_shard",
    "tensor_parallel": "parallelize_module",
    "fsdp2+tensor_parallel": "fully_shard and parallelize_module",
}


class CompiledStep:
    """The compiled step of one loss function; every state has a graph of its own.

    Args:
        loss_fn: the user's.
        recipe: the step's.
        options: arguments of `torch.compile`, of `OPTIONS`.
        weight: `weight=` of the user's, or None.

    Raises:
        UnsupportedError: an option, or a recipe, that cannot be compiled.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        recipe: Recipe,
        options: Mapping[str, Any],
        weight: WeightFunction | None = None,
    ) -> None:
        refusals.check_options(options, OPTIONS, function="train_step(compile={...})", backend="torch")
        if recipe.policy.overrides and recipe.policy.mode == "cast":
            raise UnsupportedError(
                "train_step(compile=...) takes overrides in mode='autocast' only. Received: overrides="
                f"{dict(recipe.policy.overrides)}, mode='cast'. Use compile=False or mode='autocast'."
            )
        if _reads(getattr(loss_fn, "__code__", None), "requires_grad"):
            raise UnsupportedError(
                "train_step(compile=...): loss_fn reads requires_grad, which torch's compiler takes for False of every "
                "parameter, so that what depends on it would be left out. polyamp.parameters(model).values() are the "
                "trained ones; or use compile=False."
            )
        self._loss_fn = loss_fn
        self._recipe = recipe
        self._options = dict(options)
        self._weight = weight
        self._graphs: weakref.WeakKeyDictionary[TorchState, Graph] = weakref.WeakKeyDictionary()

    def __call__(self, state: TorchState, batch: Any) -> StepResult:
        """One step on one state.

        Raises:
            UnsupportedError: the model or `loss_fn` does something that cannot be compiled; says what to do.
        """
        recipe = self._recipe
        batches, window = micro_batches(to_device(batch, state.device, state.plan.param), recipe.accumulate_steps)
        with Undisturbed() as quiet, state.turn, shield():
            return self._stepped(state, batches, window, quiet)

    def _stepped(self, state: TorchState, batches: list[Any], window: Window, quiet: Undisturbed) -> StepResult:
        state.check_unchanged()
        if state.replicas.engine is not None:
            raise UnsupportedError(
                f"train_step(compile=True) compiles the step of one process. Received: a model held by "
                f"{_ENGINES[state.replicas.engine]}. Use compile=False, and compile the model: model.compile() before "
                "it is wrapped or sharded."
            )
        graph = self._graphs.get(state)
        if not is_spec(self._recipe.optimizer):
            return self._with_native(graph, state, batches, window, quiet)
        groups = Groups.of(state)
        if graph is None or graph.groups != groups:  # their numbers are constants in the graph
            with quiet.disturbed:
                graph = Graph(self._loss_fn, self._recipe, self._options, state, batches[0], groups, self._weight)
            self._graphs[state] = graph
        return graph.step(state, batches, window, quiet)

    def _with_native(
        self, graph: Graph | None, state: TorchState, batches: list[Any], window: Window, quiet: Undisturbed
    ) -> StepResult:
        """The same with an optimizer of torch's own, which runs outside of the graph."""
        if graph is None:
            with quiet.disturbed:
                graph = NativeGraph(self._loss_fn, self._recipe, self._options, state, batches[0], None, self._weight)
            self._graphs[state] = graph
        return graph.step(state, batches, window, quiet)


def _reads(code: Any, name: str) -> bool:
    """Whether a function's code, or that of a function or generator in it, reads an attribute of this name."""
    if not isinstance(code, types.CodeType):
        return False
    return name in code.co_names or any(_reads(inner, name) for inner in code.co_consts)
