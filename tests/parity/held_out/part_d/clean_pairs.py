"""Clean pairs of part D: the families in its sizes, equal formulations, loops by hand beside recipes, dropout by shared
masks. Nothing may be said of one of them."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Group, LossScaler, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.held_out.clean_pairs import Pair
from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, HALF, settings
from tests.parity.held_out.part_d.equal_formulations import ALL_POLICIES, FLOAT32
from tests.parity.held_out.part_d.variants import side

_POLICIES: Final = (BRAIN, HALF, CAST)
_OPTIMIZERS: Final[tuple[dict[str, Any], ...]] = (
    {"optimizer": sgd(schedules.linear(0.05, 1, 4), momentum=0.8, weight_decay=1e-2), "clip_norm": 0.5},
    {"optimizer": adamw(schedules.cosine(3e-3, 4, end=1e-3), betas=(0.8, 0.99), weight_decay=0.05)},
    {"optimizer": rmsprop(1e-3, alpha=0.9)},
    {"optimizer": adam(2e-3, eps=1e-6, groups=no_decay("bias", "norm"), weight_decay=0.01)},
    {"optimizer": lion(5e-4, betas=(0.95, 0.98), weight_decay=0.05)},
)
_PLAIN: Final = (
    ("decoder", "torch nnx", "float32"), ("decoder", "nnx torch", BRAIN), ("decoder", "nnx nnx", CAST),
    ("seq2seq", "nnx torch", "float32"), ("seq2seq", "torch torch", HALF), ("encoder", "torch nnx", HALF),
    ("encoder", "torch torch", CAST), ("unet", "torch nnx", BRAIN), ("unet", "nnx torch", "float32"),
    ("convnet", "torch keras", "float32"), ("convnet", "keras torch", BRAIN), ("tagger", "torch nnx", BRAIN),
    ("tagger", "nnx torch", HALF), ("vae", "keras nnx", CAST), ("vae", "torch keras", HALF),
    ("recommender", "nnx keras", BRAIN), ("recommender", "torch nnx", HALF),
)  # fmt: skip
"""Family, frameworks, policy."""


def _plain() -> list[Pair]:
    found = []
    for number, (family, pair, policy) in enumerate(_PLAIN):
        recipe = {"policy": policy, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
        one, other = (side(family, each, recipe=recipe) for each in pair.split())
        found.append(Pair(family, f"other sizes, {str(policy)[:24]}", one, other, 1000 + number))
    return found


def _policy(number: int, family: str, words: str) -> Any:
    """A policy in turn. Models whose code keeps float32 numbers are not cast; nor are those that have an island."""
    fixed = family in ("unet", "seq2seq") or "float32" in words or "exp and sum" in words
    return _POLICIES[number % (2 if fixed else 3)]


def _equal() -> list[Pair]:
    found = []
    for number, (family, framework, words, edits) in enumerate(ALL_POLICIES):
        for other, policy in (("torch", "float32"), (framework, _policy(number, family, words))):
            recipe = {"policy": policy, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
            sides = side(family, other, recipe=recipe), side(family, framework, edits, recipe=recipe)
            found.append(Pair(family, words, *sides, 1100 + number))
    for number, (family, framework, words, edits) in enumerate(FLOAT32):
        sides = side(family, framework), side(family, framework, edits)
        found.append(Pair(family, words, *sides, 1200 + number))
    return found


def _decays(rate: Any, **others: Any) -> dict[str, Any]:
    return {"optimizer": sgd(rate, momentum=0.9, weight_decay=0.1, **others)}


_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_NINE: Final = LossScaler(init_scale=2.0**9)
_HEAD: Final = _decays(1e-2, groups=[Group("classifier/**", learning_rate_scale=0.1)])
_LOOPS: Final[tuple[tuple[str, str, str, dict[str, Any], dict[str, Any], Any], ...]] = (
    ("recommender", "torch", "AdamW by hand", _ADAMW, {"BY_HAND": True}, "float32"),
    ("seq2seq", "torch", "SGD by hand", _decays(1e-2), {"BY_HAND": True, "KIND": "sgd"}, "float32"),
    ("encoder", "torch", "the classifier's rate", _HEAD, {"GROUPS": "classifier", "KIND": "sgd"}, "float32"),
    ("decoder", "nnx", "exponential decay", _decays(schedules.exponential(1e-2, 0.5)), {"KIND": "sgd", "SCHEDULE": "exponential"}, "float32"),
    ("unet", "nnx", "clipped", {**_decays(1e-2), "clip_norm": 0.1}, {"KIND": "sgd", "CLIP": 0.1}, "float32"),
    ("recommender", "nnx", "accumulated", {**_ADAMW, "accumulate_steps": 4}, {"PARTS": 4}, "float32"),
    ("encoder", "torch", "AdamW", _ADAMW, {"DTYPE": "bfloat16"}, BRAIN),
    ("recommender", "torch", "SGD", _decays(1e-2), {"DTYPE": "bfloat16", "KIND": "sgd"}, BRAIN),
    ("seq2seq", "torch", "clipped", {**_decays(1e-2), "clip_norm": 0.1}, {"DTYPE": "bfloat16", "KIND": "sgd", "CLIP": 0.1}, BRAIN),
    ("encoder", "torch", "a scale", {**_decays(1e-2), "scaler": _NINE}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**9}, HALF),
    ("seq2seq", "torch", "a scale that grows", {**_decays(1e-2), "scaler": LossScaler(init_scale=2.0**9, growth_interval=1)}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**9, "GROWTH": 1}, HALF),
    ("recommender", "torch", "casts", _ADAMW, {"DTYPE": "bfloat16", "MODE": "cast"}, CAST),
    ("vae", "nnx", "casts", _decays(1e-2), {"DTYPE": "bfloat16", "KIND": "sgd"}, CAST),
    ("recommender", "nnx", "a scale and a clip", {**_decays(1e-2), "scaler": _NINE, "clip_norm": 0.1}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**9, "CLIP": 0.1}, CAST_HALF),
)  # fmt: skip
"""Family, framework, words, recipe, the trainer's constants, policy. Under 16 bits only families whose operations have
the same dtypes in a plain loop and in a recipe: torch's autocast on a CPU leaves norms in 16 bits, flax's embeddings
stay float32 behind a cast of the parameters."""


def _by_hand() -> list[Pair]:
    found = []
    for number, (family, framework, words, recipe, constants, policy) in enumerate(_LOOPS):
        first = "torch" if policy == "float32" else framework
        one = side(family, first, recipe={"policy": policy, **recipe})
        two = side(family, framework, loop=settings(**constants), recipe={"policy": policy}, loops="trainer")
        found.append(Pair(family, f"a loop: {words}", one, two, 1300 + number))
    return found


def _dropping() -> list[Pair]:
    """Dropout by masks that both sides share."""
    options = {"randomness": "shared", "steps": 2}
    pairs = (("torch torch", BRAIN), ("torch torch", CAST), ("torch nnx", "float32"), ("torch nnx", BRAIN),
             ("nnx torch", HALF), ("nnx nnx", "float32"), ("nnx nnx", HALF), ("nnx torch", "float32"))  # fmt: skip
    found = []
    for number, (pair, policy) in enumerate(pairs):
        recipe = {"policy": policy, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
        one, other = (side("encoder", each, recipe=recipe) for each in pair.split())
        found.append(Pair("encoder", "dropout of 0.25", one, other, 1400 + number, options))
    return found


PAIRS: Final = (*_plain(), *_equal(), *_by_hand(), *_dropping())
"""All of them."""
