"""`Part`: a canonical layer that a Keras layer is, or is made of, and how its variables are found by name.

The tables of forms (`layers`, `convolutions`, `recurrent`, `attention`) make them, `walk` makes an inventory of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyamp.errors import PortError
from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.kinds import plain
from polyamp_tensorflow.compat import own_state, own_trainable
from polyamp_tensorflow.models.layers import modules

Reader = Callable[[Any], "list[Part]"]
"""A layer -> the canonical layers that it is."""


class Part(NamedTuple):
    """One canonical layer.

    Attributes:
        form: its form.
        arrays: native name in the form's rules -> variable.
        suffix: what the path has beyond the Keras layer's, "forward"; "" where the layer is this one part.
        owner: the layer whose attributes they are, for lines of code; the Keras layer itself if None.
        inside: layers inside that this part stands for, so that they are not listed themselves.
    """

    form: Form
    arrays: Mapping[str, Any] = {}
    suffix: str = ""
    owner: Any = None
    inside: tuple[Any, ...] = ()


def own(layer: Any) -> dict[str, Any]:
    """Name -> variable, of the variables that a layer created itself. One named several times has a number, and one
    without a name of the user's is called "variable": as in checkpoints.

    >>> import keras
    >>> layer = keras.layers.BatchNormalization()
    >>> layer.build((None, 3))
    >>> list(own(layer))
    ['gamma', 'beta', 'moving_mean', 'moving_variance']
    """
    found: dict[str, Any] = {}
    siblings: Counter[str] = Counter()
    for variable in [*own_trainable(layer), *own_state(layer)]:
        word = re.sub(r"^variable_\d+$", "variable", variable.name)
        number, siblings[word] = siblings[word], siblings[word] + 1
        found[f"{word}_{number}" if number else word] = variable
    return found


def under(layer: Any) -> dict[str, Any]:
    """Name -> variable, of all variables of a layer and those inside: "kernel", "query/kernel"."""
    found: dict[str, Any] = {}
    for module in modules(layer):
        prefix = f"{module.stable_path}/" if module.stable_path else ""
        for name, variable in own(module.layer).items():
            found.setdefault(prefix + name, variable)
    return found


def inside(layer: Any) -> tuple[Any, ...]:
    """All layers inside a layer, but itself."""
    return tuple(module.layer for module in modules(layer))[1:]


def form(kind: str, rules: tuple[Rule, ...], **attributes: Any) -> Form:
    """A form with plain attributes; those that are `UNKNOWN` are left out."""
    return Form(kind, rules, {name: plain(value) for name, value in attributes.items() if value is not UNKNOWN})


UNKNOWN = object()
"""An attribute that cannot be read, which is then not compared."""


def only(layer: Any, reason: str) -> str:
    """A kind for a layer that no canonical kind can say: it moves to one of the same class and settings alone.

    >>> import keras
    >>> only(keras.layers.PReLU(), "slopes of shape [3, 4]")
    'keras.PReLU (slopes of shape [3, 4])'
    """
    return f"{class_name(layer)} ({reason})"


def class_name(layer: Any) -> str:
    """What messages call a layer's class: "keras.Dense", "my_package.Block"."""
    kind = type(layer)
    root = kind.__module__.partition(".")[0]
    return f"{root}.{kind.__qualname__}"


def refuse_rewritten(layer: Any, path: str) -> None:
    """Refuse a layer whose kernel is not what it computes with: quantized, or with LoRA beside it.

    Raises:
        PortError: names the layer, and what to do.
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


def present(rules: tuple[Rule, ...], arrays: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules whose native arrays are there: a layer without a bias has none for it."""
    return tuple(rule for rule in rules if all(name in arrays for name in rule.native))
