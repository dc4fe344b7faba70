"""flax.nnx: modules, whose classes and settings are there to be read. Loaded by `converter`.

A parameter's name is its path in `nnx.split`, as in a polyamp state; layers come in the order of the attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final

import jax
from flax import nnx

from polyamp.errors import ModelError
from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.register import form_of, qualified
from polyamp_jax import compat
from polyamp_jax.arrays import named_leaves, path_name
from polyamp_jax.models.flax import adapt_nnx
from polyamp_jax.models.parts import Running
from polyamp_jax.porting.activations import activation
from polyamp_jax.porting.flax_forms import parameter
from polyamp_jax.porting.flax_table import ARRAYS, BARE, CELLS, COMPOSITE, MAKERS, class_of, lines, made
from polyamp_jax.porting.inference import quiet, still
from polyamp_jax.porting.leaves import lazy, movable
from polyamp_jax.porting.library import Batch, Record
from polyamp_jax.porting.linen_names import NORMS

LEFT: Final = (nnx.Cache, nnx.Intermediate, nnx.Perturbation)
"""Variables that hold no weights."""
_recording: ContextVar[Record | None] = ContextVar("polyamp_recording", default=None)


def inventory(model: Any, batch: Batch | None) -> Inventory:
    """See `Library.inventory`."""
    _check(model)
    return _Walk(model).inventory()


def arrays(model: Any) -> Mapping[str, Any]:
    """See `Library.arrays`."""
    _check(model)
    parts = adapt_nnx(model)
    held = {**named_leaves(parts.params), **named_leaves(parts.running.statistics)}
    return {name: leaf for name, leaf in held.items() if movable(leaf)}


def replaced(model: Any, arrays: Mapping[str, Any]) -> Any:
    """See `Library.replaced`."""
    parts = adapt_nnx(model)

    def put(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda keys, leaf: arrays.get(path_name(keys), leaf), tree)

    return parts.adapter.join(put(parts.params), Running(put(parts.running.statistics), parts.running.streams))


def run(model: Any, batch: Batch, record: Record) -> Any:
    """See `Library.run`."""
    model.eval()
    for keys, module in list(compat.nnx_modules(model)):
        still(module, dict(vars(module)))
        kind: Any = type(module)
        if callable(module):
            object.__setattr__(module, "__class__", _recorded(kind, "/".join(map(str, keys))))
    args, kwargs = quiet(model.__call__, batch.args, batch.kwargs, add=True)
    token = _recording.set(record)
    try:
        return model(*args, **kwargs)
    finally:
        _recording.reset(token)


def _check(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise ModelError("pass an nnx model as the module itself; it holds its own variables.")


@functools.lru_cache(maxsize=4096)
def _recorded(kind: Any, path: str) -> type:
    """A subclass whose calls are told of, one for each class and path: JAX keeps the classes of nnx for ever."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = quiet(functools.partial(kind.__call__, self), args, kwargs, add=False)
        output = kind.__call__(self, *args, **kwargs)
        if (record := _recording.get()) is not None:
            if isinstance(self, nnx.RNN):  # its cell, which is the layer, runs in a scan
                record(f"{path}/cell", output[1] if isinstance(output, tuple) else output)
            record(path, output)
        return output

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


