"""The inventory of a torch model: its modules one after another, every parameter and buffer in one layer, or left.

Called by `converter`. What a module is comes from the readers of `layers`, `recurrent`, `attention` and `plain`, or
from a form that somebody has registered; an array that none of them names is a parameter of no layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils import parametrize

from polyamp.errors import ModelError, PortError, described
from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.register import form_of, qualified
from polyamp_torch.compat import WRAPPERS, left_out_of_checkpoints
from polyamp_torch.porting import attention, layers, paddings, plain, recurrent
from polyamp_torch.porting.found import Found, expression
from polyamp_torch.porting.tensors import lazy, place_of
from polyamp_torch.precision.bound import BoundModule, inside
from polyamp_torch.precision.paths import path_of

_READERS: Final = {**layers.READERS, **recurrent.READERS, **attention.READERS, **plain.READERS}
_COUNTER: Final = "counts batches; torch alone keeps it"
_NOT_SAVED: Final = "no part of checkpoints (persistent=False): the model makes it itself"
_INTEGERS: Final = "whole numbers or flags, which the model makes itself"


def module_of(model: Any) -> nn.Module:
    """The module in what a user calls a model.

    Raises:
        ModelError: there is none, or it has no arrays yet.
    """
    module = inside(model) if isinstance(model, BoundModule) else model
    if not isinstance(module, nn.Module):
        raise ModelError(f"a model of torch's is an nn.Module. Received: {described(model)}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError("a scripted module does not tell its layers. Give the module that it was made of.")
    for name, part in module.named_modules():
        kind = qualified(type(part))
        if kind.startswith("torch.distributed.fsdp"):
            raise PortError(
                f"{name or 'the model'!r} is a FullyShardedDataParallel, which holds a share of its arrays. Port the "
                "module inside on one process, or within FullyShardedDataParallel.summon_full_params(model)."
            )
    return module


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its `/`-separated path, what is there twice under both."""
    named: list[tuple[str, torch.Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    path = path_of(module)
    return {path(name): tensor for name, tensor in named}


def wrapped(module: nn.Module) -> str | None:
    """The attribute that holds the module in a wrapper (`torch.compile`, data parallelism); None of another module."""
    names = {(kind.__module__, kind.__qualname__) for kind in type(module).__mro__}
    return next((attribute for place, name, attribute in WRAPPERS if (place, name) in names), None)


def short_paths(module: nn.Module) -> dict[str, str]:
    """Path of each module, `.`-separated -> its path without the names of wrappers, `/`-separated."""
    parts, found = {"": module}, {"": ""}
    for place, part in module.named_modules(remove_duplicate=False):
        if place:
            around, _, own = place.rpartition(".")
            parts[place] = part
            inside = wrapped(parts[around]) == own
            found[place] = found[around] if inside else f"{found[around]}/{own}".lstrip("/")
    return found


def inventory(model: Any) -> Inventory:
    """The layers of a model, in the order of definition.

    Raises:
        ModelError: no module, or one whose arrays are not there yet.
        PortError: an array of another kind than numbers in memory, or one that the module computes from others.
    """
    return _Walk(module_of(model)).inventory()


class _Walk:
    """One walk through a model."""

    def __init__(self, module: nn.Module) -> None:
        self.root = module
        self.short = short_paths(module)
        self.path = path_of(module)
        self.layers: list[NativeLayer] = []
        self.left: dict[str, str] = {}
        self.first: dict[tuple[Any, ...], str] = {}
        self.seen: set[int] = set()
        self.claimed: set[str] = set()

    def inventory(self) -> Inventory:
        self.visit(self.root, "")
        whole = Inventory(self.layers, "torch", True, self.left)
        return dataclasses.replace(whole, layers=[_resized(layer, whole.spatial) for layer in whole.layers])

    def visit(self, module: nn.Module, place: str, ahead: nn.Module | None = None) -> None:
        """One module and all below it; `place` is `.`-separated, `ahead` what a Sequential has before it."""
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        _check(module, place)
        for found in self.read(module):
            self.add(_padded(found, module, ahead), module, place)
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

    def read(self, module: nn.Module) -> list[Found]:
        """What a module is; nothing if it is only a container."""
        registered = form_of(module)
        if registered is not None:
            _check_registered(registered, module)
            names = {name: name.replace("/", ".") for rule in registered.rules for name in rule.native}
            return [Found((registered,), names)]
        for kind in type(module).__mro__:
            reader = layers.NAMED.get(qualified(kind)) or _READERS.get(kind)
            if reader is not None:
                return reader(module)
        return layers.norm_by_names(module) or plain.activation_by_name(module)

    def add(self, found: Found, module: nn.Module, place: str) -> None:
        """A layer that was found."""
        tensors = {name: _tensor(module, attribute) for name, attribute in found.tensors.items()}
        leaves = {
            name: self.leaf(tensor, f"{place}.{found.tensors[name]}".lstrip(".")) for name, tensor in tensors.items()
        }
        own = self.short[place]
        lines = {name: partial(line, expression(place)) for name, line in found.lines.items()}
        path = "/".join(part for part in (own, found.suffix) if part)
        self.layers.append(NativeLayer(path, leaves, found.forms, _class(module), lines))

    def leaf(self, tensor: torch.Tensor, name: str) -> Leaf:
        self.claimed.add(name)
        name = self.path(name)
        array = lazy(tensor, name)
        first = self.first.setdefault(place_of(tensor), name)
        trainable = isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex())
        return Leaf(name, array, trainable, None if first == name else first)

    def rest(self, module: nn.Module, place: str) -> None:
        """The arrays of a module itself that are none of a layer."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            self.lone(parameter, name, place, module)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            full = f"{place}.{name}".lstrip(".")
            if full in self.claimed:
                continue
            numbers = buffer.is_floating_point() or buffer.is_complex()
            if name in left_out_of_checkpoints(module):
                self.left[self.path(full)] = _NOT_SAVED
            elif not numbers:
                self.left[self.path(full)] = _COUNTER if name == "num_batches_tracked" else _INTEGERS
            else:
                self.lone(buffer, name, place, module)

    def lone(self, tensor: torch.Tensor, name: str, place: str, module: nn.Module) -> None:
        """A parameter of no layer."""
        full = f"{place}.{name}".lstrip(".")
        if full in self.claimed:
            return
        path = "/".join(part for part in (self.short[place], name) if part)
        form = Form("parameter", (Rule((name,), ("value",)),))
        self.layers.append(NativeLayer(path, {name: self.leaf(tensor, full)}, (form,), _class(module)))

    def tell_activation(self, module: Any, place: str) -> None:
        """The activation of a layer of `nn.Transformer`, which is a function, is that of its first dense one."""
        name = plain.name_of(module.activation)
        path = f"{self.short[place]}/linear1".lstrip("/")
        for number, layer in enumerate(self.layers):
            if name is not None and layer.path == path:
                (form,) = layer.forms
                told = dataclasses.replace(form, attributes={**form.attributes, "activation": name})
                self.layers[number] = dataclasses.replace(layer, forms=(told,))


def _check(module: nn.Module, place: str) -> None:
    """Refuse what is not there yet, or is computed from other arrays."""
    where = expression(place)
    tensors: Iterator[Any] = iter([*module.parameters(recurse=False), *module.buffers(recurse=False)])
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise ModelError(
            f"{place or 'the model'!r} ({_class(module)}) has no arrays yet: it makes them at its first call. Call the "
            "model once on a batch."
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
                    f"the form registered for {qualified(type(module))} names {name!r}; its arrays are "
                    f"{', '.join(map(repr, own)) or 'none'}."
                )


def _padded(found: Found, module: Any, ahead: nn.Module | None) -> Found:
    """A convolution or pooling with the zeros of a padding module before it as its own."""
    form = found.forms[0]
    pads = None if ahead is None or form.kind != "conv" else paddings.of_pad(ahead, len(module.kernel_size))
    if pads is None or "padding" not in form.attributes or module.padding_mode != "zeros":
        return found
    own = paddings.of_convolution(module)
    both = [[a + c, b + d] for (a, b), (c, d) in zip(pads, own, strict=True)]
    padding = paddings.canonical(both, module.kernel_size, module.stride, module.dilation)
    told = dataclasses.replace(form, attributes={**form.attributes, "padding": padding})
    return dataclasses.replace(found, forms=(told,))


def _resized(layer: NativeLayer, spatial: int) -> NativeLayer:
    """A resize by one number, with as many as the model's images have axes; without if that is not known."""
    form = layer.forms[0]
    if form.kind != "resize" or not isinstance(form.attributes.get("size"), int | float):
        return layer
    attributes = dict(form.attributes)
    factor = attributes.pop("size")
    if spatial:
        attributes["size"] = [factor] * spatial
    return dataclasses.replace(layer, forms=(dataclasses.replace(form, attributes=attributes),))


def _tensor(module: nn.Module, attribute: str) -> torch.Tensor:
    owner, _, name = attribute.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), name)
    return tensor


def _class(module: nn.Module) -> str:
    name = qualified(type(module))
    return f"torch.nn.{type(module).__name__}" if name.startswith("torch.nn.modules.") else name
