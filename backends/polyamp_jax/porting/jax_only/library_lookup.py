"""`find_library`, which returns the module in `libraries` for a model.

The library is detected as in `polyamp_jax.models.library_detection`. Its module is imported only if the user's program
has imported the library.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, cast

from polyamp.errors import ModelError, describe_value
from polyamp_jax import compat
from polyamp_jax.models.library_detection import ACCEPTED_MODELS
from polyamp_jax.porting.libraries import function
from polyamp_jax.porting.libraries.library import Library

LIBRARIES: Final = (
    ("flax.nnx", "Module", "nnx"),
    ("flax.linen", "Module", "linen"),
    ("equinox", "Module", "equinox"),
    ("haiku", "Transformed", "haiku"),
    ("haiku", "TransformedWithState", "haiku"),
    ("haiku", "MultiTransformed", "haiku"),
    ("haiku", "MultiTransformedWithState", "haiku"),
)
"""(module of the class, name of the class, module in `libraries`). The class is that of the model or of its tuple's
first item."""


def find_library(model: Any) -> Library:
    """Return the module in `libraries` that supports a model.

    Raises:
        ModelError: the object is no model, or only a part of one.
    """
    first = model[0] if isinstance(model, tuple) and model else model
    for module, name, room in LIBRARIES:
        if any(compat.is_a(each, module, name) for each in (first, model)):  # hk.Transformed is a tuple
            return cast("Library", importlib.import_module(f"polyamp_jax.porting.libraries.{room}"))
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return cast("Library", function)
    raise ModelError(f"model must be {ACCEPTED_MODELS}. Received: {describe_value(model)}.")
