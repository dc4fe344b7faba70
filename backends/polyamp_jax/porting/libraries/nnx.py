"""`PortingLibrary` for flax.nnx modules, whose classes and settings can be read.

A parameter's name is its path in `nnx.split`, as in a polyamp state. Layers are in the order of the attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

import jax
from flax import nnx

from polyamp.context_values import temporary_value
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS
from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.layer_registration import qualified_name, registered_form
from polyamp_jax import compat
from polyamp_jax.arrays import join_path, named_leaves, path_name
from polyamp_jax.models import library_compat
from polyamp_jax.models.adapters.nnx import split_model, walk_modules
from polyamp_jax.models.call_hook import hook_calls
from polyamp_jax.models.running_state import RunningState
from polyamp_jax.porting.input_orders import input_orders, sequential_chains
from polyamp_jax.porting.jax_only.inference_flags import set_float32, set_inference_arguments, set_inference_flags
from polyamp_jax.porting.jax_only.lazy_leaves import is_movable, to_lazy
from polyamp_jax.porting.layers.activations import activation_form
from polyamp_jax.porting.libraries.flax_composites import NORM_SUBMODULES
from polyamp_jax.porting.libraries.flax_layer_table import (
    ARRAY_NAMES,
    attribute_lines,
    find_layer_spec,
    flax_chain_item,
    make_form,
)
from polyamp_jax.porting.libraries.porting_library import CallInputs, RecordCall, first_array

IGNORED_VARIABLES: Final = (nnx.Cache, nnx.Intermediate, nnx.Perturbation)
"""Variable types without weights."""
_active_record: ContextVar[RecordCall | None] = ContextVar("polyamp_recording", default=None)


def inventory(model: Any, batch: CallInputs | None) -> Inventory:
    """Return the layers; see `PortingLibrary.inventory`."""
    return _NnxWalk(model).inventory()


def arrays(model: Any) -> Mapping[str, Any]:
    """Return the arrays by name; see `PortingLibrary.arrays`."""
    parts = split_model(model)
    variables = {**named_leaves(parts.params), **named_leaves(parts.running.statistics)}
    return {name: leaf for name, leaf in variables.items() if is_movable(leaf)}


def replace_arrays(model: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a new model with other arrays; see `PortingLibrary.replace_arrays`."""
    parts = split_model(model)

    def put(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda keys, leaf: arrays.get(path_name(keys), leaf), tree)

    return parts.adapter.join(put(parts.params), RunningState(put(parts.running.statistics), parts.running.streams))


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return the model itself in inference mode; see `PortingLibrary.inference_model`."""
    model.eval()
    for path, module in walk_modules(model):
        set_inference_flags(module, vars(module))
        hook_calls(module, _call_in_inference, path == "", is_native=True)
    return model


def run(model: Any, batch: CallInputs, record: RecordCall) -> Any:
    """Return the outputs on a batch; see `PortingLibrary.run`."""
    with contextlib.ExitStack() as stack:
        inference_model(model, stack)
    for path, module in walk_modules(model):
        set_float32(module, vars(module))
        hook_calls(module, _record_call, path)
    with temporary_value(_active_record, record):
        return model(*batch.args, **batch.kwargs)


def _call_in_inference(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, is_root: bool) -> Any:
    args, kwargs = set_inference_arguments(call, args, kwargs, add=is_root)
    return call(*args, **kwargs)


def _record_call(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, path: str) -> Any:
    record = _active_record.get()
    if record is not None:
        record(path, first_array(args, kwargs), is_input=True)
    output = call(*args, **kwargs)
    if record is not None:
        if isinstance(module, nnx.RNN):  # the cell, which is the layer, runs in a scan
            record(f"{path}/cell", output[1] if isinstance(output, tuple) else output)
        record(path, output)
    return output


class _NnxWalk:
    """Traversal of a model's modules in the order of their attributes, each once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._arrays = arrays(model)
        self._streams = named_leaves(split_model(model).running.streams)
        self._paths: dict[int, list[str]] = {}
        self._first_names: dict[int, str] = {}
        self._modules: set[int] = set()
        self._reverse: dict[int, bool] = {}
        self._has_order = False
        self._other_arrays = dict.fromkeys(self._streams, "a random stream")

    def inventory(self) -> Inventory:
        """Return all layers."""
        for path, variable in _variable_paths(self._model, "", ()):
            self._paths.setdefault(id(variable), []).append(path)
        for _, module in walk_modules(self._model):  # before the layers: a Bidirectional may come after its halves
            self._note_directions(module)
        layers = list(self._under("", self._model))
        chains = sequential_chains(walk_modules(self._model), nnx.Sequential, flax_chain_item, self._is_shared)
        return Inventory(layers, "flax.nnx", self._has_order, self._other_arrays, input_orders(chains, "last"))

    def _is_shared(self, part: Any) -> bool:
        """Return whether arrays of a module have several places."""
        return any(len(self._paths[id(each)]) > 1 for _, each in _variable_paths(part, "", ()))

    def _under(self, path: str, node: Any) -> Iterator[NativeLayer]:
        if isinstance(node, nnx.Variable) or (is_movable(node) and path in self._arrays):
            yield from self._single(path, node)
            return
        if not isinstance(node, list | tuple | Mapping) and not isinstance(node, compat.nnx_container_classes()):
            if (form := activation_form(node)) is not None:
                yield NativeLayer(path, {}, (form,), getattr(node, "__name__", ""))
            return
        if id(node) in self._modules or isinstance(node, nnx.Rngs | nnx.RngStream):
            return
        self._modules.add(id(node))
        children = dict(_named_children(node))
        self._has_order |= list(children) != sorted(children)
        spec = find_layer_spec(node)
        if (form := registered_form(node)) is not None:
            yield self._layer(path, node, _nested_variables(node, frozenset()), form, qualified_name(type(node)))
            return
        if spec is not None:
            several = spec.is_composite
            variables = _nested_variables(node, NORM_SUBMODULES) if several else _own_variables(node, ARRAY_NAMES)
            if variables or spec.can_be_arrayless or spec.form is None:
                yield self._known(path, node, variables)
            children = {
                name: child for name, child in children.items() if name not in variables and _can_hold_variables(child)
            }
            if several:
                children = {name: child for name, child in children.items() if name in NORM_SUBMODULES}
        for name, child in children.items():
            yield from self._under(join_path(path, name), child)

    def _known(self, path: str, node: Any, variables: Mapping[str, Any]) -> NativeLayer:
        form = make_form(
            node, {name: tuple(_variable_value(item).shape) for name, item in variables.items()}, vars(node), path
        )
        if form.kind in RECURRENT_KINDS:
            form = Form(form.kind, form.rules, {**form.attributes, "reverse": self._reverse.get(id(node), False)})
        return self._layer(path, node, variables, form, f"flax.nnx.{type(node).__name__}")

    def _layer(self, path: str, node: Any, variables: Mapping[str, Any], form: Form, name: str) -> NativeLayer:
        leaves = {own: self._leaf(join_path(path, own), variable) for own, variable in variables.items()}
        return NativeLayer(path, leaves, (form,), name, attribute_lines(node, form, path))

    def _single(self, path: str, node: Any) -> Iterator[NativeLayer]:
        """Yield a parameter of no layer."""
        name = path.rpartition("/")[2]
        if isinstance(node, IGNORED_VARIABLES):
            self._other_arrays[self._name(path, node)] = f"nnx.{type(node).__name__} holds no weights"
        elif is_movable(_variable_value(node)):
            yield NativeLayer(path, {name: self._leaf(path, node)}, (parameter_form(name),))
        elif not isinstance(node, nnx.RngState):
            self._other_arrays[self._name(path, node)] = "no array of numbers"

    def _leaf(self, path: str, node: Any) -> InventoryLeaf:
        name = self._name(path, node)
        first = self._first_names.get(id(node))
        if first is not None:
            others = [other for other in (path, *self._paths[id(node)]) if other != name]
            return InventoryLeaf(others[0], to_lazy(name, self._arrays[name]), isinstance(node, nnx.Param), first)
        self._first_names[id(node)] = name
        return InventoryLeaf(name, to_lazy(name, self._arrays[name]), isinstance(node, nnx.Param))

    def _name(self, path: str, node: Any) -> str:
        """Return nnx's path of a variable. For a shared variable it may be that of another place."""
        return next((name for name in self._paths.get(id(node), ()) if name in self._arrays), path)

    def _note_directions(self, node: Any) -> None:
        if isinstance(node, nnx.RNN):
            self._reverse.setdefault(id(node.cell), bool(node.reverse))
        if isinstance(node, nnx.Bidirectional):
            for rnn, reverse in ((node.forward_rnn, False), (node.backward_rnn, True)):
                if isinstance(rnn, nnx.RNN):
                    self._reverse[id(rnn.cell)] = reverse


