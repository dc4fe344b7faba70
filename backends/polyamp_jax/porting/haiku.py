"""haiku models: `(hk.Transformed, params)` and `(hk.TransformedWithState, (params, state))`. Loaded by `converter`.

Their arrays are mappings of names; a batch shows the modules behind these names (`haiku_modules`), and where there is
none the names and shapes say what a layer may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import haiku as hk

from polyamp.errors import PortError
from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.register import form_of, qualified
from polyamp_jax import compat
from polyamp_jax.models.haiku import adapt_haiku
from polyamp_jax.porting import haiku_forms as forms
from polyamp_jax.porting import haiku_modules, places
from polyamp_jax.porting.flax_forms import RefusedError
from polyamp_jax.porting.haiku_forms import Seen, Shapes
from polyamp_jax.porting.haiku_names import by_names, composite, parameter
from polyamp_jax.porting.library import Batch, Record
from polyamp_jax.porting.places import LONG, Place, Weight

_COUNTER: Final = "counts the batches behind a moving average; a port sets it so that nothing is corrected any more"
_HIDDEN: Final = "the moving average before it is corrected for its start; a port gives it the same values"


def inventory(model: Any, batch: Batch | None) -> Inventory:
    """See `Library.inventory`."""
    found = _Arrays(model)
    seen = {} if batch is None else haiku_modules.seen(model, batch)
    layers = list(found.layers(seen))
    if seen:
        order = {path: number for number, path in enumerate(seen)}
        with_arrays = {layer.path for layer in layers}
        layers += [layer for path, each in seen.items() if path not in with_arrays for layer in _bare(path, each)]
        layers.sort(key=lambda layer: order.get(_owner(layer.path, order), len(order)))
    return Inventory(layers, "haiku", bool(seen), found.left)


def arrays(model: Any) -> Mapping[str, Any]:
    """See `Library.arrays`."""
    return {name: weight.array for name, weight in _Arrays(model).weights().items()}


def replaced(model: Any, arrays: Mapping[str, Any]) -> Any:
    """See `Library.replaced`."""
    return places.replaced(model, _Arrays(model).weights(), arrays)


def run(model: Any, batch: Batch, record: Record) -> Any:
    """See `Library.run`."""
    return haiku_modules.run(model, batch, record)


class _Arrays:
    """The arrays of a model, by module.

    Attributes:
        modules: module -> its weights by name; averages of a batch norm are "mean" and "variance".
        left: name of an array that is no weight -> why.
    """

    def __init__(self, model: Any) -> None:
        adapt_haiku(model)  # refuses what is none
        tree = places.numbered(model)
        held = tree[1:] if len(tree) == 3 else tree[1]
        params, state = held if isinstance(held, tuple) else (held, {})
        self.modules: dict[str, dict[str, tuple[str, Weight]]] = {}
        self.left: dict[str, str] = {}
        for module, leaves in params.items():
            for leaf, place in leaves.items():
                self._add(module, leaf, f"{module}/{leaf}", Weight(place))
        for module, leaves in state.items():
            self._state(module, leaves, params)

    def _add(self, module: str, leaf: str, name: str, weight: Weight) -> None:
        if weight.place.is_weight:
            self.modules.setdefault(module, {})[leaf] = (name, weight)
        else:
            self.left[name] = "no floating numbers"

    def _state(self, module: str, leaves: Mapping[str, Place], params: Mapping[str, Any]) -> None:
        if "u0" in leaves:
            raise PortError(
                f"{module!r} is a hk.SpectralNorm, which divides weights by a number that it learns from the batches; "
                "no other framework has it in the same way. Port the model without it, and with the weights that it "
                "makes."
            )
        left, average = dict(leaves), leaves.get("average")
        if average is not None and {"hidden", "counter"} <= set(leaves):
            hidden, counter = left.pop("hidden"), left.pop("counter")
            self.left |= {f"{module}/hidden": _HIDDEN, f"{module}/counter": _COUNTER}
            weight = Weight(left.pop("average"), False, same=(hidden.number,), settled={counter.number: LONG})
            owner, _, last = module.rpartition("/~/")
            role = {"mean_ema": "mean", "var_ema": "variance"}.get(last)
            if owner and role:
                self._add(owner, role, f"{module}/average", weight)
            else:
                self._add(module, "average", f"{module}/average", weight)
        for leaf, place in left.items():
            self._add(module, leaf, f"{module}/{leaf}", Weight(place, trainable=False))

    def weights(self) -> dict[str, Weight]:
        """Name -> weight."""
        return {name: weight for _, arrays in self._unstacked() for name, weight in arrays.values()}

    def _unstacked(self) -> Iterator[tuple[str, dict[str, tuple[str, Weight]]]]:
        """The modules, one for each layer of a stack."""
        for module, arrays in self.modules.items():
            segments = module.split("/")
            stacks = [number for number, segment in enumerate(segments) if compat.is_layer_stack(segment)]
            lengths = {weight.place.shape[:1] for _, weight in arrays.values()}
            if not stacks or len(lengths) != 1 or lengths == {()}:
                yield module, arrays
                continue
            for index in range(lengths.pop()[0]):
                at = stacks[0] + 1
                path = "/".join([*segments[:at], str(index), *segments[at:]])
                yield path, {leaf: (f"{path}/{leaf}", _part(weight, index)) for leaf, (_, weight) in arrays.items()}

    def layers(self, seen: Mapping[str, Seen]) -> Iterator[NativeLayer]:
        """The layers; of modules that belong together, one."""
        modules = dict(self._unstacked())
        while modules:
            module = next(iter(modules))
            parent = module.rpartition("/")[0]
            together = [path for path in modules if path.rpartition("/")[0] == parent] if parent else []
            whole = composite(
                parent, seen.get(parent), {path.rpartition("/")[2]: _shapes(modules[path]) for path in together}
            )
            if whole is None or not together:
                yield from _module(module, modules.pop(module), seen.get(module))
                continue
            joined = {
                f"{path.rpartition('/')[2]}/{leaf}" if len(together) > 1 else leaf: array
                for path in together
                for leaf, array in modules.pop(path).items()
            }
            yield _layer(parent, joined, whole(_shapes(joined)), seen.get(parent))


def _part(weight: Weight, index: int) -> Weight:
    return Weight(weight.place.part(index), weight.trainable, None, weight.same, weight.settled)


def _shapes(arrays: Mapping[str, tuple[str, Weight]]) -> dict[str, tuple[int, ...]]:
    return {leaf: weight.place.shape for leaf, (_, weight) in arrays.items()}


def _module(path: str, arrays: dict[str, tuple[str, Weight]], seen: Seen | None) -> Iterator[NativeLayer]:
    """The layer of a module, and the parameters that are of none."""
    shapes = _shapes(arrays)
    found = _registered(seen, arrays)
    if found is None:
        try:
            found = _known(path, shapes, seen)
        except RefusedError as error:
            raise PortError(f"{_class(seen)} at {path!r} cannot be moved: {error}.") from None
    named = {name for form in found[:1] for rule in form.rules for name in rule.native}
    if found:
        yield _layer(path, {leaf: array for leaf, array in arrays.items() if leaf in named}, found, seen)
    for leaf, array in arrays.items():
        if leaf not in named:
            yield _layer(f"{path}/{leaf}", {"value": array}, parameter(leaf, shapes[leaf]), None)


def _known(path: str, shapes: Shapes, seen: Seen | None) -> tuple[Form, ...]:
    """The form of a module of haiku's own; of another one the forms that its names allow."""
    for kind in () if seen is None else type(seen.module).__mro__:
        if kind in MAKERS:
            return (MAKERS[kind](shapes, seen),)
    return by_names(path, shapes)


