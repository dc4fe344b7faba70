"""`inspect_setup`: measures a training of torch's that does not use polyamp (`InspectsSetups`).

The pass and the update run on copies of model and optimizer; a user's own step runs on the originals and is undone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch
from torch import nn

from polyamp.contract.casting_report import OperationCount
from polyamp.errors import ArgumentError, describe_value
from polyamp.float_formats import HALF_DTYPES
from polyamp.linter.setup_figures import SensitiveOperation, SetupFigures, TrainingSetup, WeightFigures
from polyamp.rules.step_checks import check_loss, split_loss_and_aux
from polyamp.trees import map_tree
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import uncompiled_module
from polyamp_torch.observe.model_copy import copy_model
from polyamp_torch.observe.torch_only.casting_reports import explain_as_is
from polyamp_torch.observe.torch_only.step_calls import record_step_calls
from polyamp_torch.precision.op_list import TORCH_OP_FAMILIES
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function
from polyamp_torch.step.torch_only.random_state import preserve_random_states

_KERNELS: Final = {
    "softmax": "safe_softmax masked_softmax",
    "norm": "cudnn_batch_norm miopen_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training "
    "batch_norm_with_update fused_rms_norm linalg_vector_norm native_norm",
}
"""Kernels of functions of the op list that have a name of their own."""
_FAMILIES: Final = {"softmax": "softmax", "normalisation": "norm"}
"""Family of the op list -> kind of `SensitiveOperation`."""
_STATISTICS: Final = frozenset({"mean", "sum", "var", "var_mean", "std", "std_mean", "pow", "sqrt", "rsqrt"})
"""What a norm that is written by hand is made of."""
_HALVINGS: Final = 40
"""How often a scale whose gradients overflow is halved, from 2^24 to 2^-16."""


def inspect_setup(setup: TrainingSetup) -> SetupFigures:
    """Measure a set-up (`InspectsSetups.inspect_setup`)."""
    model, optimizer, scaler = _checked(setup)
    setup = setup._replace(model=model)
    scales = scaler is not None and bool(scaler.is_enabled())
    path = path_function(model)
    names = {id(p): path(name) for name, p in model.named_parameters()}
    weights = _trained(model, optimizer)
    figures = SetupFigures(
        backend="torch",
        weights=[
            WeightFigures(
                name=names.get(id(p), f"#{number}"), dtype=dtype_name(p.dtype), moments=_moments(optimizer, p)
            )
            for number, p in enumerate(weights)
        ],
        scales=scales,
        scaler_name="torch.amp.GradScaler",
        records_steps=True,
    )
    if setup.runs:
        with preserve_random_states(model):
            figures = _measure_pass(figures, setup, weights, float(scaler.get_scale()) if scales else 1.0)
    if setup.step is not None:
        figures = msgspec.structs.replace(figures, calls=record_step_calls(setup.step, model, optimizer, scaler))
    return figures


def _checked(setup: TrainingSetup) -> tuple[nn.Module, Any, Any]:
    """Return model, optimizer and scaler, or raise for what torch does not take."""
    model, optimizer, scaler = setup.model, setup.optimizer, setup.scaler
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"lint: model must be an nn.Module. Received: {describe_value(model)}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"lint: optimizer must be a torch.optim.Optimizer. Received: {describe_value(optimizer)}.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(f"lint: scaler must be a torch.amp.GradScaler. Received: {describe_value(scaler)}.")
    if setup.opt_state is not None:
        raise ArgumentError("lint: opt_state is for JAX; a torch optimizer holds its state. Leave opt_state= out.")
    if setup.step is not None and optimizer is None:
        raise ArgumentError("lint: step needs the optimizer that it moves, which is put back. Pass optimizer= too.")
    return uncompiled_module(model), optimizer, scaler


def _trained(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    held = model.parameters() if optimizer is None else (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in held if p.requires_grad]


def _moments(optimizer: Any, parameter: torch.Tensor) -> dict[str, str]:
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {
        name: dtype_name(value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape
    }


def _measure_pass(
    figures: SetupFigures, setup: TrainingSetup, weights: list[torch.Tensor], scale: float
) -> SetupFigures:
    """Return the figures with those of a pass, and of an update if there is an optimizer."""
    report = explain_as_is(copy_model(setup.model), setup.loss_fn, setup.batch)
    forward = [row for row in report.operations if row.direction == "forward"]
    classes = {name.replace(".", "/"): type(part).__name__ for name, part in setup.model.named_modules()}
    operations = [
        SensitiveOperation(row.module, row.name, row.dtype, kind)
        for row in forward
        if set(row.dtype.split(", ")) <= set(HALF_DTYPES) and (kind := _kind(row, classes)) is not None
    ]
    twin = copy_model(setup.model)
    memo: dict[int, Any] = {
        id(own): other
        for (_, own), (_, other) in zip(
            setup.model.named_parameters(remove_duplicate=False),
            twin.named_parameters(remove_duplicate=False),
            strict=True,
        )
    }
    copies = [memo.get(id(p)) for p in weights]
    gradients = _gradients(setup, twin, [p for p in copies if p is not None], scale)
    measured = figures.weights
    if setup.optimizer is not None and gradients is not None:
        rest = iter(gradients)
        found = [None if p is None else next(rest) for p in copies]
        measured = _measure_update(figures.weights, setup.optimizer, copies, found, memo)
    dtypes = {dtype for row in report.operations for dtype in row.dtype.split(", ")}
    return msgspec.structs.replace(
        figures, weights=measured, operations=operations, dtypes=sorted(dtypes), head=_head(forward, setup.model)
    )


def _kind(row: OperationCount, classes: Mapping[str, str]) -> Any:
    """Return which kind of `SensitiveOperation` a row is, or None."""
    if row.name in _sensitive_names():
        return _sensitive_names()[row.name]
    by_hand = "norm" in classes.get(row.module, "").lower() and row.name in _STATISTICS
    return "norm" if by_hand else None


@functools.cache
def _sensitive_names() -> Mapping[str, str]:
    listed = {
        name.strip("_"): _FAMILIES[row.family]
        for row in TORCH_OP_FAMILIES
        if row.family in _FAMILIES
        for name in row.names.split()
    }
    return listed | {name: kind for kind, words in _KERNELS.items() for name in words.split()}


def _head(forward: list[OperationCount], model: nn.Module) -> dict[str, str] | None:
    """Return the weights of the module with the last matrix product, by path; None if it has none of its own."""
    last = next((row.module for row in reversed(forward) if row.rule == "compute"), "")
    part = model.get_submodule(last.replace("/", "."))
    found = {name: dtype_name(p.dtype) for name, p in part.named_parameters(recurse=False) if p.ndim > 1}
    return {f"{last}/{name}".lstrip("/"): dtype for name, dtype in found.items()} or None


def _gradients(
    setup: TrainingSetup, twin: nn.Module, parameters: list[Any], scale: float
) -> list[torch.Tensor | None] | None:
    """Return unscaled gradients of the copies, in their dtype; None if no scale makes them finite."""
    if not parameters:
        return None
    for _ in range(_HALVINGS):
        loss, _ = split_loss_and_aux(setup.loss_fn(twin, map_tree(_detached, setup.batch)))
        check_loss(tuple(loss.shape), dtype_name(loss.dtype))
        found: tuple[Any, ...] = (None,)
        if loss.requires_grad:
            found = torch.autograd.grad(loss.reshape(()) * scale, parameters, allow_unused=True)
        if all(each is None for each in found):
            raise ArgumentError(
                "lint: loss_fn(model, batch) must use the model that it is given, a copy. Received: a loss that "
                "depends on none of its trained parameters."
            )
        if all(each is None or bool(torch.isfinite(each).all()) for each in found):
            return [None if each is None else (each.float() / scale).to(each.dtype) for each in found]
        if scale == 1.0:
            return None
        scale = max(scale / 2, 1.0)
    return None


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _measure_update(
    weights: list[WeightFigures], optimizer: Any, copies: list[Any], gradients: list[Any], memo: dict[int, Any]
) -> list[WeightFigures]:
    """Return the figures with what one step of a copy of the optimizer moves.

    A parameter whose learning rate is zero, as in the first step of a warmup, counts as not measured.
    """
    try:
        other = copy.deepcopy(optimizer, memo)
        before = [None if p is None else p.detach().clone() for p in copies]
        for p, gradient in zip(copies, gradients, strict=True):
            if p is not None:
                p.grad = gradient
        other.step()
    except Exception as error:
        raise ArgumentError(
            f"lint: one step of a copy of the optimizer raises {type(error).__name__}: {error}. Leave optimizer= out."
        ) from error
    resting = {id(p) for group in other.param_groups if not float(group.get("lr", 1.0)) for p in group["params"]}
    measured = []
    for each, p, old, gradient in zip(weights, copies, before, gradients, strict=True):
        if p is None or gradient is None or id(p) in resting:
            measured.append(each)
            continue
        acts = gradient != 0
        unmoved = int((acts & (p.detach() == old)).sum())
        measured.append(
            msgspec.structs.replace(each, moments=_moments(other, p), with_gradient=int(acts.sum()), unmoved=unmoved)
        )
    return measured
