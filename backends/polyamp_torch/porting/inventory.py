"""Inventory of a torch model: its modules in order, with every parameter and buffer in one layer or in `left`.

The readers in `layers`, or a registered form, identify a module. An array that none of them names becomes a parameter
of no layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrize

from polyamp.errors import ModelError, PortError, describe_value
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.layer_registration import qualified_name, registered_form
from polyamp_torch.compat import WRAPPER_CLASSES, non_persistent_buffers
from polyamp_torch.porting.input_orders import input_orders
from polyamp_torch.porting.layers import attention, padding_rules, recurrent, stateless_layers, weight_layers
from polyamp_torch.porting.layers.layer_record import LayerRecord, module_expression
from polyamp_torch.porting.torch_only.numpy_conversion import storage_key, to_lazy
from polyamp_torch.precision.policy_module import PolicyModule, wrapped_module
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function

_READERS: Final = {**weight_layers.READERS, **recurrent.READERS, **attention.READERS, **stateless_layers.READERS}
_COUNTER_REASON: Final = "counts batches; torch alone keeps it"
_NOT_SAVED_REASON: Final = "no part of checkpoints (persistent=False): the model makes it itself"
_INTEGERS_REASON: Final = "whole numbers or flags, which the model makes itself"


def unwrap_module(model: Any) -> nn.Module:
    """Return the module in a model object that a user passes.

    Raises:
        ModelError: the object has no module, or the module has no arrays yet.
    """
    module = wrapped_module(model) if isinstance(model, PolicyModule) else model
    if not isinstance(module, nn.Module):
        raise ModelError(f"a model of torch's is an nn.Module. Received: {describe_value(model)}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError("a scripted module does not tell its layers. Give the module that it was made of.")
    for name, part in module.named_modules():
        kind = qualified_name(type(part))
        if kind.startswith("torch.distributed.fsdp"):
            raise PortError(
                f"{name or 'the model'!r} is a FullyShardedDataParallel, which holds a share of its arrays. Port the "
                "module inside on one process, or within FullyShardedDataParallel.summon_full_params(model)."
            )
    return module


def module_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and tensors that are plain attributes of modules; some of them twice."""
    yield from model.parameters()
    yield from model.buffers()
    for part in model.modules():
        yield from tensor_attributes(part).values()


