"""Exceptions of polyamp, and the helpers for their messages.

All derive from `PolyampError`. Each also derives from the built-in that a caller would expect (`ValueError`,
`TypeError`, `ImportError`), so existing handlers keep working. A message names the argument, the accepted values, the
received value and what to do next.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any


class PolyampError(Exception):
    """Base class of polyamp's errors; a missing file stays a `FileNotFoundError`."""


class ArgumentError(PolyampError, TypeError):
    """An argument is unknown, missing or of another kind: `lr=` for `learning_rate=`, or a model for a state."""


class PolicyError(PolyampError, ValueError):
    """A precision policy is unknown, contradictory, or has no word in a dialect."""


class RecipeError(PolyampError, ValueError):
    """A recipe, an optimizer spec or a schedule holds an impossible value; names its path in the file."""


class LossScaleError(PolyampError, ValueError):
    """A loss scaler has impossible constants, is wrapped in another one, or `scale` was never called."""


class LossScaleStuckError(PolyampError, RuntimeError):
    """Every step is skipped although the loss scale is at its minimum: the gradients themselves are not finite.

    Attributes:
        parameters: paths of the parameters whose gradients are not finite on the last batch.
        loss_is_finite: whether the loss of that batch is finite; None if it is not known.
        call: the call that names the first operation and module that is not finite, as Python code.
    """

    parameters: tuple[str, ...] = ()
    loss_is_finite: bool | None = None
    call: str = ""


class LossError(PolyampError, ValueError):
    """`loss_fn` returned something that is not a scalar floating loss, or a loss got mismatched shapes."""


class BatchError(PolyampError, ValueError):
    """A batch cannot be split into the micro-batches that the recipe asks for."""


class ModelError(PolyampError, TypeError):
    """A model cannot be trained: no parameters, or parameters of a kind that has no gradient."""


class GradientError(PolyampError, ValueError):
    """Gradients do not fit the state: one is missing, has another shape, or is not floating."""


class StateError(PolyampError, RuntimeError):
    """A state can no longer be used: a step consumed its arrays, or `refresh` replaced it."""


class UnsupportedError(PolyampError, NotImplementedError):
    """A request that this backend or device does not support; raised before the first update."""


class ReplicaError(PolyampError, RuntimeError):
    """Another rank raised, ended, was killed, or trains something else; names it. Do not use the state again."""


class TraceError(PolyampError, TypeError):
    """A function cannot be traced: its Python control flow depends on an array's value, or it has side effects."""


class CheckpointError(PolyampError, ValueError):
    """A checkpoint is damaged, belongs to another model or recipe, or contains impossible values."""


class PortError(PolyampError, ValueError):
    """A model or a training state cannot be ported as requested; nothing was changed."""


class BackendError(PolyampError, ImportError):
    """A backend is unknown, claimed twice, or fails to import."""


class BackendNotInstalledError(BackendError):
    """The backend is known but its framework is not installed; the message contains the install command."""


def closest_words(word: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return the known words closest to `word`, best first.

    >>> closest_words("mixed_flot16", ["float32", "mixed_float16", "O2"])
    ['mixed_float16']
    """
    import difflib

    words = list(known)
    same = [
        name for name in words if _normalize_word(name) == _normalize_word(word)
    ]  # up to letter case, spaces and hyphens
    if same:
        return same[:limit]
    lower = {name.lower(): name for name in reversed(words)}
    return [lower[name] for name in difflib.get_close_matches(word.lower(), list(lower), n=limit, cutoff=0.5)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence such as `" Did you mean 'adam'?"`, or "" if nothing is close.

    >>> did_you_mean("adamm", ["adam", "sgd"])
    " Did you mean 'adam'?"
    """
    close = closest_words(word, known)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def join_first(texts: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join the first texts of a list, with the number of the others.

    >>> join_first(["a", "b", "c"], 3), join_first(["a", "b", "c"], 1), join_first(["a", "b", "c"], 2, "; ")
    ('a, b, c', 'a and 2 more', 'a; b; and 1 more')
    """
    shown = separator.join(texts[:limit])
    more = f"{separator.strip().strip(',')} and {len(texts) - limit} more"
    return shown + more if len(texts) > limit else shown


def describe_value(value: Any) -> str:
    """Describe a received value for a message: its kind, and the value itself if that is short.

    >>> describe_value([1, 2]), describe_value("bf16"), describe_value(None), describe_value(dict), describe_value(len)
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


def plain_number_hint(value: Any) -> str:
    """Return a hint for an array scalar in place of a plain number, with a leading space; "" for other values.

    >>> import numpy as np
    >>> plain_number_hint(np.float32(0.5)), plain_number_hint(0.5)
    (" That is an array's scalar, and recipes are plain data: write value.item().", '')
    """
    scalar = hasattr(value, "item") and hasattr(value, "dtype")
    return " That is an array's scalar, and recipes are plain data: write value.item()." if scalar else ""


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _normalize_word(word: str) -> str:
    """Normalize a word: letter case, spaces, and `-` for `_`."""
    return "".join(letter for letter in word.lower() if letter.isalnum())
