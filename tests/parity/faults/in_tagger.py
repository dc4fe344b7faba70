"""Faults in the code of the bidirectional tagger, and in arrays that came wrongly."""

from __future__ import annotations

from typing import Final

from tests.parity.faults.planted import Fault, backward, forward
from tests.parity.faults.planted import carried as wrong
from tests.porting.faults.changes import every, gates
from tests.porting.faults.planting import Carried, Edit

_RUN: Final = "hidden, _ = self.lstm(self.word_embeddings(sentence))"
_KERAS_FIRST: Final = (
    "            layers.Embedding(WORDS, FEATURES),\n"
    "            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),"
)
_FIRST: Final = ("cells 0", "lstm")
_SECOND: Final = ("cells 1", "lstm")
_STACK: Final = ("cells 0", "cells 1", "lstm", "head")
"""What runs between the embedding and the head. No framework shows what a cell gives; so where the code of a stack is
wrong, and no weight of it, all of its cells are named, and the first of them stands for it."""


def _fault(
    kind: str, what: str, first: str, second: str, places: tuple[str, ...], *edits: Edit, grad: bool = False
) -> Fault:
    at = (backward if grad else forward)("tagger", *places)
    return Fault(kind, what, "tagger", first, second, at, edits)


def _carried(what: str, first: str, second: str, places: tuple[str, ...], pattern: str, change: object) -> Fault:
    at = wrong("tagger", *places)
    return Fault("layout", what, "tagger", first, second, at, carried=(Carried(pattern, change),))  # type: ignore[arg-type]


FAULTS: Final = (
    _fault("formula", "sigmoid for tanh", "torch", "keras", _STACK, (_KERAS_FIRST, _KERAS_FIRST.replace("UNITS,", 'UNITS, activation="sigmoid",'))),
    _fault("formula", "hard sigmoid in the gates", "nnx", "keras", _STACK, (_KERAS_FIRST, _KERAS_FIRST.replace("UNITS,", 'UNITS, recurrent_activation="hard_sigmoid",'))),
    _fault("formula", "backward half not turned round", "keras", "torch", _STACK, (_RUN, _RUN + "\n        hidden = torch.cat([hidden[..., :UNITS], hidden[..., UNITS:].flip(1)], -1)")),
    _fault("formula", "backward cell not reversed", "torch", "equinox", _STACK, ("scan(self.backward_cell, True)", "scan(self.backward_cell, False)")),
    _fault("formula", "halves swapped in the code", "nnx", "torch", _STACK, (_RUN, _RUN + "\n        hidden = torch.cat([hidden[..., UNITS:], hidden[..., :UNITS]], -1)")),
    _fault("dtype", "hidden state rounded to float16", "keras", "torch", _STACK, (_RUN, _RUN + "\n        hidden = hidden.half().float()")),
    _fault("gradient", "stopped at the embedding", "keras", "torch", ("words",), ("self.lstm(self.word_embeddings(sentence))", "self.lstm(self.word_embeddings(sentence).detach())"), grad=True),
    _fault("gradient", "stopped in the backward half", "torch", "equinox", _SECOND, ("scan(self.backward_cell, True)]", "jax.lax.stop_gradient(scan(self.backward_cell, True))]"), grad=True),
    _carried("input and forget gates swapped", "keras", "torch", _FIRST, "lstm/weight_[ih]h_l0$", every(gates(None, 4, [1, 0, 2, 3]))),
    _carried("recurrent kernel transposed gate by gate", "linen", "torch", _SECOND, "lstm/weight_hh_l1$", gates(lambda x: x.T, 4, range(4))),
    _carried("forward and backward swapped", "keras", "torch", _FIRST, "lstm/weight_ih_l0(_reverse)?$", lambda a, b: (b, a)),
    _carried("first layer's rows behind the halves swapped", "nnx", "torch", _SECOND, "lstm/weight_ih_l1$", gates(None, 2, [1, 0], 1)),
)  # fmt: skip
"""All faults of the tagger's code."""
