"""Losses with one interface for every framework: torch's formulas (S24), float32 inside (S4).

They dispatch on the array's type. Each takes the framework's own arrays; labels, targets and weights may also be NumPy
arrays. The formulas use the few functions of `polyamp.contract.backend.LossFunctions` that a backend implements. Shapes
that do not match are an error, they are not broadcast.

A mean records its divisor, so that a step can weigh micro-batches and replicas (S8); `Mean` and `count` do this for a
custom loss. `regularization` is what a model adds to the loss by itself (S25); `sum_of_squares` makes a penalty of
parameters.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp.losses.classification import kl_divergence, softmax_cross_entropy
from polyamp.losses.elementwise import huber, mean_squared_error, sigmoid_cross_entropy, sigmoid_focal
from polyamp.losses.embeddings import contrastive
from polyamp.losses.language_model import causal_language_model, chunked_causal_language_model
from polyamp.losses.means import Mean, Reduction, count
from polyamp.losses.penalties import regularization, sum_of_squares
from polyamp.losses.sequences import ctc

__all__ = [
    "Mean",
    "Reduction",
    "causal_language_model",
    "chunked_causal_language_model",
    "contrastive",
    "count",
    "ctc",
    "huber",
    "kl_divergence",
    "mean_squared_error",
    "regularization",
    "sigmoid_cross_entropy",
    "sigmoid_focal",
    "softmax_cross_entropy",
    "sum_of_squares",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Raise an error that suggests polyamp's name for other libraries' names of these losses."""
    from polyamp.errors import did_you_mean

    if name.startswith("__"):
        raise AttributeError(f"module 'polyamp.losses' has no attribute {name!r}")
    plain = name.lower().replace("_", "").removesuffix("loss")
    known = _OTHER_NAMES.get(plain)
    meant = f" Did you mean {known!r}?" if known else did_you_mean(name, sorted(set(_OTHER_NAMES.values())))
    raise AttributeError(f"module 'polyamp.losses' has no attribute {name!r}.{meant}")


_OTHER_NAMES: Final = {
    **dict.fromkeys(("mse", "l2", "meansquarederror"), "mean_squared_error"),
    **dict.fromkeys(
        ("crossentropy", "ce", "nll", "categoricalcrossentropy", "sparsecategoricalcrossentropy",
         "softmaxcrossentropywithintegerlabels"), "softmax_cross_entropy"),
    **dict.fromkeys(
        ("bce", "binarycrossentropy", "bcewithlogits", "binarycrossentropywithlogits", "sigmoidbinarycrossentropy"),
        "sigmoid_cross_entropy"),
    **dict.fromkeys(("smoothl1", "huber"), "huber"),
    **dict.fromkeys(("kl", "kldiv", "distillation", "knowledgedistillation"), "kl_divergence"),
    **dict.fromkeys(("focal", "binaryfocalcrossentropy", "binaryfocal"), "sigmoid_focal"),
    **dict.fromkeys(("clip", "infonce", "ntxent"), "contrastive"),
    **dict.fromkeys(("connectionisttemporalclassification", "ctcbatchcost"), "ctc"),
    **dict.fromkeys(("causallm", "forcausallm", "lmcrossentropy", "nexttoken"), "causal_language_model"),
    **dict.fromkeys(
        ("linearcrossentropy", "fusedlinearcrossentropy", "ligerfusedlinearcrossentropy", "chunkedcrossentropy",
         "cewithchunkedoutput"), "chunked_causal_language_model"),
}  # fmt: skip
"""Other name of a loss, normalized and without "loss" -> the name here."""
