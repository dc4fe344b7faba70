"""`find_library`, which returns the module in `libraries` for a model.

`polyamp_jax.models.library` finds the library. Its module is imported only if the user's program has imported the
library.
"""

from __future__ import annotations

from typing import Any, cast

from polyamp.errors import ModelError, describe_value
from polyamp_jax.models.library import ACCEPTED_MODELS, library_of
from polyamp_jax.porting.libraries.library import PortingLibrary


def find_library(model: Any) -> PortingLibrary:
    """Return the module in `libraries` that supports a model.

    Raises:
        ModelError: the object is no model, or only a part of one.
    """
    library = library_of(model)
    if library is None:
        raise ModelError(f"model must be {ACCEPTED_MODELS}. Received: {describe_value(model)}.")
    return cast("PortingLibrary", library.file_in("porting.libraries"))
