"""Clean pairs of part C: every family in other sizes, equal formulations, loops by hand beside recipes, dropout by
shared masks. Nothing may be said of one of them."""

from __future__ import annotations

import itertools
from typing import Any, Final

from polyamp import Group, LossScaler, adagrad, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.held_out.clean_pairs import KERAS, Pair
from tests.parity.held_out.harness import FAMILIES
from tests.parity.held_out.part_c.equal_formulations import ALL_POLICIES, FLOAT32
from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, HALF, settings, side

POLICIES: Final = ("float32", BRAIN, HALF, CAST)
_OPTIMIZERS: Final[tuple[dict[str, Any], ...]] = (
    {"optimizer": adamw(3e-3, betas=(0.9, 0.95), weight_decay=0.1, groups=no_decay("vector")), "clip_norm": 1.0},
    {"optimizer": sgd(schedules.exponential(0.05, 0.5), momentum=0.9, nesterov=True)},
    {"optimizer": adam(schedules.linear(1e-2, 1, 4), weight_decay=0.01)},
    {"optimizer": adagrad(1e-2, initial_accumulator_value=0.1)},
    {"optimizer": lion(schedules.cosine(1e-3, 4, end=1e-4), weight_decay=0.1), "accumulate_steps": 2},
    {"optimizer": rmsprop(1e-3, centered=True)},
    {"optimizer": sgd(0.05, weight_decay=1e-2), "clip_value": 0.01},
)


def _policy(number: int, family: str, words: str = "") -> Any:
    """A policy. Models whose code keeps float32 numbers are not cast; nor are those whose words are an island."""
    found = POLICIES[number % 4]
    fixed = family in ("unet", "seq2seq") or any(word in words for word in ("float32", "island", "exp and sum", "hand"))
    return BRAIN if found == CAST and fixed else found


def _plain() -> list[Pair]:
    """Every family in every pair of frameworks, once; policies and optimizers in turn."""
    found = []
    for number, (one, other) in enumerate(itertools.product(("torch", "nnx", "keras"), repeat=2)):
        for family in FAMILIES:
            if "keras" in (one, other) and family not in KERAS:
                continue
            seed = 500 + len(found)
            recipe = {"policy": _policy(number + seed, family), **_OPTIMIZERS[seed % len(_OPTIMIZERS)]}
            if family in ("convnet", "tagger", "seq2seq"):
                recipe["accumulate_steps"] = 1
            sides = side(family, one, recipe=recipe), side(family, other, recipe=recipe)
            found.append(Pair(family, f"larger, {str(recipe['policy'])[:24]}", *sides, seed))
    return found


def _equal() -> list[Pair]:
    found = []
    for number, (family, framework, words, edits) in enumerate(ALL_POLICIES):
        for other, name in (("torch", "float32"), (framework, _policy(1 + number % 3, family, words))):
            recipe = {"policy": name, **_OPTIMIZERS[number % 4]}
            sides = side(family, other, recipe=recipe), side(family, framework, edits, recipe=recipe)
            found.append(Pair(family, words, *sides, 600 + number))
    for number, (family, framework, words, edits) in enumerate(FLOAT32):
        sides = side(family, framework), side(family, framework, edits)
        found.append(Pair(family, words, *sides, 700 + number))
    return found


def _decays(rate: Any, decay: float = 0.1, **others: Any) -> dict[str, Any]:
    return {"optimizer": sgd(rate, momentum=0.9, weight_decay=decay, **others)}