class _Walk:
    """A model's modules in the order of their attributes, each once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._there = arrays(model)
        self._streams = named_leaves(adapt_nnx(model).running.streams)
        self._paths: dict[int, list[str]] = {}
        self._listed: dict[int, str] = {}
        self._modules: set[int] = set()
        self._reverse: dict[int, bool] = {}
        self._ordered = False
        self._left = dict.fromkeys(self._streams, "a random stream")

    def inventory(self) -> Inventory:
        """All layers."""
        for path, variable in _variables(self._model, "", ()):
            self._paths.setdefault(id(variable), []).append(path)
        layers = list(self._under("", self._model))
        return Inventory(layers, "flax.nnx", self._ordered, self._left)

    def _under(self, path: str, node: Any) -> Iterator[NativeLayer]:
        if isinstance(node, nnx.Variable) or (movable(node) and path in self._there):
            yield from self._single(path, node)
            return
        if not isinstance(node, list | tuple | Mapping) and not isinstance(node, compat.nnx_objects()):
            if (form := activation(node)) is not None:
                yield NativeLayer(path, {}, (form,), getattr(node, "__name__", ""))
            return
        if id(node) in self._modules or isinstance(node, nnx.Rngs | nnx.RngStream):
            return
        self._modules.add(id(node))
        children = dict(_children(node))
        self._ordered |= list(children) != sorted(children)
        self._note_directions(node)
        kind = class_of(node)
        if (form := form_of(node)) is not None:
            yield self._layer(path, node, _inside(node, frozenset()), form, qualified(type(node)))
            return
        if kind is not None:
            several = MAKERS.get(kind.__name__) in COMPOSITE
            held = _inside(node, NORMS) if several else _own(node, ARRAYS)
            if held or kind.__name__ in BARE or kind.__name__ not in MAKERS:
                yield self._known(path, node, held)
            children = {name: child for name, child in children.items() if name not in held and _holds(child)}
            if several:
                children = {name: child for name, child in children.items() if name in NORMS}
        for name, child in children.items():
            yield from self._under(f"{path}/{name}" if path else name, child)

    def _known(self, path: str, node: Any, held: Mapping[str, Any]) -> NativeLayer:
        form = made(node, {name: tuple(_value(item).shape) for name, item in held.items()}, vars(node), path)
        if form.kind in CELLS:
            form = Form(form.kind, form.rules, {**form.attributes, "reverse": self._reverse.get(id(node), False)})
        return self._layer(path, node, held, form, f"flax.nnx.{type(node).__name__}")

    def _layer(self, path: str, node: Any, held: Mapping[str, Any], form: Form, name: str) -> NativeLayer:
        leaves = {own: self._leaf(f"{path}/{own}" if path else own, variable) for own, variable in held.items()}
        return NativeLayer(path, leaves, (form,), name, lines(node, form, path))

    def _single(self, path: str, node: Any) -> Iterator[NativeLayer]:
        """A parameter of no layer."""
        name = path.rpartition("/")[2]
        if isinstance(node, LEFT):
            self._left[self._name(path, node)] = f"nnx.{type(node).__name__} holds no weights"
        elif movable(_value(node)):
            yield NativeLayer(path, {name: self._leaf(path, node)}, (parameter(name),))
        elif not isinstance(node, nnx.RngState):
            self._left[self._name(path, node)] = "no array of numbers"

    def _leaf(self, path: str, node: Any) -> Leaf:
        name = self._name(path, node)
        first = self._listed.get(id(node))
        if first is not None:
            others = [other for other in (path, *self._paths[id(node)]) if other != name]
            return Leaf(others[0], lazy(name, self._there[name]), isinstance(node, nnx.Param), first)
        self._listed[id(node)] = name
        return Leaf(name, lazy(name, self._there[name]), isinstance(node, nnx.Param))

    def _name(self, path: str, node: Any) -> str:
        """nnx's own path of a variable, which may be that of another place where it is used."""
        return next((name for name in self._paths.get(id(node), ()) if name in self._there), path)

    def _note_directions(self, node: Any) -> None:
        if isinstance(node, nnx.RNN):
            self._reverse.setdefault(id(node.cell), bool(node.reverse))
        if isinstance(node, nnx.Bidirectional):
            for rnn, reverse in ((node.forward_rnn, False), (node.backward_rnn, True)):
                if isinstance(rnn, nnx.RNN):
                    self._reverse[id(rnn.cell)] = reverse


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """What a module or a container holds, in its own order."""
    if isinstance(node, Mapping) and not isinstance(node, compat.nnx_objects()):
        yield from ((str(name), item) for name, item in node.items())
    elif isinstance(node, list | tuple):
        yield from ((str(number), item) for number, item in enumerate(node))
    elif isinstance(node, compat.nnx_objects()):
        yield from compat.nnx_attributes(node).items()


def _variables(node: Any, path: str, around: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Every path of every variable: of one that is shared, several."""
    if isinstance(node, nnx.Variable):
        yield path, node
    elif id(node) not in around:
        for name, child in _children(node):
            yield from _variables(child, f"{path}/{name}" if path else name, (*around, id(node)))


def _holds(value: Any) -> bool:
    """Whether a value may hold variables: a function that a layer of flax is given is no layer of its own."""
    return isinstance(value, (nnx.Variable, list, tuple, Mapping, *compat.nnx_objects()))


def _own(node: Any, names: frozenset[str]) -> dict[str, Any]:
    return {name: child for name, child in _children(node) if name in names and isinstance(child, nnx.Variable)}


def _inside(node: Any, but: frozenset[str]) -> dict[str, Any]:
    """The variables of a layer of several modules, by their paths in it; no random streams, caches or norms."""
    return {
        path: variable
        for path, variable in _variables(node, "", ())
        if not isinstance(variable, (nnx.RngState, *LEFT)) and path.partition("/")[0] not in but
    }


def _value(node: Any) -> Any:
    return node.get_value() if isinstance(node, nnx.Variable) else node
