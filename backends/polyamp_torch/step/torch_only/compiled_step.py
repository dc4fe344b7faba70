"""Compiled training step, `train_step(compile=True)`: one graph per state, and checks for unsupported cases.

With one of polyamp's specs the whole step is a graph (`compiled_graph`). With a torch optimizer only the first half is:
`CompiledNativeGraph` returns the sum of the scaled gradients, and the buffers after the forward passes. The finite
flag, unscaling, clipping, the optimizer's `step()` and the scale update are those of the eager step.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp.rules import step_checks
from polyamp.rules.accumulation import Accumulation
from polyamp.rules.batches import micro_batches
from polyamp.rules.loss_weights import WeightFunction
from polyamp.trees import map_tree
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, can_read_without_sync, detach_leaf, memory_address, to_device
from polyamp_torch.precision.torch_only.autocast_region_stack import shield
from polyamp_torch.step.accumulation import stack_aux
from polyamp_torch.step.forward_backward import stash_grads
from polyamp_torch.step.loss_weights import total_scale
from polyamp_torch.step.output_figures import with_output_figures
from polyamp_torch.step.parameter_writes import WRITE_PREFIX, GradientWrites
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.compiled_graph import CompiledGraph, NamedTensors, micro_batch_weights
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.eager_dry_run import check_retrace
from polyamp_torch.step.torch_only.graph_groups import GraphGroups
from polyamp_torch.step.update import UpdateGradients, update_states

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
        monitor: what the step collects for a monitor, or None.

    Raises:
        UnsupportedError: an option, or the recipe, is not supported.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        recipe: Recipe,
        options: Mapping[str, Any],
        weight: WeightFunction | None = None,
        monitor: MonitorSelection | None = None,
    ) -> None:
        step_checks.check_options(options, COMPILE_OPTIONS, function="train_step(compile={...})", backend="torch")
        if recipe.policy.overrides and recipe.policy.mode == "cast":
            raise UnsupportedError(
                "train_step(compile=...) takes overrides in mode='autocast' only. Received: overrides="
                f"{dict(recipe.policy.overrides)}, mode='cast'. Use compile=False or mode='autocast'."
            )
        if recipe.policy.float8 is not None:
            raise UnsupportedError(
                "train_step(compile=...): torch's compiler loses the gradients of products in 8 bits inside of a graph "
                "that differentiates itself (S36). Compile the model, model.compile(), and use compile=False."
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
        self._monitor = monitor
        self._graphs: weakref.WeakKeyDictionary[TorchState, CompiledGraph] = weakref.WeakKeyDictionary()

    def __call__(self, state: TorchState, batch: Any) -> tuple[TorchState, StepResult]:
        """Run one step on one state.

        Raises:
            UnsupportedError: the model or `loss_fn` cannot be compiled; the message has the remedy.
        """
        recipe = self._recipe
        batches, window = micro_batches(to_device(batch, state.device, state.plan.param), recipe.accumulate_steps)
        with DeferInterrupts() as interrupts, state.lock, shield():
            state.check_unchanged()
            state.reader.check_compile()
            if state.replicas.engine.name is not None:
                raise UnsupportedError(
                    f"train_step(compile=True) compiles the step of one process. Received: a model held by "
                    f"{_ENGINE_FUNCTIONS[state.replicas.engine.name]}. Use compile=False, and compile the model: "
                    "model.compile() before it is wrapped or sharded."
                )
            graph = self._graphs.get(state)
            groups = GraphGroups.of(state) if is_spec(self._recipe.optimizer) else None
            if graph is None or graph.groups != groups:  # the options are constants in the graph
                kind = CompiledNativeGraph if groups is None else CompiledGraph
                with interrupts.allowed:
                    graph = kind(
                        *(self._loss_fn, self._recipe, self._options, state, batches[0], groups),
                        weight=self._weight,
                        monitor=self._monitor,
                    )
                self._graphs[state] = graph
            return state, graph.step(state, batches, window, interrupts)


def _reads_attribute(code: Any, name: str) -> bool:
    """Return whether a function's code, or nested code in it, reads an attribute of this name."""
    if not isinstance(code, types.CodeType):
        return False
    return name in code.co_names or any(_reads_attribute(inner, name) for inner in code.co_consts)


