"""The exceptions that polyamp raises on purpose, and the wording helpers they share.

All derive from `PolyampError`; each also derives from the built-in that a caller would
expect (`ValueError`, `TypeError`, `ImportError`), so existing handlers keep working. A message names the
argument, what is accepted, what came, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable


class PolyampError(Exception):
    """Base class of the errors that polyamp raises on purpose; a missing file stays a `FileNotFoundError`."""


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
    """A state can no longer be used: a step consumed its arrays."""


class UnsupportedError(PolyampError, NotImplementedError):
    """What was asked for cannot be honoured by this backend or device; raised before the first update."""


class TraceError(PolyampError, TypeError):
    """A function cannot be traced: it decides in Python on an array's value, or has side effects."""


class CheckpointError(PolyampError, ValueError):
    """A checkpoint is damaged, belongs to another model or recipe, or holds what no state can hold."""


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

    return difflib.get_close_matches(word, list(known), n=limit, cutoff=0.5)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence such as `" Did you mean 'adam'?"`, or an empty string when nothing is close.

    >>> did_you_mean("adamm", ["adam", "sgd"])
    " Did you mean 'adam'?"
    """
    close = nearest(word, known)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
