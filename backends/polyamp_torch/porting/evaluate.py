"""Float32 evaluation of a model on one batch: outputs, gradients and the output of each module.

The pass runs on a copy, so the model stays unchanged, including module state other than parameters. The copy is float32
where the model has another floating dtype. It has no wrappers: a module compiled with `torch.compile` runs uncompiled.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from polyamp.errors import PortError, describe_value
from polyamp.porting.layouts.converter import Evaluation
from polyamp.trees import map_tree
from polyamp_torch.arrays import from_numpy
from polyamp_torch.porting.inventory import module_tensors, unwrap_module, wrapper_attribute
from polyamp_torch.porting.torch_only.numpy_conversion import storage_key
from polyamp_torch.precision.policy_module import module_device
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function

Array = np.ndarray[Any, Any]


def evaluate(
    model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]], inputs: Container[str] = ()
) -> Evaluation:
    """Run one float32 pass; see `Converter.evaluate`.

    Raises:
        PortError: the model cannot be copied, or returns no tensors.
    """
    module = unwrap_module(model)
    device = module_device(module)
    runs, parameters = _float32_copy(module)
    args, kwargs = _arguments(batch, device)
    modules: dict[str, Array] = {}
    taken: dict[str, Array] = {}
    for name, part in runs.named_modules():
        path = name.replace(".", "/")
        if path in inputs:
            part.register_forward_pre_hook(_input_hook(taken, path), with_kwargs=True)
        if name:
            part.register_forward_hook(_output_hook(modules, path))
    with _exact_float32(device):
        given = runs(*args, **kwargs)
        outputs = list(_flat_tensors(given))
        if not outputs:
            raise PortError(f"the model's output has no tensor to compare. Received: {describe_value(given)}.")
        known = [_to_array(output) for output in outputs]
        pairs = [
            (output, torch.tensor(np.asarray(weights), dtype=output.dtype, device=output.device))
            for output, weights in zip(outputs, cotangents(known), strict=True)
            if output.requires_grad
        ]
        wanted = list(parameters.values())
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            results, weights = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, wanted, weights, allow_unused=True)
    gradients = {
        name: np.zeros(tuple(parameter.shape), np.float32) if gradient is None else _to_array(gradient)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    return Evaluation(known, gradients, modules, taken)


def _float32_copy(module: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return a float32 copy in evaluation mode without wrappers, and its trainable parameters by the model's names."""
    wide: dict[tuple[Any, ...], torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in module_tensors(module):
        if id(tensor) not in memo:
            place = storage_key(tensor)
            if place not in wide:
                wide[place] = _to_float32(tensor)
            memo[id(tensor)] = wide[place]
    try:
        for around in reversed(list(module.modules())):  # inner modules first
            if (attribute := wrapper_attribute(around)) is not None:
                memo[id(around)] = copy.deepcopy(getattr(around, attribute), memo)
        runs = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PortError(
            f"the check runs a copy of the model, and it cannot be copied: {type(error).__name__}: {error}"
        ) from error
    path = path_function(module)
    parameters = {
        path(name): memo[id(parameter)]
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point()
    }
    return runs.eval(), parameters


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().clone()
    if values.is_floating_point():
        values = values.to(torch.float32)
    return nn.Parameter(values, values.is_floating_point()) if isinstance(tensor, nn.Parameter) else values


def _arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = map_tree(lambda leaf: _to_tensor(leaf, device), batch)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def _to_tensor(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = from_numpy(np.asarray(leaf))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        return leaf.to(device, torch.float32)
    whole = leaf.dtype not in (torch.bool, torch.uint8) and not leaf.is_complex()
    return leaf.to(device, torch.int64 if whole else leaf.dtype)  # torch's dtype for row indices


def _output_hook(modules: dict[str, Array], path: str) -> Callable[..., None]:
    """Return a hook that stores the output of a module's first call. For recurrent and attention layers: the
    sequence."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            output = output[0]
        if isinstance(output, torch.Tensor) and path not in modules:
            modules[path] = _to_array(output)

    return keep


def _input_hook(taken: dict[str, Array], path: str) -> Callable[..., None]:
    """Return a hook that stores the first tensor that a module's first call takes."""

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if given is not None and path not in taken:
            taken[path] = _to_array(given)

    return keep


def _to_array(tensor: torch.Tensor) -> Array:
    """Return a copy, because later modules may write to the tensor in place."""
    values: Array = tensor.detach().to("cpu", copy=True).resolve_conj().numpy()
    return values


def _flat_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output, dicts by key. Other values, such as a cache or None, are skipped."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _flat_tensors(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat_tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in sorted(dataclasses.fields(tree), key=lambda field: field.name):
            yield from _flat_tensors(getattr(tree, field.name))


@contextlib.contextmanager
def _exact_float32(device: torch.device) -> Iterator[None]:
    """Context manager with exact float32, gradients enabled, and the random state restored on exit."""
    cuda = device.type == "cuda"
    before = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.random.fork_rng([device] if cuda else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        if cuda:
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, before)
        yield