def _registered(seen: Seen | None, arrays: Mapping[str, Any]) -> tuple[Form, ...] | None:
    form = None if seen is None else form_of(seen.module)
    if form is None:
        return None
    named = sorted(name for rule in form.rules for name in rule.native)
    if named != sorted(arrays):
        raise PortError(f"the form of {_class(seen)} names the arrays {named}, and it has {sorted(arrays)}.")
    return (form,)


def _layer(
    path: str, arrays: Mapping[str, tuple[str, Weight]], found: tuple[Form, ...], seen: Seen | None
) -> NativeLayer:
    leaves = {
        leaf: Leaf(name, weight.lazy(name), weight.trainable, weight.tied) for leaf, (name, weight) in arrays.items()
    }
    kind = _class(seen)

    def line(word: str) -> Callable[[Any], str]:
        return lambda value: f"{kind}(..., {word}={value!r})  # at {path}"

    words = {} if seen is None else {name: word for name, word in _WORDS.items() if name in found[0].attributes}
    return NativeLayer(path, leaves, found, kind, {name: line(word) for name, word in words.items()})


def _bare(path: str, seen: Seen) -> Iterator[NativeLayer]:
    """A module without arrays, where it does something that is compared."""
    for kind in type(seen.module).__mro__:
        if kind in WITHOUT_ARRAYS:
            yield _layer(path, {}, (WITHOUT_ARRAYS[kind]({}, seen),), seen)
            return


def _class(seen: Seen | None) -> str:
    if seen is None:
        return ""
    kind = type(seen.module)
    return f"hk.{kind.__name__}" if kind.__module__.startswith("haiku.") else qualified(kind)


def _owner(path: str, known: Mapping[str, int]) -> str:
    """The module that a path is of or in."""
    while path and path not in known:
        path = path.rpartition("/")[0]
    return path


MAKERS: Final[Mapping[type, forms.Maker]] = {
    hk.Linear: forms.dense,
    hk.ConvND: forms.conv,
    hk.ConvNDTranspose: forms.conv_transpose,
    hk.DepthwiseConv1D: forms.conv,
    hk.DepthwiseConv2D: forms.conv,
    hk.DepthwiseConv3D: forms.conv,
    hk.Embed: forms.embedding,
    hk.LayerNorm: forms.norm,
    hk.RMSNorm: forms.rms_norm,
    hk.GroupNorm: forms.group_norm,
    hk.BatchNorm: forms.batch_norm,
    hk.GRU: forms.gru,
}
WITHOUT_ARRAYS: Final[Mapping[type, forms.Maker]] = {
    hk.MaxPool: forms.pooling("max"),
    hk.AvgPool: forms.pooling("average"),
    hk.Flatten: forms.flatten,
}
_WORDS: Final = {
    "epsilon": "eps",
    "momentum": "decay_rate",
    "strides": "stride",
    "padding": "padding",
    "dilation": "rate",
    "groups": "feature_group_count",
}
