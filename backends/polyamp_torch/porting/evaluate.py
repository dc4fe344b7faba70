"""One pass of a model in float32 on a batch: outputs, gradients, and what each module gave. Called by `converter`.

It is a copy that runs, so that the model is as before, what its modules keep besides parameters included. The copy has
float32 where the model has another floating dtype, and no wrappers: what `torch.compile` made runs as it was written.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from polyamp.errors import PortError, described
from polyamp.porting.layouts.converter import Evaluation
from polyamp.trees import map_tree
from polyamp_torch.arrays import from_numpy
from polyamp_torch.porting.tensors import place_of
from polyamp_torch.porting.walk import module_of, wrapped
from polyamp_torch.precision.bound import device_of
from polyamp_torch.precision.paths import path_of

Array = np.ndarray[Any, Any]


def evaluate(model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]]) -> Evaluation:
    """`Converter.evaluate`.

    Raises:
        PortError: the model cannot be copied, or gives no tensors.
    """
    module = module_of(model)
    device = device_of(module)
    runs, parameters = _copied(module)
    args, kwargs = _arguments(batch, device)
    modules: dict[str, Array] = {}
    for name, part in runs.named_modules():
        if name:
            part.register_forward_hook(_keeper(modules, name.replace(".", "/")))
    with _exactly(device):
        given = runs(*args, **kwargs)
        outputs = list(_flat(given))
        if not outputs:
            raise PortError(f"the model's output has no tensor to compare. Received: {described(given)}.")
        known = [_array(output) for output in outputs]
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
        name: np.zeros(tuple(parameter.shape), np.float32) if gradient is None else _array(gradient)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    return Evaluation(known, gradients, modules)


def _copied(module: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The model in float32 in evaluation mode, without wrappers, and its trainable parameters by the model's names."""
    wide: dict[tuple[Any, ...], torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            place = place_of(tensor)
            if place not in wide:
                wide[place] = _wide(tensor)
            memo[id(tensor)] = wide[place]
    try:
        for around in reversed(list(module.modules())):  # the inner ones first
            if (attribute := wrapped(around)) is not None:
                memo[id(around)] = copy.deepcopy(getattr(around, attribute), memo)
        runs = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PortError(
            f"the check runs a copy of the model, and it cannot be copied: {type(error).__name__}: {error}"
        ) from error
    path = path_of(module)
    parameters = {
        path(name): memo[id(parameter)]
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point()
    }
    return runs.eval(), parameters


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes of modules."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach().clone()
    if values.is_floating_point():
        values = values.to(torch.float32)
    return nn.Parameter(values, values.is_floating_point()) if isinstance(tensor, nn.Parameter) else values


def _arguments(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = map_tree(lambda leaf: _tensor(leaf, device), batch)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def _tensor(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = from_numpy(np.asarray(leaf))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        return leaf.to(device, torch.float32)
    whole = leaf.dtype not in (torch.bool, torch.uint8) and not leaf.is_complex()
    return leaf.to(device, torch.int64 if whole else leaf.dtype)  # torch's own dtype of numbers of rows


def _keeper(modules: dict[str, Array], path: str) -> Callable[..., None]:
    """A hook that keeps the output of a module's first call; of a recurrent layer or an attention, the sequence."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            output = output[0]
        if isinstance(output, torch.Tensor) and path not in modules:
            modules[path] = _array(output)

    return keep


def _array(tensor: torch.Tensor) -> Array:
    """A copy: what comes behind may write to a tensor in place."""
    values: Array = tensor.detach().to("cpu", copy=True).resolve_conj().numpy()
    return values


def _flat(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output, dicts by key; what is none (a cache, a None) is left out."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _flat(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in sorted(dataclasses.fields(tree), key=lambda field: field.name):
            yield from _flat(getattr(tree, field.name))


@contextlib.contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """A block in which float32 is float32, there are gradients, and random numbers drawn are not missed outside."""
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