_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_HIGH: Final = LossScaler(init_scale=2.0**19)
_TEN: Final = LossScaler(init_scale=2.0**10)
_TORCH: Final[tuple[tuple[str, str, dict[str, Any], dict[str, Any], Any], ...]] = (
    ("decoder", "AdamW by hand", _ADAMW, {"BY_HAND": True}, "float32"),
    ("convnet", "SGD by hand", _decays(1e-2), {"BY_HAND": True, "KIND": "sgd"}, "float32"),
    ("encoder", "vectors do not decay", {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("vector"))}, {"GROUPS": "vectors"}, "float32"),
    ("tagger", "the head's rate", _decays(1e-2, groups=[Group("head/**", learning_rate_scale=0.1)]), {"GROUPS": "head", "KIND": "sgd"}, "float32"),
    ("unet", "linear decay", {"optimizer": adamw(schedules.linear(1e-2, 1, 4), weight_decay=0.1)}, {"SCHEDULE": "linear", "WARMUP": 1}, "float32"),
    ("seq2seq", "cosine with an end", _decays(schedules.cosine(1e-2, 4, end=5e-3)), {"SCHEDULE": "cosine", "END": 5e-3, "KIND": "sgd"}, "float32"),
    ("vae", "clipped and accumulated", {**_decays(schedules.exponential(1e-2, 0.5)), "clip_norm": 0.05, "accumulate_steps": 4}, {"SCHEDULE": "exponential", "KIND": "sgd", "PARTS": 4, "CLIP": 0.05}, "float32"),
    ("convnet", "RMSprop", {"optimizer": rmsprop(1e-2, weight_decay=0.1)}, {"KIND": "rmsprop"}, "float32"),
    ("recommender", "coupled decay", {"optimizer": adam(1e-2, weight_decay=0.1)}, {"KIND": "adam"}, "float32"),
    ("decoder", "SGD", _decays(1e-2), {"DTYPE": "bfloat16", "KIND": "sgd"}, BRAIN),
    ("encoder", "AdamW by hand", _ADAMW, {"DTYPE": "bfloat16", "BY_HAND": True}, BRAIN),
    ("vae", "clipped and accumulated", {**_decays(1e-2), "clip_norm": 0.05, "accumulate_steps": 2}, {"DTYPE": "bfloat16", "KIND": "sgd", "PARTS": 2, "CLIP": 0.05}, BRAIN),
    ("unet", "exponential decay", _decays(schedules.exponential(1e-2, 0.5)), {"DTYPE": "bfloat16", "KIND": "sgd", "SCHEDULE": "exponential"}, BRAIN),
    ("decoder", "casts", _ADAMW, {"DTYPE": "bfloat16", "MODE": "cast"}, CAST),
    ("vae", "casts, accumulated", {**_decays(1e-2), "accumulate_steps": 4}, {"DTYPE": "bfloat16", "MODE": "cast", "KIND": "sgd", "PARTS": 4}, CAST),
    ("recommender", "a scale", {**_decays(1e-2), "scaler": _TEN}, {"DTYPE": "float16", "KIND": "sgd"}, HALF),
    ("encoder", "a scale and a clip", {**_decays(1e-2), "scaler": _TEN, "clip_norm": 0.05}, {"DTYPE": "float16", "KIND": "sgd", "CLIP": 0.05}, HALF),
    ("vae", "a scale that grows", {**_decays(1e-2), "scaler": LossScaler(init_scale=2.0**10, growth_interval=1)}, {"DTYPE": "float16", "KIND": "sgd", "GROWTH": 1}, HALF),
    ("recommender", "a scale that overflows", {**_decays(1e-2), "scaler": _HIGH}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**19}, HALF),
)  # fmt: skip
"""Family, words, recipe, the trainer's constants, policy."""
_NNX: Final[tuple[tuple[str, str, dict[str, Any], dict[str, Any], Any], ...]] = (
    ("unet", "vectors do not decay", {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("vector"))}, {"GROUPS": "vectors"}, "float32"),
    ("decoder", "Lion", {"optimizer": lion(1e-3, betas=(0.9, 0.99), weight_decay=0.1)}, {"KIND": "lion", "RATE": 1e-3, "BETAS": (0.9, 0.99)}, "float32"),
    ("convnet", "SGD", _decays(1e-2), {"KIND": "sgd"}, "float32"),
    ("encoder", "linear decay", {"optimizer": adamw(schedules.linear(1e-2, 1, 4), weight_decay=0.1)}, {"SCHEDULE": "linear", "WARMUP": 1}, "float32"),
    ("tagger", "cosine with an end", _decays(schedules.cosine(1e-2, 4, end=5e-3)), {"SCHEDULE": "cosine", "END": 5e-3, "KIND": "sgd"}, "float32"),
    ("vae", "clipped and accumulated", {**_decays(1e-2), "clip_norm": 0.05, "accumulate_steps": 4}, {"KIND": "sgd", "PARTS": 4, "CLIP": 0.05}, "float32"),
    ("recommender", "casts", _ADAMW, {"DTYPE": "bfloat16"}, CAST),
    ("decoder", "casts, accumulated", {**_decays(1e-2), "accumulate_steps": 2}, {"DTYPE": "bfloat16", "KIND": "sgd", "PARTS": 2}, CAST),
    ("vae", "a scale and a clip", {**_decays(1e-2), "scaler": _TEN, "clip_norm": 0.05}, {"DTYPE": "float16", "KIND": "sgd", "CLIP": 0.05}, CAST_HALF),
    ("recommender", "a scale that overflows", {**_decays(1e-2), "scaler": _HIGH}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**19}, CAST_HALF),
)  # fmt: skip
"""The same over optax."""


def _by_hand() -> list[Pair]:
    found = []
    for framework, rows in (("torch", _TORCH), ("nnx", _NNX)):
        for number, (family, words, recipe, constants, policy) in enumerate(rows):
            first = "torch" if policy == "float32" else framework
            one = side(family, first, recipe={"policy": policy, **recipe})
            two = side(family, framework, loop=settings(**constants), recipe={"policy": policy}, loops="trainer")
            options = {"steps": 4} if "overflows" in words else {}
            found.append(Pair(family, f"a loop: {words}", one, two, 800 + number, options))
    return found


def _dropping() -> list[Pair]:
    """Dropout by masks that both sides share."""
    options = {"randomness": "shared", "steps": 2}
    found = []
    for number, (one, other) in enumerate((("torch", "torch"), ("torch", "nnx"), ("nnx", "torch"), ("nnx", "nnx"))):
        for name in (POLICIES[number % 3], POLICIES[(number + 1) % 3]):
            recipe = {"policy": name, **_OPTIMIZERS[number]}
            sides = side("encoder", one, recipe=recipe), side("encoder", other, recipe=recipe)
            found.append(Pair("encoder", "dropout of 0.2", *sides, 900 + number, options))
    return found


PAIRS: Final = (*_plain(), *_equal(), *_by_hand(), *_dropping())
"""All of them."""
