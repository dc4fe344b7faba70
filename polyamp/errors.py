"""The exceptions that polyamp raises on purpose, and the wording helpers they share.

All derive from `PolyampError`; each also derives from the built-in that a caller would
expect (`ValueError`, `TypeError`, `ImportError`), so existing handlers keep working. A message names the
argument, what is accepted, what came, and what to do next.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any


class PolyampError(Exception):
    """Base class of the errors that polyamp raises on purpose; a missing file stays a `FileNotFoundError`."""


class ArgumentError(PolyampError, TypeError):
    """An argument is unknown, missing or of another kind: `lr=` for `learning_rate=`, a model for a state."""


class PolicyError(PolyampError, ValueError):
    """A precision policy is unknown, contradictory, or has no word in a dialect."""


class RecipeError(PolyampError, ValueError):
    """A recipe, an optimizer spec or a schedule holds an impossible value; names its path in the file."""


class LossScaleError(PolyampError, ValueError):
    """A loss scaler has impossible constants, is wrapped in another one, or its `scale` was never called."""


class LossScaleStuckError(PolyampError, RuntimeError):
    """Every step is skipped although the loss scale is at its floor: the gradients themselves are broken."""


class LossError(PolyampError, ValueError):
    """`loss_fn` returned something that is not a scalar floating loss, or a loss got mismatched shapes."""


class BatchError(PolyampError, ValueError):
    """A batch cannot be split into the micro-batches that the recipe asks for."""


class ModelError(PolyampError, TypeError):
    """A model cannot be trained: no parameters, or parameters of a kind that has no gradient."""


class GradientError(PolyampError, ValueError):
    """Gradients do not fit the state: one is missing, has another shape, or is not floating."""


class StateError(PolyampError, RuntimeError):
    """A state can no longer be used: a step consumed its arrays, or `refresh` made another of it."""


class UnsupportedError(PolyampError, NotImplementedError):
    """What was asked for cannot be honoured by this backend or device; raised before the first update."""


class ReplicaError(PolyampError, RuntimeError):
    """Another rank raised, ended, was killed, or trains something else; names it. The state is not to be used again."""


class TraceError(PolyampError, TypeError):
    """A function cannot be traced: it decides in Python on an array's value, or has side effects."""


class CheckpointError(PolyampError, ValueError):
    """A checkpoint is damaged, belongs to another model or recipe, or holds what no state can hold."""


class PortError(PolyampError, ValueError):
    """A model or a training state cannot be moved as it was asked for; nothing was changed."""


class BackendError(PolyampError, ImportError):
    """A backend is unknown, claimed twice, or fails to import."""


class BackendNotInstalledError(BackendError):
    """The backend is known but its framework is not installed; the message holds the install command."""


def nearest(word: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """The known words closest to `word`, best first.

    >>> nearest("mixed_flot16", ["float32", "mixed_float16", "O2"])
    ['mixed_float16']
    """
    import difflib

    words = list(known)
    same = [name for name in words if _plain(name) == _plain(word)]  # but for letter case, blanks, hyphens
    if same:
        return same[:limit]
    lower = {name.lower(): name for name in reversed(words)}
    return [lower[name] for name in difflib.get_close_matches(word.lower(), list(lower), n=limit, cutoff=0.5)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence such as `" Did you mean 'adam'?"`, or an empty string when nothing is close.

    >>> did_you_mean("adamm", ["adam", "sgd"])
    " Did you mean 'adam'?"
    """
    close = nearest(word, known)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def described(value: Any) -> str:
    """What a message calls a value that came: its kind, and the value itself where that is short.

    >>> described([1, 2]), described("bf16"), described(None), described(dict), described(len)
    ('a list of 2', "'bf16'", 'None', 'the class dict', 'a function (len)')
    """
    kind = type(value)
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        shown = repr(value)
        return shown if len(shown) < 80 else f"{shown[:77]}..."
    if isinstance(value, type):
        return f"the class {getattr(value, 'tag', '') or value.__qualname__}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"a function ({value.__qualname__})"
    if kind in (list, tuple, set, frozenset):
        return f"a {kind.__name__} of {len(value)}"
    if kind.__module__ in ("builtins", "pathlib") or kind.__module__.startswith("polyamp"):
        return _with_article(kind.__qualname__)
    if "dtype" in kind.__name__.lower():
        return repr(value)
    return f"{_with_article(kind.__qualname__)} ({kind.__module__.partition('.')[0]})"


def as_plain(value: Any) -> str:
    """What to do with an array's scalar in the place of a plain number, a blank first; "" for anything else.

    >>> import numpy as np
    >>> as_plain(np.float32(0.5)), as_plain(0.5)
    (" That is an array's scalar, and recipes are plain data: write value.item().", '')
    """
    scalar = hasattr(value, "item") and hasattr(value, "dtype")
    return " That is an array's scalar, and recipes are plain data: write value.item()." if scalar else ""


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _plain(word: str) -> str:
    """A word without what a typing hand gets wrong: letter case, blanks, `-` for `_`."""
    return "".join(letter for letter in word.lower() if letter.isalnum())
