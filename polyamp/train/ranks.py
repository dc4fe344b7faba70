"""What a rank brings to `init` that the core can tell of every backend's state: versions and recipe (S32)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from polyamp._version import __version__
from polyamp.train import changes


def brought(state: Any, *, whole: bool = False) -> dict[str, list[str]]:
    """Sections for `polyamp.rules.replicas.compare`: versions and recipe, a line for each setting.

    Args:
        state: of any backend.
        whole: its arrays too: their shapes and dtypes, and a checksum of each. For states that lie in this process
            alone, and for ranks that must have everything alike.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
        >>> state = polyamp.init(MLP.random([2, 1], seed=0), recipe)
        >>> [line for line in brought(state)["recipes"] if "rate" in line]
        ['optimizer.learning_rate = 0.1']
    """
    info = state.backend.info()
    found = {
        "versions": [f"polyamp {__version__}", f"{info.framework} {info.version.partition('+')[0]}"],
        "recipes": list(_lines("", changes.settings(state))),
    }
    if whole:
        arrays = {name: a for name, a in state.backend.export_state(state).items() if not name.startswith("rng/")}
        found["parameters"] = [f"{name}: {array.dtype} {list(array.shape)}" for name, array in arrays.items()]
        found["values"] = [f"{name}: values with the checksum {_checksum(a):08x}" for name, a in arrays.items()]
    return found


def _checksum(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _lines(f"{path}.{name}" if path else str(name), inner)
    else:
        yield f"{path} = {value!r}"
