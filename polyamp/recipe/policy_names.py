"""Other libraries' spellings of a precision policy: Keras, Lightning, Accelerate, Apex and jmp.

`parse_spelling` converts a spelling to the fields of a `Policy`; `spell_policy` converts a policy to one dialect.

Sources: keras.io/api/mixed_precision, lightning.ai/docs (`precision`), huggingface.co/docs/accelerate
(`mixed_precision`), nvidia.github.io/apex (`opt_level`), github.com/google-deepmind/jmp (`get_policy`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from polyamp.errors import PolicyError, closest_words, did_you_mean
from polyamp.float_formats import DTYPE_ALIASES, HALF_DTYPES, canonical_dtype


class PolicySpelling(NamedTuple):
    """Meaning of one spelling: three dtypes and, if the spelling determines it, the mode."""

    param: str
    compute: str
    output: str
    mode: str | None = None
    float8: bool = False


def _pure(dtype: str) -> PolicySpelling:
    return PolicySpelling(dtype, dtype, dtype)


def _mixed(dtype: str, mode: str | None = None) -> PolicySpelling:
    return PolicySpelling("float32", dtype, "float32", mode)


DIALECTS: Final[dict[str, dict[str, PolicySpelling]]] = {
    "keras": {
        "float32": _pure("float32"),
        **{f"mixed_{name}": _mixed(name) for name in HALF_DTYPES},
        **{name: _pure(name) for name in HALF_DTYPES},
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
"""Dialect -> word -> meaning. `spell_policy` returns the first word with a given meaning."""

FLOAT8_WORD: Final = "mixed_float8"
"""polyamp's own word for float32 master weights, bfloat16, and products in 8 bits (S36)."""

_SUGGESTIONS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("half", "f16", "16bit", "float16mixed"), ("mixed_float16", "float16")),
    **dict.fromkeys(("amp", "mixed", "auto", "mixedprecision"), ("mixed_float16", "mixed_bfloat16")),
    **dict.fromkeys(("bfloat", "bf"), ("mixed_bfloat16", "bfloat16")),
    **dict.fromkeys(("full", "f32", "fp32", "single", "none"), ("float32",)),
}
"""Words of no dialect, normalized -> suggestion."""
_OTHER_HINTS: Final = {
    "tf32": " TF32 is no policy but how float32 products are computed: Policy('float32', float32_matmul='high').",
    "fp8": " Did you mean 'mixed_float8'? It computes products of activations with parameters in 8 bits, and has "
    "float32 master weights.",
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


def parse_spelling(word: str) -> PolicySpelling:
    """Return the meaning of `word` in the dialect that contains it.

    Raises:
        PolicyError: no dialect has the word; the message lists the closest ones.

    >>> parse_spelling("bf16-mixed").compute
    'bfloat16'
    >>> parse_spelling("params=float32,compute=bf16,output=f32")
    PolicySpelling(param='float32', compute='bfloat16', output='float32', mode='cast', float8=False)
    >>> parse_spelling("c=bf16")
    PolicySpelling(param='float32', compute='bfloat16', output='bfloat16', mode='cast', float8=False)
    """
    if "=" in word:
        return _parse_jmp(word)
    if word == FLOAT8_WORD:
        return _mixed("bfloat16")._replace(float8=True)
    for words in DIALECTS.values():
        if word in words:
            return words[word]
    known = [name for words in DIALECTS.values() for name in words]
    raise PolicyError(
        f"policy must be one of {', '.join(dict.fromkeys([*known, FLOAT8_WORD]))}, or a jmp string such as "
        f"'params=float32,compute=bfloat16,output=float32'. Received: {word!r}.{_spelling_suggestion(word, known)}"
    )


def _spelling_suggestion(word: str, known: list[str]) -> str:
    """Return a suggestion for an unknown word; next to a pure 16-bit policy it also names the mixed one."""
    plain = "".join(letter for letter in word.lower() if letter.isalnum())
    if plain.removeprefix("mixed").startswith(("fp8", "float8", "f8")):
        return _OTHER_HINTS["fp8"]
    if plain in _OTHER_HINTS:
        return _OTHER_HINTS[plain]
    close = list(_SUGGESTIONS.get(plain, ())) or closest_words(word, known)
    if not close:
        return ""
    said = f" Did you mean {' or '.join(map(repr, close))}?"
    for name in close:
        meaning = next(words[name] for words in DIALECTS.values() if name in words)
        if meaning.param in HALF_DTYPES:
            mixed = f"'mixed_{meaning.param}'"
            return f"{said} {name!r} holds every parameter in 16 bits; {mixed} keeps float32 master weights."
    return said


def _parse_jmp(word: str) -> PolicySpelling:
    """Parse a jmp string with jmp's defaults: float32 parameters, computation as parameters, output as computation
    (`jmp.get_policy`, jmp 0.0.4). "half" is float16, as in jmp on every device but a TPU."""
    fields: dict[str, str] = {}
    for part in word.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        name = _JMP_KEYS.get(key)
        if name is None or name in fields or value not in DTYPE_ALIASES:
            hint = did_you_mean(key, _JMP_KEYS) if name is None else ""
            hint = did_you_mean(value, DTYPE_ALIASES) if value not in DTYPE_ALIASES else hint
            raise PolicyError(
                "a jmp policy is 'params=DTYPE,compute=DTYPE,output=DTYPE' (or p=, c=, o=), each at most "
                "once, with DTYPE one "
                f"of {', '.join(DTYPE_ALIASES)}. Received: {part.strip()!r} in {word!r}.{hint}"
            )
        fields[name] = canonical_dtype(value, argument=key)
    param = fields.get("param", "float32")
    compute = fields.get("compute", param)
    return PolicySpelling(param, compute, fields.get("output", compute), mode="cast")


def spell_policy(spelling: PolicySpelling, dialect: str, *, extras: list[str]) -> str:
    """Return the word for `spelling` in `dialect`.

    Args:
        extras: names of used policy settings other than dtypes and mode; no dialect has a word for them.

    Raises:
        PolicyError: the dialect is unknown, or has no word for the policy.
    """
    known: dict[str, Any] = {**DIALECTS, "jmp": None}
    if dialect not in known:
        raise PolicyError(
            f"dialect must be one of {', '.join(known)}. Received: {dialect!r}.{did_you_mean(dialect, known)}"
        )
    if extras:
        raise PolicyError(f"{dialect} has no word for {', '.join(extras)}; drop it or hand over the Policy itself.")
    if dialect == "jmp" and spelling.mode != "autocast":
        return f"params={spelling.param},compute={spelling.compute},output={spelling.output}"
    for word, meaning in DIALECTS.get(dialect, {}).items():
        settled = spelling.mode is None or spelling.mode == meaning.mode or meaning.param == meaning.compute
        if meaning[:3] == spelling[:3] and (settled or (meaning.mode is None and spelling.mode == "autocast")):
            return word
    can_say = "a policy whose mode is 'cast'" if dialect == "jmp" else ", ".join(DIALECTS[dialect])
    raise PolicyError(f"{dialect} has no word for {spelling}. It can say: {can_say}.")
