"""Framework-independent sections of a rank's fingerprint at `init`: versions and recipe (S32)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from polyamp._version import __version__
from polyamp.train import recipe_changes


def state_fingerprint(state: Any, *, whole: bool = False) -> dict[str, list[str]]:
    """Return sections for `polyamp.rules.rank_comparison.compare_ranks`: versions and recipe, one line per setting.

    Args:
        state: a state of any backend.
        whole: add shape, dtype and a checksum of each array. For states in this process only, and for ranks whose
            arrays must all be equal.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
        >>> state = polyamp.init(MLP.random([2, 1], seed=0), recipe)
        >>> [line for line in state_fingerprint(state)["recipes"] if "rate" in line]
        ['optimizer.learning_rate = 0.1']
    """
    info = state.backend.info()
    found = {
        "versions": [f"polyamp {__version__}", f"{info.framework} {info.version.partition('+')[0]}"],
        "recipes": list(_setting_lines("", recipe_changes.state_settings(state))),
    }
    if whole:
        arrays = {name: a for name, a in state.backend.export_state(state).items() if not name.startswith("rng/")}
        found["parameters"] = [f"{name}: {array.dtype} {list(array.shape)}" for name, array in arrays.items()]
        found["values"] = [f"{name}: values with the checksum {_checksum(a):08x}" for name, a in arrays.items()]
    return found


def _checksum(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def _setting_lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _setting_lines(f"{path}.{name}" if path else str(name), inner)
    else:
        yield f"{path} = {value!r}"
