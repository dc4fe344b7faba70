"""Clean pairs of part E: the families in its sizes, equal formulations, loops by hand beside recipes, dropout by shared
masks. Nothing may be said of one of them."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Group, LossScaler, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.held_out.clean_pairs import Pair
from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, HALF, settings
from tests.parity.held_out.part_e.equal_formulations import ALL_POLICIES, FLOAT32
from tests.parity.held_out.part_e.variants import side

_POLICIES: Final = (HALF, BRAIN, CAST)
_OPTIMIZERS: Final[tuple[dict[str, Any], ...]] = (
    {
        "optimizer": adamw(schedules.inverse_sqrt(5e-3, 2, start=1e-3), betas=(0.85, 0.98), weight_decay=0.02),
        "clip_norm": 0.3,
    },
    {"optimizer": sgd(schedules.polynomial(0.05, 4, power=2.0), momentum=0.7, nesterov=True, weight_decay=1e-3)},
    {"optimizer": adam(1e-3, betas=(0.5, 0.99), groups=no_decay("bias"), weight_decay=0.02)},
    {"optimizer": rmsprop(2e-3, alpha=0.95, weight_decay=1e-2)},
    {"optimizer": lion(3e-4, betas=(0.9, 0.95), weight_decay=0.2), "clip_norm": 2.0},
)
_PLAIN: Final = (
    ("decoder", "nnx torch", "float32"), ("decoder", "torch nnx", HALF), ("decoder", "torch torch", CAST),
    ("seq2seq", "torch nnx", BRAIN), ("seq2seq", "nnx nnx", HALF), ("encoder", "nnx torch", BRAIN),
    ("encoder", "nnx nnx", CAST), ("unet", "nnx torch", HALF), ("unet", "torch nnx", "float32"),
    ("convnet", "torch nnx", BRAIN), ("convnet", "keras torch", HALF), ("tagger", "torch nnx", "float32"),
    ("tagger", "nnx nnx", CAST), ("vae", "keras torch", BRAIN), ("vae", "nnx keras", "float32"),
    ("recommender", "torch keras", CAST),
)  # fmt: skip
"""Family, frameworks, policy."""


def _plain() -> list[Pair]:
    found = []
    for number, (family, pair, policy) in enumerate(_PLAIN):
        recipe = {"policy": policy, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
        one, other = (side(family, each, recipe=recipe) for each in pair.split())
        found.append(Pair(family, f"other sizes, {str(policy)[:24]}", one, other, 1500 + number))
    return found


def _policy(number: int, family: str, words: str) -> Any:
    """A policy in turn. Models whose code keeps float32 numbers are not cast; nor are those that have an island."""
    return _POLICIES[number % (2 if family in ("unet", "seq2seq") or "float32" in words else 3)]


def _equal() -> list[Pair]:
    found = []
    for number, (family, framework, words, edits) in enumerate(ALL_POLICIES):
        for other, policy in (("torch", "float32"), (framework, _policy(number, family, words))):
            recipe = {"policy": policy, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
            sides = side(family, other, recipe=recipe), side(family, framework, edits, recipe=recipe)
            found.append(Pair(family, words, *sides, 1600 + number))
    for number, (family, framework, words, edits) in enumerate(FLOAT32):
        sides = side(family, framework), side(family, framework, edits)
        found.append(Pair(family, words, *sides, 1700 + number))
    return found


def _decays(rate: Any, **others: Any) -> dict[str, Any]:
    return {"optimizer": sgd(rate, momentum=0.9, weight_decay=0.1, **others)}


_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SEVEN: Final = LossScaler(init_scale=2.0**7)
_HEAD: Final = _decays(1e-2, groups=[Group("top3/**", learning_rate_scale=0.1)])
_LOOPS: Final[tuple[tuple[str, str, str, dict[str, Any], dict[str, Any], Any], ...]] = (
    ("vae", "torch", "AdamW by hand, clipped", {**_ADAMW, "clip_norm": 0.2}, {"BY_HAND": True, "CLIP": 0.2}, "float32"),
    ("unet", "torch", "SGD by hand", _decays(1e-2), {"BY_HAND": True, "KIND": "sgd"}, "float32"),
    ("recommender", "torch", "the last layer's rate", _HEAD, {"GROUPS": "top3", "KIND": "sgd"}, "float32"),
    ("tagger", "nnx", "cosine with an end", _decays(schedules.cosine(1e-2, 4, end=5e-3)), {"KIND": "sgd", "SCHEDULE": "cosine", "END": 5e-3}, "float32"),
    ("encoder", "nnx", "vectors do not decay", {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("vector"))}, {"GROUPS": "vectors"}, "float32"),
    ("vae", "nnx", "accumulated and clipped", {**_decays(1e-2), "accumulate_steps": 2, "clip_norm": 0.2}, {"KIND": "sgd", "PARTS": 2, "CLIP": 0.2}, "float32"),
    ("recommender", "torch", "accumulated", {**_decays(1e-2), "accumulate_steps": 4}, {"DTYPE": "bfloat16", "KIND": "sgd", "PARTS": 4}, BRAIN),
    ("seq2seq", "torch", "AdamW by hand", _ADAMW, {"DTYPE": "bfloat16", "BY_HAND": True}, BRAIN),
    ("encoder", "torch", "a scale that grows", {**_decays(1e-2), "scaler": LossScaler(init_scale=2.0**7, growth_interval=1)}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**7, "GROWTH": 1}, HALF),
    ("recommender", "torch", "a scale and AdamW", {**_ADAMW, "scaler": _SEVEN}, {"DTYPE": "float16", "SCALE": 2.0**7}, HALF),
    ("vae", "nnx", "casts, AdamW", _ADAMW, {"DTYPE": "bfloat16"}, CAST),
    ("vae", "nnx", "a scale", {**_decays(1e-2), "scaler": _SEVEN}, {"DTYPE": "float16", "KIND": "sgd", "SCALE": 2.0**7}, CAST_HALF),
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
        found.append(Pair(family, f"a loop: {words}", one, two, 1800 + number))
    return found


def _dropping() -> list[Pair]:
    """Dropout by masks that both sides share."""
    options = {"randomness": "shared", "steps": 2}
    pairs = (("torch torch", "float32"), ("torch torch", HALF), ("torch nnx", "float32"), ("torch nnx", HALF),
             ("nnx torch", BRAIN), ("nnx nnx", BRAIN), ("nnx nnx", CAST), ("nnx torch", "float32"),
             ("torch torch", BRAIN))  # fmt: skip
    found = []
    for number, (pair, policy) in enumerate(pairs):
        recipe = {"policy": policy, **_OPTIMIZERS[number % len(_OPTIMIZERS)]}
        one, other = (side("encoder", each, recipe=recipe) for each in pair.split())
        found.append(Pair("encoder", "dropout of 0.3", one, other, 1900 + number, options))
    return found


PAIRS: Final = (*_plain(), *_equal(), *_by_hand(), *_dropping())
"""All of them."""
