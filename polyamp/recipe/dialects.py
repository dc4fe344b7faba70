"""Other libraries' spellings of a precision policy: Keras, Lightning, Accelerate, Apex and jmp.

`parse` turns a spelling into the fields of a `Policy`; `spell` turns a policy back into one dialect. Called by
`Policy` alone.

Sources: keras.io/api/mixed_precision, lightning.ai/docs (`precision`), huggingface.co/docs/accelerate
(`mixed_precision`), nvidia.github.io/apex (`opt_level`), github.com/google-deepmind/jmp (`get_policy`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from polyamp.dtypes import ALIASES, canonical
from polyamp.errors import PolicyError, did_you_mean, nearest


class Spelling(NamedTuple):
    """What one word means: three dtypes and, where the word settles it, the mode."""

    param: str
    compute: str
    output: str
    mode: str | None = None


def _pure(dtype: str) -> Spelling:
    return Spelling(dtype, dtype, dtype)


def _mixed(dtype: str, mode: str | None = None) -> Spelling:
    return Spelling("float32", dtype, "float32", mode)


WORDS: Final[dict[str, dict[str, Spelling]]] = {
    "keras": {
        "float32": _pure("float32"),
        "mixed_float16": _mixed("float16"),
        "mixed_bfloat16": _mixed("bfloat16"),
        "float16": _pure("float16"),
        "bfloat16": _pure("bfloat16"),
        "float64": _pure("float64"),
    },
    "lightning": {
        "32-true": _pure("float32"),
        "16-mixed": _mixed("float16"),
        "bf16-mixed": _mixed("bfloat16"),
        "16-true": _pure("float16"),
        "bf16-true": _pure("bfloat16"),
        "64-true": _pure("float64"),
        "32": _pure("float32"),
        "16": _mixed("float16"),
        "64": _pure("float64"),
    },
    "accelerate": {"no": _pure("float32"), "fp16": _mixed("float16"), "bf16": _mixed("bfloat16")},
    "apex": {
        "O0": _pure("float32"),
        "O1": _mixed("float16", "autocast"),
        "O2": _mixed("float16", "cast"),
        "O3": _pure("float16"),
    },
}
"""Dialect -> word -> meaning. The first word with a given meaning is the one `spell` returns."""

_MEANT: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("half", "f16", "16bit", "float16mixed"), ("mixed_float16", "float16")),
    **dict.fromkeys(("amp", "mixed", "auto", "mixedprecision"), ("mixed_float16", "mixed_bfloat16")),
    **dict.fromkeys(("bfloat", "bf"), ("mixed_bfloat16", "bfloat16")),
    **dict.fromkeys(("full", "f32", "fp32", "single", "none"), ("float32",)),
}
"""Words of no dialect, written together -> what may have been meant."""
_ELSEWHERE: Final = {
    "tf32": " TF32 is no policy but how float32 products are computed: Policy('float32', float32_matmul='high').",
    "fp8": " There is no policy in 8 bits: 'mixed_bfloat16' and 'mixed_float16' are the narrowest.",
}

_JMP_KEYS: Final[dict[str, str]] = {
    "params": "param",
    "param": "param",
    "p": "param",
    "compute": "compute",
    "c": "compute",
    "output": "output",
    "o": "output",
}


def parse(word: str) -> Spelling:
    """The meaning of `word` in whichever dialect has it.

    Raises:
        PolicyError: no dialect has the word; the message lists the nearest ones.

    >>> parse("bf16-mixed").compute
    'bfloat16'
    >>> parse("params=float32,compute=bf16,output=f32")
    Spelling(param='float32', compute='bfloat16', output='float32', mode='cast')
    >>> parse("c=bf16")
    Spelling(param='float32', compute='bfloat16', output='bfloat16', mode='cast')
    """
    if "=" in word:
        return _parse_jmp(word)
    for words in WORDS.values():
        if word in words:
            return words[word]
    known = [name for words in WORDS.values() for name in words]
    raise PolicyError(
        f"policy must be one of {', '.join(dict.fromkeys(known))}, or a jmp string such as "
        f"'params=float32,compute=bfloat16,output=float32'. Received: {word!r}.{_meant(word, known)}"
    )


def _meant(word: str, known: list[str]) -> str:
    """What an unknown word may have meant; where that holds everything in 16 bits, what is mixed is named beside it."""
    plain = "".join(letter for letter in word.lower() if letter.isalnum())
    if plain.startswith(("fp8", "float8", "f8")):
        return _ELSEWHERE["fp8"]
    if plain in _ELSEWHERE:
        return _ELSEWHERE[plain]
    close = list(_MEANT.get(plain, ())) or nearest(word, known)
    if not close:
        return ""
    said = f" Did you mean {' or '.join(map(repr, close))}?"
    for name in close:
        meaning = next(words[name] for words in WORDS.values() if name in words)
        if meaning.param in ("float16", "bfloat16"):
            mixed = f"'mixed_{meaning.param}'"
            return f"{said} {name!r} holds every parameter in 16 bits; {mixed} keeps float32 master weights."
    return said


def _parse_jmp(word: str) -> Spelling:
    """A string of jmp's, with jmp's own defaults: parameters in float32, computation as the parameters, output as the
    computation (`jmp.get_policy`, jmp 0.0.4). "half" is float16, as in jmp on everything but a TPU."""
    fields: dict[str, str] = {}
    for part in word.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        name = _JMP_KEYS.get(key)
        if name is None or name in fields or value not in ALIASES:
            hint = did_you_mean(key, _JMP_KEYS) if name is None else ""
            hint = did_you_mean(value, ALIASES) if value not in ALIASES else hint
            raise PolicyError(
                "a jmp policy is 'params=DTYPE,compute=DTYPE,output=DTYPE' (or p=, c=, o=), each at most "
                "once, with DTYPE one "
                f"of {', '.join(ALIASES)}. Received: {part.strip()!r} in {word!r}.{hint}"
            )
        fields[name] = canonical(value, argument=key)
    param = fields.get("param", "float32")
    compute = fields.get("compute", param)
    return Spelling(param, compute, fields.get("output", compute), mode="cast")


def spell(spelling: Spelling, dialect: str, *, extras: list[str]) -> str:
    """The word for `spelling` in `dialect`.

    Args:
        extras: names of policy settings beyond dtypes and mode that are in use; no dialect has a word for them.

    Raises:
        PolicyError: unknown dialect, or the dialect cannot say it.
    """
    known: dict[str, Any] = {**WORDS, "jmp": None}
    if dialect not in known:
        raise PolicyError(
            f"dialect must be one of {', '.join(known)}. Received: {dialect!r}.{did_you_mean(dialect, known)}"
        )
    if extras:
        raise PolicyError(f"{dialect} has no word for {', '.join(extras)}; drop it or hand over the Policy itself.")
    if dialect == "jmp" and spelling.mode != "autocast":
        return f"params={spelling.param},compute={spelling.compute},output={spelling.output}"
    for word, meaning in WORDS.get(dialect, {}).items():
        settled = spelling.mode is None or spelling.mode == meaning.mode or meaning.param == meaning.compute
        if meaning[:3] == spelling[:3] and (settled or (meaning.mode is None and spelling.mode == "autocast")):
            return word
    can_say = "a policy whose mode is 'cast'" if dialect == "jmp" else ", ".join(WORDS[dialect])
    raise PolicyError(f"{dialect} has no word for {spelling}. It can say: {can_say}.")