class CompiledNativeGraph(CompiledGraph):
    """Compiled first half of a state's step, with the eager second half."""

    def step(
        self, state: TorchState, batches: list[Any], window: Accumulation, interrupts: DeferInterrupts
    ) -> StepResult:
        """Run one step; parameters, buffers and the optimizer's state are updated in place."""
        used = [state.parameters[name] for name in self._used]
        parameters = {name.replace("/", "."): p.detach() for name, p in zip(self._used, used, strict=True)}
        running = buffers.writable_buffers(state.buffer_owners) | self._more_running
        fixed = self._fixed(set(map(id, [*used, *running.values()])))
        narrow = len(batches) > 1 and used[0].dtype in HALF_TENSOR_DTYPES  # divided in float32, rounded once (S8)
        loss, auxes, values, now, whole, weight = self._call(
            state,
            batches,
            interrupts,
            parameters,
            fixed,
            running,
            state.scale_state.scale,
            batches,
            micro_batch_weights(window, state.device),
            narrow,
        )
        aux = stack_aux(auxes, stack=self._recipe.accumulate_steps > 1)
        scale = total_scale(state.scale_state.scale if state.scales else None, whole, state.device)
        with stash_grads(list(state.parameters.values()), used_up=True):
            grads = _place_gradients(used, values)
            new = {
                WRITE_PREFIX + name: now[name.replace("/", ".")] for name in self._used if name.replace("/", ".") in now
            }
            settle = functools.partial(_commit_or_rollback, running, now, GradientWrites(state.writes.named, new))
            ready = UpdateGradients(grads, None if narrow else scale, settle, weight=weight)
            (result,) = update_states([state], [ready], "all", self._monitor)
        return with_output_figures(result._replace(loss=loss, aux=map_tree(detach_leaf, aux)), self._outputs)

    def _traced(self, *arguments: Any) -> Any:
        """Run the first half; this function is compiled."""
        return self._first_half(*arguments)

    def _first_half(
        self,
        parameters: NamedTensors,
        fixed: NamedTensors,
        running: NamedTensors,
        scale: torch.Tensor,
        batches: list[Any],
        shares: torch.Tensor | None,
        narrow: bool,
    ) -> Any:
        """Return loss, auxes, gradient sums, buffers, divisor and weight; `narrow` divides 16-bit sums here."""
        check_retrace(self._watch)
        loss, auxes, total, now, whole, weight = self._sum_gradients(parameters, fixed, running, scale, batches, shares)
        by = total_scale(scale if self._scaler.scales else None, whole, scale.device) if narrow else None
        if by is not None:
            divisor = by.float()
            total = [(value / divisor).to(p.dtype) for value, p in zip(total, parameters.values(), strict=True)]
        return loss, auxes, total, now, whole, weight


def _place_gradients(parameters: Sequence[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Set the parameters' `.grad`, with the same strides and separate memory, as in-place kernels require.

    Two results of a graph may be one tensor."""
    placed: list[torch.Tensor] = []
    seen: set[int] = set()
    for p, value in zip(parameters, values, strict=True):
        pointer = memory_address(value)
        if value.stride() != p.stride() or pointer in seen or value.dtype != p.dtype or value.is_conj():
            value = torch.empty_like(p).copy_(value)
        seen.add(pointer)
        p.grad = value
        placed.append(value)
    return placed


def _commit_or_rollback(
    running: NamedTensors, now: NamedTensors, written: GradientWrites, finite: torch.Tensor | None
) -> None:
    """Keep the forward pass's changes if `finite` is true or None; otherwise undo them."""
    written.settle(finite)
    if finite is not None and can_read_without_sync(finite.device):
        if not bool(finite):
            return
        finite = None
    for name, old in running.items():
        old.copy_(now[name] if finite is None else torch.where(finite.to(old.device), now[name], old))
