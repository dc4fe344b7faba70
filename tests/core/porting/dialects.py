"""The random architectures of `architectures` in the words of one person: torch, Keras, linen, nnx, haiku.

`rendered` gives one architecture in one style: the inventory that `sketch` makes, and which layer each path is. Called
by test_adversary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from polyamp.porting.layouts.inventory import Inventory
from tests.core.porting.architectures import WORDS, Part, layer
from tests.core.porting.sketch import sketch

_CLASSES: Final = {
    "dense": ("Dense", "dense", "linear"),
    "conv": ("Conv", "conv2d", "conv2_d"),
    "conv_transpose": ("ConvTranspose", "conv2d_transpose", "conv2_d_transpose"),
    "layer_norm": ("LayerNorm", "layer_normalization", "layer_norm"),
    "batch_norm": ("BatchNorm", "batch_normalization", "batch_norm"),
    "embedding": ("Embed", "embedding", "embed"),
    "attention": ("MultiHeadDotProductAttention", "multi_head_attention", "multi_head_attention"),
    "parameter": ("param", "variable", "w"),
}
"""Kind -> class in linen, name in Keras, name in haiku."""


class _Line(NamedTuple):
    """One layer of a rendered model: its path, its kind and which layer of the architecture it is."""

    path: str
    spec: str
    identity: str


class Rendered(NamedTuple):
    """A model as one framework's user writes it.

    Attributes:
        inventory: what a converter would list.
        identities: path of a layer -> which layer of the architecture it is.
        text: how it was written.
    """

    inventory: Inventory
    identities: dict[str, str]
    text: str


def _camel(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_"))


class _Style:
    """How one person names things; a word once taken for a role is kept."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._words: dict[str, str] = {}
        self.first = rng.choice((0, 0, 1))
        self.hand = rng.choice(("", "", "apart", "packed"))
        self.shuffled = rng.random() < 0.15
        self.permuted = False
        self.join = "_"
        self.named_heads = rng.random() < 0.5

    def word(self, role: str) -> str:
        if role not in self._words:
            taken = {word for one, word in self._words.items()}
            free = [word for word in WORDS.get(role, (role,)) if word not in taken]
            self._words[role] = self.rng.choice(free or [role])
        return self._words[role]

    def written(self, part: Part) -> tuple[Part, ...]:
        """What is in it; attention by hand is opened."""
        if part.spec.startswith("attention") and self.hand:
            width = int(part.spec.split()[1])
            square = f"dense {width} {width} -bias"
            names = ("query", "key", "value") if self.hand == "apart" else ("packed",)
            sizes = {"packed": f"dense {width} {3 * width} -bias"}
            return tuple(layer(name, sizes.get(name, square)) for name in (*names, "output"))
        return part.parts


def _nested(style: _Style, parts: tuple[Part, ...], path: str, identity: str) -> Iterator[_Line]:
    """Attributes in the order of definition: torch, nnx, equinox, Keras with names."""
    if style.shuffled:
        parts = tuple(style.rng.sample(parts, len(parts)))
    elif any(part.beside for part in parts) and style.rng.random() < 0.3:
        free = [part for part in parts if part.beside]
        swapped = iter(style.rng.sample(free, len(free)))
        parts = tuple(next(swapped) if part.beside else part for part in parts)
    for part in parts:
        word = style.word(part.role)
        number = "" if part.number is None else part.number + style.first
        join = "." if part.parts and style.join == "." else style.join.strip(".")
        own = f"{path}{word}{join if part.number is not None else ''}{number}"
        same = f"{identity}{part.role}{'' if part.number is None else part.number}"
        inner = style.written(part)
        if inner:
            yield from _nested(style, inner, own + ".", same + "/")
        else:
            yield _Line(own, part.spec, same)


def _automatic(style: _Style, parts: tuple[Part, ...], path: str, identity: str) -> Iterator[_Line]:
    """Class_N in each module: linen without names."""
    counts: Counter[str] = Counter()
    parts = _permuted(style, parts)
    for part in parts:
        inner = style.written(part)
        kind = part.spec.split()[0] if part.spec else ""
        named = kind == "parameter" or (path == "" and style.named_heads and part.number is None)
        cls = _camel(style.word(part.role)) if inner else _CLASSES[kind][0]
        if part.role in ("query", "key", "value", "packed", "output") or named:
            own = style.word(part.role)
        else:
            own = f"{cls}_{counts[cls]}"
            counts[cls] += 1
        own = path + own
        same = f"{identity}{part.role}{'' if part.number is None else part.number}"
        if inner:
            yield from _automatic(style, inner, own + ".", same + "/")
        else:
            yield _Line(own, part.spec, same)


def _permuted(style: _Style, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    free = [part for part in parts if part.beside]
    if not free or not style.permuted or style.rng.random() > 0.5:
        return parts
    swapped = iter(style.rng.sample(free, len(free)))
    return tuple(next(swapped) if part.beside else part for part in parts)


def _flat(style: _Style, parts: tuple[Part, ...], counts: Counter[str], identity: str, which: int) -> Iterator[_Line]:
    """Counters over the whole model: Keras without names, haiku without modules."""
    for part in _permuted(style, parts):
        same = f"{identity}{part.role}{'' if part.number is None else part.number}"
        inner = style.written(part)
        if inner:
            yield from _flat(style, inner, counts, same + "/", which)
            continue
        cls = _CLASSES[part.spec.split()[0]][which]
        number = counts[cls]
        counts[cls] += 1
        yield _Line(f"{cls}_{number}" if number else cls, part.spec, same)


STYLES: Final = ("torch", "nnx", "keras named", "keras flat", "linen", "linen named", "haiku")


AUTOMATIC: Final = ("keras flat", "linen", "haiku")
"""Styles whose names are counted."""


def rendered(parts: list[Part], style_name: str, rng: random.Random, *, permuted: bool = False) -> Rendered:
    """One architecture in one style; with `permuted`, what lies beside each other is counted in any order."""
    style = _Style(rng)
    style.permuted = permuted
    style.join = "." if style_name in ("torch", "nnx") else "_"
    ordered = True
    if style_name in ("torch", "nnx", "keras named", "linen named"):
        prefix = rng.choice(("", "", "model.", "net.backbone."))
        lines = list(_nested(style, tuple(parts), prefix, ""))
    elif style_name == "linen":
        lines = list(_automatic(style, tuple(parts), "", ""))
    else:
        style.hand = ""
        counts: Counter[str] = Counter()
        start = rng.choice((0, 0, 0, 3, 9))
        for entry in _CLASSES.values():
            counts[entry[1 if style_name == "keras flat" else 2]] = start
        lines = list(_flat(style, tuple(parts), counts, "", 1 if style_name == "keras flat" else 2))
    if style_name.startswith("linen"):
        ordered = False
        lines.sort()
        lines = [_Line(line.path, line.spec.replace("dense ", "dense? "), line.identity) for line in lines]
    paths = [line.path.replace(".", "/") for line in lines]
    if len(set(paths)) != len(paths):
        return rendered(parts, style_name, rng, permuted=permuted)
    text = "\n".join(f"{line.path}: {line.spec}" for line in lines)
    identities = {path: line.identity for path, line in zip(paths, lines, strict=True)}
    return Rendered(sketch(text, ordered=ordered, framework=style_name), identities, text)
