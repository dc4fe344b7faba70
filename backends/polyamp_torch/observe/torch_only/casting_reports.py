"""`explain`: the casting report of torch code, by a `TorchDispatchMode` around one pass, or from compiled graphs.

The mode runs below autograd and autocast, so it sees the operations that the kernels run, after the casts. Models and
tensors among the inputs are copied, and the random generators are set back, so that the pass leaves no trace in them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn

from polyamp.contract.casting_report import CastingReport
from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules import step_checks
from polyamp.trees import map_tree
from polyamp_torch.arrays import to_device
from polyamp_torch.compat import DispatchMode, is_in_backward, tree_leaves
from polyamp_torch.distributed.torch_only.compat import make_module_tracker
from polyamp_torch.observe.model_copy import copy_model
from polyamp_torch.observe.torch_only.compiled_graphs import NOTE, GraphCounter
from polyamp_torch.observe.torch_only.kernel_lists import kernel_rule
from polyamp_torch.observe.torch_only.operation_counter import OperationCounter, PassCounter
from polyamp_torch.precision.autocast import backward_region, root_region, wrap_function
from polyamp_torch.precision.policy_module import PolicyModule, module_device, resolve_policy, wrapped_module
from polyamp_torch.precision.torch_only.keras_layers import is_keras_model
from polyamp_torch.precision.torch_only.op_rules import forget_met, rule_changes, unmet_rules, unmet_text
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function

CounterT = TypeVar("CounterT", bound=PassCounter)


def explain(
    backend: Any,
    target: Any,
    policy: Policy,
    *inputs: Any,
    strict: bool = False,
    compiled: bool = False,
    **options: Any,
) -> CastingReport:
    """Run `target(*inputs)` once under a policy and report its operations (`HasCastingReports.explain`).

    A scalar result that requires a gradient is a loss: its backward pass runs too.

    Args:
        backend: this backend.
        target: the function or the model.
        policy: the policy.
        *inputs: its arguments.
        strict: raise for an operation that no op list names.
        compiled: report the graphs that `torch.compile` makes of the call, instead of the operations that run eagerly.
        **options: none, as for `init`.

    Raises:
        UnsupportedError: several models, or a Keras model; `strict`, and an operation without a rule; torch cannot
            compile the call.
    """
    step_checks.check_options(options, (), function="explain", backend=backend.name)
    counter, notes = count_operations(target, policy, inputs, OperationCounter, compiled=compiled)
    return counter.report(policy, strict=strict, notes=[NOTE] * compiled + notes)


explain_compiled: Final = functools.partial(explain, compiled=True)
"""The same of the graphs of `torch.compile` (`HasCompiledCastingReports.explain_compiled`)."""


def count_operations(
    target: Any,
    policy: Policy,
    inputs: Sequence[Any],
    make_counter: Callable[[ResolvedPolicy], CounterT],
    *,
    compiled: bool,
) -> tuple[CounterT, list[str]]:
    """Run `target(*inputs)` once under a policy, with a counter of its operations.

    Args:
        target, policy, inputs, compiled: as in `explain`.
        make_counter: makes the counter, of the resolved policy.

    Returns:
        The counter, and what its report does not cover, a sentence each.

    Raises:
        UnsupportedError: several models, or a Keras model; torch cannot compile the call.
    """
    if any(map(is_keras_model, (target, *inputs))):
        raise UnsupportedError(
            "explain: the op list of torch says nothing of Keras's layers, which choose their dtypes themselves. "
            "Received: a Keras model on torch. polyamp_keras.apply_policy(model, policy).choices has the dtype of each "
            "layer and its reason; or explain it with Keras on TensorFlow."
        )
    if isinstance(target, PolicyModule):
        target = wrapped_module(target)
    inputs = tuple(wrapped_module(each) if isinstance(each, PolicyModule) else each for each in inputs)
    given = [each for each in (target, *inputs) if isinstance(each, nn.Module)]
    if len(given) > 1:
        raise UnsupportedError(
            f"explain: one model, as the target or among the inputs. Received: {len(given)} models. Put them into one "
            "nn.ModuleDict."
        )
    with torch.random.fork_rng():
        if not given:
            counter = make_counter(policy.plan())
            call = wrap_function(target, policy.plan())
            _run_pass(counter, policy.plan(), call, _copied(inputs), [], "cpu", {}, compiled)
            return counter, []
        model = copy_model(given[0])
        plan, device = resolve_policy(model, policy), module_device(model)
        bound, path = PolicyModule(model, plan, device), path_function(model)
        paths = {part: path(name) for name, part in model.named_modules()}
        batches = iter(to_device(_copied([each for each in inputs if each is not given[0]]), device, plan.param))
        arguments = [bound if each is given[0] else next(batches) for each in inputs]

        def bound_call(*args: Any) -> Any:
            if target is given[0]:
                return bound(*args)
            with root_region(plan, device.type):
                return target(*args)

        counter, changes = make_counter(plan), rule_changes(plan)
        forget_met(changes)
        with bound.installed():  # as in the step: also while checkpoints run again
            _run_pass(counter, plan, bound_call, arguments, list(model.parameters()), device.type, paths, compiled)
        unmet = unmet_rules(changes)
        return counter, [unmet_text(unmet, "this pass")] if unmet else []


def _run_pass(
    counter: PassCounter,
    plan: ResolvedPolicy,
    call: Any,
    arguments: Any,
    parameters: list[Any],
    device_type: str,
    modules: dict[nn.Module, str],
    compiled: bool,
) -> None:
    """Run a pass, and its backward pass if the result is a loss, and count the operations."""
    leaves = [x for x in (*parameters, *tree_leaves(arguments)) if isinstance(x, torch.Tensor) and x.requires_grad]
    run = GraphCounter(counter, modules).compiled(call) if compiled else call
    with contextlib.nullcontext() if compiled else _CountMode(counter, modules):
        result = run(*arguments)
        loss, _ = step_checks.split_loss_and_aux(result)
        if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.requires_grad and leaves:
            with backward_region(plan, device_type):
                torch.autograd.grad(loss, leaves, allow_unused=True)


def explain_as_is(model: nn.Module, loss_fn: Any, batch: Any) -> CastingReport:
    """Run `loss_fn(model, batch)` and its backward pass as the program has it, under no policy, and report operations.

    The rule of each row is that of the op list, whether or not the operation ran by it. The model is one's own copy.
    """
    policy, path = Policy("float32"), path_function(model)
    plan = policy.plan()
    counter, paths = OperationCounter(plan), {part: path(name) for name, part in model.named_modules()}
    arguments = [model, *_copied([batch])]
    _run_pass(counter, plan, loss_fn, arguments, list(model.parameters()), module_device(model).type, paths, False)
    found = counter.report(policy, strict=False)
    rows = [row._replace(rule=kernel_rule(row.name)) for row in found.operations]
    return CastingReport(policy, rows, found.casts, found.families)


class _CountMode(DispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """Mode that counts the operations of a pass.

    Args:
        counter: receives them.
        modules: path of each module.
    """

    def __init__(self, counter: PassCounter, modules: dict[nn.Module, str]) -> None:
        super().__init__()
        self._counter = counter
        self._tracker = make_module_tracker(modules)
        self._running: list[str] = []
        self._tracker.register_user_hooks(pre_fw_hook=self._enter_module, post_fw_hook=self._leave_module)

    def __enter__(self) -> Any:
        self._tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        direction = "forward"
        if is_in_backward():
            direction = "recompute" if torch.is_grad_enabled() else "backward"
        module = self._running[-1] if self._running else ""
        if direction == "backward":
            module = max(self._tracker.parents - {"Global"}, key=lambda path: (path.count("/"), len(path)), default="")
        self._counter.count(func, (args, kwargs), result, module, direction)
        return result

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._tracker.get_known_fqn(module) or "")

    def _leave_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._running.pop()


def _copied(inputs: Any) -> Any:
    """Return inputs whose tensors are copies, which require gradients as the originals do."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return [map_tree(copied, each) for each in inputs]
