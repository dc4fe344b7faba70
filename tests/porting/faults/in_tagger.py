"""Faults in the bidirectional tagger, and in one of GRUs."""

from __future__ import annotations

from typing import Final

from tests.porting.faults.changes import every, gates, half
from tests.porting.faults.planting import Carried, Fault

_CELLS: Final = r"lstm/layer_\d/(for|back)ward"
_FIRST: Final = r"lstm/layer_0/(for|back)ward"
_BEHIND: Final = _CELLS + "|hidden2tag"
_KERAS: Final = r"bidirectional(_1)?/(for|back)ward|dense"
_KERAS_FIRST: Final = "            layers.Embedding(WORDS, FEATURES),\n            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),"
_RUN: Final = "hidden, _ = self.lstm(self.word_embeddings(sentence))"
_TORCH_GRU: Final = (("self.lstm = nn.LSTM(", "self.lstm = nn.GRU("),)
_KERAS_GRU: Final = (
    ("            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),\n" * 2,
     "            layers.Bidirectional(layers.GRU(UNITS, return_sequences=True)),\n" * 2),
)  # fmt: skip
_BOTH_GRU: Final = {"torch": _TORCH_GRU, "keras": _KERAS_GRU}


def _torch(what: str, source: str, at: str, before: str, after: str) -> Fault:
    return Fault(what, "tagger", source, "torch", at, ((before, after),))


def _carried(what: str, source: str, pattern: str, change: object, at: str = _BEHIND) -> Fault:
    return Fault(what, "tagger", source, "torch", at, carried=(Carried(pattern, change),))  # type: ignore[arg-type]


FAULTS: Final = (
    _carried("input and forget gates swapped", "keras", "lstm/weight_[ih]h_l0$", every(gates(None, 4, [1, 0, 2, 3]))),
    _carried("candidate and output gates swapped", "nnx", "lstm/.*_l1_reverse$", every(gates(None, 4, [0, 1, 3, 2]))),
    _carried("forget bias of 1 added", "keras", "lstm/bias_hh_l0$", gates(lambda x: x + 1, 4, [1])),
    _carried("recurrent kernel transposed gate by gate", "linen", "lstm/weight_hh_l1$", gates(lambda x: x.T, 4, range(4))),
    _carried("forward and backward swapped", "keras", "lstm/weight_ih_l0(_reverse)?$", lambda a, b: (b, a)),
    _carried("recurrent bias forgotten", "keras", "lstm/bias_.*_l0$", every(lambda x: 0 * x)),
    _carried("recurrent kernel rounded to float16", "keras", "lstm/weight_hh_l0$", half),
    _carried("halves of the hidden state swapped before the head", "keras", "hidden2tag/weight", gates(None, 2, [1, 0], 1)),
    _carried("first layer's rows behind the halves swapped", "nnx", "lstm/weight_ih_l1$", gates(None, 2, [1, 0], 1)),
    _torch("halves swapped in the code", "keras", _BEHIND, _RUN, _RUN + "\n        hidden = torch.cat([hidden[..., UNITS:], hidden[..., :UNITS]], -1)"),
    _torch("backward half not turned round", "keras", _BEHIND, _RUN, _RUN + "\n        hidden = torch.cat([hidden[..., :UNITS], hidden[..., UNITS:].flip(1)], -1)"),
    _torch("rows and time confused", "keras", _BEHIND, "bidirectional=True, batch_first=True)", "bidirectional=True)"),
    _torch("dropout between the layers", "keras", _CELLS, "bidirectional=True, batch_first=True)", "bidirectional=True, batch_first=True, dropout=0.2)"),
    _torch("no bias", "keras", _CELLS, "bidirectional=True, batch_first=True)", "bidirectional=True, batch_first=True, bias=False)"),
    _torch("one direction", "nnx", _CELLS + "|hidden2tag", "num_layers=2, bidirectional=True, batch_first=True)\n        self.hidden2tag = nn.Linear(2 * UNITS", "num_layers=2, batch_first=True)\n        self.hidden2tag = nn.Linear(UNITS"),
    _torch("embedding normalised", "linen", "word_embeddings", "nn.Embedding(WORDS, FEATURES)", "nn.Embedding(WORDS, FEATURES, max_norm=1.0)"),
    Fault("sigmoid for tanh", "tagger", "torch", "keras", _KERAS, ((_KERAS_FIRST, _KERAS_FIRST.replace("UNITS,", 'UNITS, activation="sigmoid",')),)),
    Fault("hard sigmoid in the gates", "tagger", "torch", "keras", _KERAS, ((_KERAS_FIRST, _KERAS_FIRST.replace("UNITS,", 'UNITS, recurrent_activation="hard_sigmoid",')),)),
    Fault("recurrent dropout", "tagger", "torch", "keras", r"bidirectional/(for|back)ward", ((_KERAS_FIRST, _KERAS_FIRST.replace("UNITS,", "UNITS, dropout=0.3,")),)),
    Fault("sum of both directions", "tagger", "torch", "keras", ".*dense|.*bidirectional_1.*", ((_KERAS_FIRST, _KERAS_FIRST.replace("sequences=True)", 'sequences=True), merge_mode="sum"')),)),
    Fault("GRU's reset before the product", "tagger", "torch", "keras", r"bidirectional/(for|back)ward", (("layers.Embedding(WORDS, FEATURES),\n            layers.Bidirectional(layers.GRU(UNITS,", "layers.Embedding(WORDS, FEATURES),\n            layers.Bidirectional(layers.GRU(UNITS, reset_after=False,"),), both=_BOTH_GRU),
    Fault("GRU's reset and update gates swapped", "tagger", "keras", "torch", _BEHIND, carried=(Carried("lstm/weight_[ih]h_l0$", every(gates(None, 3, [1, 0, 2]))),), both=_BOTH_GRU),
    Fault("GRU's recurrent bias added to the other", "tagger", "keras", "torch", _BEHIND, carried=(Carried("lstm/bias_[ih]h_l0$", lambda h, i: (0 * h, h + i)),), both=_BOTH_GRU),
    Fault("backward cell not reversed", "tagger", "torch", "equinox", r"rnns/\d/\w+|linear", (("scan(self.backward_cell, True)", "scan(self.backward_cell, False)"),)),
    Fault("forget and output gates swapped", "tagger", "torch", "haiku", r"(for|back)ward_\d|linear", carried=(Carried(r"backward_0/.*w$|backward_0.*linear.*w", gates(None, 4, [0, 1, 3, 2], 1)),)),
)  # fmt: skip