def _named_children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of a module or container, in its order."""
    if isinstance(node, Mapping) and not isinstance(node, compat.nnx_container_classes()):
        yield from ((str(name), item) for name, item in node.items())
    elif isinstance(node, list | tuple):
        yield from ((str(number), item) for number, item in enumerate(node))
    elif isinstance(node, compat.nnx_container_classes()):
        yield from library_compat.nnx_attributes(node).items()


def _variable_paths(node: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield every path of every variable; a shared variable has several."""
    if isinstance(node, nnx.Variable):
        yield path, node
    elif id(node) not in around:
        for name, child in _named_children(node):
            yield from _variable_paths(child, join_path(path, name), (*around, id(node)))


def _can_hold_variables(value: Any) -> bool:
    """Return whether a value may contain variables. A function passed to a flax layer is no separate layer."""
    return isinstance(value, (nnx.Variable, list, tuple, Mapping, *compat.nnx_container_classes()))


def _own_variables(node: Any, names: frozenset[str]) -> dict[str, Any]:
    return {name: child for name, child in _named_children(node) if name in names and isinstance(child, nnx.Variable)}


def _nested_variables(node: Any, but: frozenset[str]) -> dict[str, Any]:
    """Return the variables of a layer of several modules by path, without random streams, caches or norms."""
    return {
        path: variable
        for path, variable in _variable_paths(node, "", ())
        if not isinstance(variable, (nnx.RngState, *IGNORED_VARIABLES)) and path.partition("/")[0] not in but
    }


def _variable_value(node: Any) -> Any:
    return node.get_value() if isinstance(node, nnx.Variable) else node
