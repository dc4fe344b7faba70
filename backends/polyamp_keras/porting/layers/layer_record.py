"""`LayerRecord`, one canonical layer read from a Keras layer, and helpers that find a layer's variables by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.errors import PortError
from polyamp.porting.layouts.layer_kinds import to_json_value
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Shape
from polyamp_keras.compat import own_non_trainable_variables, own_trainable_variables
from polyamp_keras.models.layers import list_layers


class LayerRecord(NamedTuple):
    """One canonical layer of a Keras layer, from which `inventory` builds a `NativeLayer`.

    Attributes:
        form: its form.
        arrays: native name in the form's rules -> variable.
        suffix: appended to the Keras layer's path, such as "forward"; "" if the layer is this single reading.
        owner: layer that has the attributes, for lines of code; None for the Keras layer itself.
        inner_layers: inner layers that this reading covers, so they are not listed separately.
    """

    form: Form
    arrays: Mapping[str, Any] = {}
    suffix: str = ""
    owner: Any = None
    inner_layers: tuple[Any, ...] = ()


LayerReader = Callable[[Any], list[LayerRecord]]
"""Function from a layer to its canonical layers."""
FormMaker = Callable[[Mapping[str, Shape]], Form]
"""Function from the shapes of a layer's variables by name to its form. Raises ValueError if they do not fit."""


class LayerRow(NamedTuple):
    """Table row of a class of Keras layers.

    Attributes:
        read: function from a layer to its canonical layers.
        variables: possible names of its variables in the order of creation, likeliest first; empty if a weights file
            has no group of such a layer.
        file_forms: function from the shapes of variables in a weights file to possible forms, likeliest first.
        fits: whether variables of unknown names in a weights file may be those of such a layer, by their shapes.
    """

    read: LayerReader
    variables: tuple[tuple[str, ...], ...] = ()
    file_forms: Callable[[Mapping[str, Shape]], Iterable[Form]] = lambda shapes: ()
    fits: Callable[[Sequence[Shape]], bool] = lambda shapes: False


def weight_layer(
    make_form: FormMaker,
    attributes: Callable[[Any], Mapping[str, Any]],
    *variables: str,
    fits: Callable[[Sequence[Shape]], bool],
) -> LayerRow:
    """Return the row of a class whose variables are one canonical layer.

    Args:
        make_form: function that returns its form.
        attributes: function from a layer to the attributes that its variables do not show.
        variables: possible names of its variables, separated by spaces.
        fits: see `LayerRow`.
    """
    return LayerRow(
        lambda layer: read_variables(layer, make_form, attributes(layer)),
        tuple(tuple(names.split()) for names in variables),
        lambda shapes: [make_form(shapes)],
        fits,
    )


def are_of_channels(shapes: Sequence[Shape], count: int) -> bool:
    """Return whether there are `count` arrays of one axis and the same length, as a norm has."""
    return len(shapes) == count and len({*shapes}) == 1 and len(shapes[0]) == 1


def read_variables(
    layer: Any, make_form: FormMaker, attributes: Mapping[str, Any], kind: str = ""
) -> list[LayerRecord]:
    """Read the variables of a layer as one canonical layer, of another `kind` than the form's if that is given."""
    variables = own_variables(layer)
    form = make_form({name: tuple(variable.shape) for name, variable in variables.items()})
    whole = plain_form(kind or form.kind, form.rules, **{**attributes, **form.attributes})
    return [LayerRecord(whole, {name: variables[name] for rule in form.rules for name in rule.native})]


def array_rules(shapes: Mapping[str, Shape], **canonical_names: str) -> tuple[Rule, ...]:
    """Return the rules of those variables that exist, native name = canonical name."""
    return tuple(Rule((native,), (name,)) for native, name in canonical_names.items() if native in shapes)


def own_variables(layer: Any) -> dict[str, Any]:
    """Return name -> variable for the variables that a layer created itself.

    As in checkpoints, repeated names get a number, and a variable that the user did not name is called "variable".

    >>> import keras
    >>> layer = keras.layers.BatchNormalization()
    >>> layer.build((None, 3))
    >>> list(own_variables(layer))
    ['gamma', 'beta', 'moving_mean', 'moving_variance']
    """
    found: dict[str, Any] = {}
    siblings: Counter[str] = Counter()
    for variable in [*own_trainable_variables(layer), *own_non_trainable_variables(layer)]:
        word = re.sub(r"^variable_\d+$", "variable", variable.name)
        number, siblings[word] = siblings[word], siblings[word] + 1
        found[f"{word}_{number}" if number else word] = variable
    return found


def all_variables(layer: Any) -> dict[str, Any]:
    """Return name -> variable for a layer and its inner layers: "kernel", "query/kernel"."""
    found: dict[str, Any] = {}
    for module in list_layers(layer):
        prefix = f"{module.stable_path}/" if module.stable_path else ""
        for name, variable in own_variables(module.layer).items():
            found.setdefault(prefix + name, variable)
    return found


def inner_layers(layer: Any) -> tuple[Any, ...]:
    """Return all layers inside a layer, without the layer itself."""
    return tuple(module.layer for module in list_layers(layer))[1:]


def plain_form(kind: str, rules: tuple[Rule, ...], **attributes: Any) -> Form:
    """Return a form with plain attributes, without those that are `UNKNOWN`."""
    return Form(kind, rules, {name: to_json_value(value) for name, value in attributes.items() if value is not UNKNOWN})


UNKNOWN = object()
"""Value of an attribute that cannot be read. Such attributes are not compared."""


def opaque_kind(layer: Any, reason: str) -> str:
    """Return a kind for a layer that no canonical kind describes. It moves only to a layer of the same class and
    settings.

    >>> import keras
    >>> opaque_kind(keras.layers.PReLU(), "slopes of shape [3, 4]")
    'keras.PReLU (slopes of shape [3, 4])'
    """
    return f"{class_name(layer)} ({reason})"


def class_name(layer: Any) -> str:
    """Return a layer's class name for messages: "keras.Dense", "my_package.Block"."""
    kind = type(layer)
    root = kind.__module__.partition(".")[0]
    return f"{root}.{kind.__qualname__}"


def refuse_modified_kernel(layer: Any, path: str) -> None:
    """Raise if a layer does not compute with its plain kernel: it is quantized or has LoRA matrices.

    Raises:
        PortError: the layer is one of these; the message names it and what to do.
    """
    mode = getattr(layer, "quantization_mode", None)
    if mode is not None:
        raise PortError(
            f"layer {path!r} ({class_name(layer)}) is quantized ({mode}): its kernel holds {mode} codes, which have no "
            "canonical layout. Move the model that it was quantized from, and quantize the moved one."
        )
    if getattr(layer, "lora_enabled", False):
        raise PortError(
            f"layer {path!r} ({class_name(layer)}) has LoRA matrices of rank {layer.lora_rank} beside its kernel, "
            "which no other framework's layer has. Keras merges them into the kernel when it saves: "
            "model.save_weights, then load_weights into the same model built without LoRA, and move that one."
        )