def tensor_attributes(part: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that are plain attributes of a module."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by its `/`-separated path. A shared tensor appears under every path."""
    named: list[tuple[str, torch.Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    path = path_function(module)
    return {path(name): tensor for name, tensor in named}


def wrapper_attribute(module: nn.Module) -> str | None:
    """Return the attribute that contains the wrapped module (`torch.compile`, data parallelism); None if it is no
    wrapper."""
    names = {(kind.__module__, kind.__qualname__) for kind in type(module).__mro__}
    return next((attribute for place, name, attribute in WRAPPER_CLASSES if (place, name) in names), None)


def short_paths(module: nn.Module) -> dict[str, str]:
    """Map each module's `.`-separated path to its `/`-separated path without wrapper names."""
    parts, found = {"": module}, {"": ""}
    for place, part in module.named_modules(remove_duplicate=False):
        if place:
            around, _, own = place.rpartition(".")
            parts[place] = part
            inside = wrapper_attribute(parts[around]) == own
            found[place] = found[around] if inside else f"{found[around]}/{own}".lstrip("/")
    return found


def inventory(model: Any, batch: Any = None) -> Inventory:
    """Return the layers of a model in the order of definition.

    Raises:
        ModelError: no module, or a module whose arrays do not exist yet.
        PortError: an array is not numbers in memory, or the module computes it from other arrays.
    """
    return _TorchWalk(unwrap_module(model)).inventory()


class _TorchWalk:
    """One traversal of a model that collects its layers."""

    def __init__(self, module: nn.Module) -> None:
        self.root = module
        self.short = short_paths(module)
        self.path = path_function(module)
        self.layers: list[NativeLayer] = []
        self.left: dict[str, str] = {}
        self.first: dict[tuple[Any, ...], str] = {}
        self.seen: set[int] = set()
        self.claimed: set[str] = set()

    def inventory(self) -> Inventory:
        self.visit(self.root, "")
        whole = Inventory(self.layers, "torch", True, self.left)
        return dataclasses.replace(
            whole,
            layers=[_with_spatial_rank(layer, whole.spatial) for layer in whole.layers],
            inputs=input_orders(self.root, self.short),
        )

    def visit(self, module: nn.Module, place: str, ahead: nn.Module | None = None) -> None:
        """Visit a module and its submodules. `place` is `.`-separated; `ahead` is the preceding module in a
        Sequential."""
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        _check_module(module, place)
        for found in self.read(module):
            self.add(_with_padding(found, module, ahead), module, place)
        self.rest(module, place)
        before: nn.Module | None = None
        for name, child in module.named_children():
            inner = f"{place}.{name}".lstrip(".")
            kinds = (child.named_parameters, child.named_buffers)
            own = [array for named in kinds for array, _ in named(remove_duplicate=False)]
            claimed = own and all(f"{inner}.{array}" in self.claimed for array in own)
            if not claimed:
                self.visit(child, inner, before if isinstance(module, nn.Sequential) else None)
            before = child
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            self.tell_activation(module, place)

    def read(self, module: nn.Module) -> list[LayerRecord]:
        """Return the layers of a module; empty if it is only a container."""
        registered = registered_form(module)
        if registered is not None:
            _check_registered(registered, module)
            names = {name: name.replace("/", ".") for rule in registered.rules for name in rule.native}
            return [LayerRecord((registered,), names)]
        for kind in type(module).__mro__:
            reader = weight_layers.READERS_BY_NAME.get(qualified_name(kind)) or _READERS.get(kind)
            if reader is not None:
                return reader(module)
        return weight_layers.norm_by_name(module) or stateless_layers.activation_by_name(module)

    def add(self, found: LayerRecord, module: nn.Module, place: str) -> None:
        """Add one layer reading to the inventory."""
        tensors = {name: _find_tensor(module, attribute) for name, attribute in found.tensors.items()}
        leaves = {
            name: self.leaf(tensor, f"{place}.{found.tensors[name]}".lstrip(".")) for name, tensor in tensors.items()
        }
        own = self.short[place]
        lines = {name: partial(line, module_expression(place)) for name, line in found.lines.items()}
        path = "/".join(part for part in (own, found.suffix) if part)
        self.layers.append(NativeLayer(path, leaves, found.forms, _class_name(module), lines))

    def leaf(self, tensor: torch.Tensor, name: str) -> InventoryLeaf:
        self.claimed.add(name)
        name = self.path(name)
        array = to_lazy(tensor, name)
        first = self.first.setdefault(storage_key(tensor), name)
        trainable = isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())
        return InventoryLeaf(name, array, trainable, None if first == name else first)

    def rest(self, module: nn.Module, place: str) -> None:
        """Add the direct arrays of a module that belong to no layer."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            self.lone(parameter, name, place, module)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            full = f"{place}.{name}".lstrip(".")
            if full in self.claimed:
                continue
            numbers = buffer.is_floating_point() or buffer.is_complex()
            if name in non_persistent_buffers(module):
                self.left[self.path(full)] = _NOT_SAVED_REASON
            elif not numbers:
                self.left[self.path(full)] = _COUNTER_REASON if name == "num_batches_tracked" else _INTEGERS_REASON
            else:
                self.lone(buffer, name, place, module)

    def lone(self, tensor: torch.Tensor, name: str, place: str, module: nn.Module) -> None:
        """Add a parameter that belongs to no layer."""
        full = f"{place}.{name}".lstrip(".")
        if full in self.claimed:
            return
        path = "/".join(part for part in (self.short[place], name) if part)
        leaves = {name: self.leaf(tensor, full)}
        self.layers.append(NativeLayer(path, leaves, (parameter_form(name),), _class_name(module)))

    def tell_activation(self, module: Any, place: str) -> None:
        """Assign the functional activation of an `nn.Transformer` layer to its first dense layer."""
        name = stateless_layers.activation_name(module.activation)
        path = f"{self.short[place]}/linear1".lstrip("/")
        for number, layer in enumerate(self.layers):
            if name is not None and layer.path == path:
                (form,) = layer.forms
                changed = dataclasses.replace(form, attributes={**form.attributes, "activation": name})
                self.layers[number] = dataclasses.replace(layer, forms=(changed,))


def _check_module(module: nn.Module, place: str) -> None:
    """Raise if arrays do not exist yet, or are computed from other arrays."""
    where = module_expression(place)
    tensors: Iterator[Any] = iter([*module.parameters(recurse=False), *module.buffers(recurse=False)])
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise ModelError(
            f"{place or 'the model'!r} ({_class_name(module)}) has no arrays yet: it makes them at its first call. "
            "Call the model once on a batch."
        )
    if parametrize.is_parametrized(module):
        named: Mapping[str, Any] = module.parametrizations  # type: ignore[assignment]  # a ModuleDict
        names = list(named)
        kinds = ", ".join(type(step).__name__.lstrip("_") for step in named[names[0]])
        raise PortError(
            f"{place or 'the model'!r} has a parametrization ({kinds}) of {names[0]!r}, which is computed from other "
            "arrays: no other framework has them. Make its result the array itself first: "
            f"torch.nn.utils.parametrize.remove_parametrizations({where}, {names[0]!r})."
        )
    own = dict(module.named_parameters(recurse=False))
    ends = {"g": "weight_norm", "orig": "spectral_norm"}
    made = {stem: ends[end] for stem, _, end in (name.rpartition("_") for name in own) if end in ends}
    for name, kind in made.items():
        if name in own or not isinstance(getattr(module, name, None), torch.Tensor):
            continue
        raise PortError(
            f"{place or 'the model'!r} has {name!r} computed by torch.nn.utils.{kind} from other arrays: no other "
            f"framework has them. Make its result the array itself first: torch.nn.utils.remove_{kind}({where}, "
            f"{name!r})."
        )


def _check_registered(form: Form, module: nn.Module) -> None:
    own = named_tensors(module)
    for rule in form.rules:
        for name in rule.native:
            if name.replace(".", "/") not in own:
                raise PortError(
                    f"the form registered for {qualified_name(type(module))} names {name!r}; its arrays are "
                    f"{', '.join(map(repr, own)) or 'none'}."
                )


def _with_padding(found: LayerRecord, module: Any, ahead: nn.Module | None) -> LayerRecord:
    """Return a convolution or pooling that includes the zeros of a preceding padding module."""
    form = found.forms[0]
    pads = (
        None
        if ahead is None or form.kind != "conv"
        else padding_rules.pad_module_padding(ahead, len(module.kernel_size))
    )
    if pads is None or "padding" not in form.attributes or module.padding_mode != "zeros":
        return found
    own = padding_rules.convolution_padding(module)
    both = [[a + c, b + d] for (a, b), (c, d) in zip(pads, own, strict=True)]
    padding = padding_rules.canonical_padding(both, module.kernel_size, module.stride, module.dilation)
    changed = dataclasses.replace(form, attributes={**form.attributes, "padding": padding})
    return dataclasses.replace(found, forms=(changed,))


def _with_spatial_rank(layer: NativeLayer, spatial: int) -> NativeLayer:
    """Return a resize with one factor for each spatial axis of the model's images; without factors if that is
    unknown."""
    form = layer.forms[0]
    if form.kind != "resize" or not isinstance(form.attributes.get("size"), int | float):
        return layer
    attributes = dict(form.attributes)
    factor = attributes.pop("size")
    if spatial:
        attributes["size"] = [factor] * spatial
    return dataclasses.replace(layer, forms=(dataclasses.replace(form, attributes=attributes),))


def _find_tensor(module: nn.Module, attribute: str) -> torch.Tensor:
    owner, _, name = attribute.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), name)
    return tensor


def _class_name(module: nn.Module) -> str:
    name = qualified_name(type(module))
    return f"torch.nn.{type(module).__name__}" if name.startswith("torch.nn.modules.") else name
