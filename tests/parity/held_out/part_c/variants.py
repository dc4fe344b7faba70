"""The families in other sizes, and the helpers with which the lists of part C write their faults down."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Policy
from tests.parity.faults.planted import Expected
from tests.parity.held_out.harness import Side
from tests.parity.held_out.planted import ANY, LOSS, WORDS, Plant, at
from tests.porting.faults.planting import Carried, Edit

_NAMES: Final = {
    "decoder": ("WIDTH, HEADS, SIZE, WORDS, HIDDEN, BLOCKS", "16, 4, 4, 23, 24, 2", "24, 4, 6, 23, 36, 3"),
    "seq2seq": ("WIDTH, HEADS, SIZE, WORDS, HIDDEN, DISTANCES", "16, 2, 8, 19, 32, 5", "24, 3, 8, 19, 40, 3"),
    "encoder": (
        "WIDTH, HEADS, WORDS, HIDDEN, LENGTH, CLASSES, BLOCKS, RATE",
        "16, 2, 29, 32, 6, 5, 2, 0.1",
        "24, 4, 29, 48, 6, 5, 3, 0.2",
    ),
    "unet": ("WIDTH, CHANNELS, GROUPS", "8, 3, 4", "12, 3, 3"),
    "convnet": ("WIDTH, CHANNELS, CLASSES", "8, 3, 5", "12, 3, 5"),
    "tagger": ("WIDTH, UNITS, WORDS, TAGS", "12, 8, 31, 7", "10, 12, 31, 7"),
    "vae": ("PIXELS, HIDDEN, CODE", "20, 16, 4", "20, 24, 4"),
    "recommender": ("DENSE, WIDTH, TABLES", "6, 8, (11, 17, 5)", "6, 12, (11, 17, 5)"),
}
BRAIN: Final = "mixed_bfloat16"
HALF: Final = "mixed_float16"
CAST: Final = Policy(param="float32", compute="bfloat16", output="float32", mode="cast")
CAST_HALF: Final = Policy(param="float32", compute="float16", output="float32", mode="cast")
CAST_OUT: Final = Policy(param="float32", compute="bfloat16", output="bfloat16", mode="cast")


def sizes(family: str, framework: str) -> tuple[Edit, ...]:
    """An edit of a family's text that makes its model larger."""
    names, before, after = _NAMES[family]
    if (family, framework) == ("convnet", "keras"):
        names, before, after = f"{names}, SIDE", f"{before}, 8", f"{after}, 8"
    return ((f"{names} = {before}", f"{names} = {after}"),)


def side(family: str, framework: str, edits: tuple[Edit, ...] = (), **others: Any) -> Side:
    """A side whose model has the sizes of this part."""
    return Side(framework, (*sizes(family, framework), *edits), **others)


def settings(**values: Any) -> tuple[Edit, ...]:
    """Edits of a trainer's constants."""
    before = {
        "RATE": "1e-2", "BETAS": "(0.9, 0.999)", "EPSILON": "1e-8", "DECAY": "0.1", "MOMENTUM": "0.9",
        "KIND": '"adamw"', "GROUPS": '""', "CLIP": "0.0", "PARTS": "1", "SCHEDULE": '""', "TOTAL": "4", "WARMUP": "0",
        "END": "0.0", "DTYPE": '""', "MODE": '"autocast"', "SCALE": "2.0**10", "GROWTH": "2000", "BY_HAND": "False",
    }  # fmt: skip
    return tuple((f"\n{name} = {before[name]}\n", f"\n{name} = {value!r}\n") for name, value in values.items())


def fault(
    family: str,
    pair: str,
    kind: str,
    what: str,
    places: str,
    *edits: Edit,
    stage: str = "forward",
    under: Any = "float32",
    phase: str = "float32",
    both: tuple[Edit, ...] = (),
    **others: Any,
) -> Plant:
    """A fault in the second side's code.

    Args:
        family: of `FAMILIES`.
        pair: "torch nnx".
        kind: of `WORDS`, or "loss".
        what: in words.
        places: paths as of `at`, or "loss".
        edits: of the second side.
        stage: the pass.
        under: policy of both sides.
        phase: "policy" where only 16 bits show it.
        both: edits of right code of both sides, in one framework.
        others: `says`, or a field of the plant.
    """
    first, second = pair.split()
    policy = {} if under == "float32" else {"policy": under}
    expected = LOSS._replace(phase=phase) if places == "loss" else at(places, stage, phase=phase)
    says = others.pop("says", WORDS.get(kind, kind))
    wrong = side(family, second, (*both, *edits), recipe=policy)
    return Plant(family, kind, what, side(family, first, both, recipe=policy), wrong, expected, says, **others)


def rounded(family: str, pair: str, what: str, places: str, policy: Any, *edits: Edit, **others: Any) -> Plant:
    """A fault in the second side's code that only 16 bits show; `others` as of `fault`."""
    return fault(family, pair, "dtype", what, places, *edits, under=policy, phase="policy", **others)


def carried(family: str, pair: str, what: str, places: str, pattern: str, change: Any, says: str = "layout") -> Plant:
    """A weight that came wrongly to the second side."""
    first, second = pair.split()
    expected = at(places, "update|forward", step=(0, 1), what="parameter|(in|out)put.*")
    sides = side(family, first), side(family, second)
    return Plant(family, "layout", what, *sides, expected, says, (Carried(pattern, change),))


def recipe(
    family: str,
    pair: str,
    what: str,
    says: str,
    right: dict[str, Any],
    wrong: dict[str, Any],
    expected: Expected = ANY,
    **options: Any,
) -> Plant:
    """A recipe of the second side that is another."""
    first, second = pair.split()
    sides = side(family, first, recipe=right), side(family, second, recipe={**right, **wrong})
    return Plant(family, "optimizer", what, *sides, expected, says, options=options)


def loop(
    family: str,
    pair: str,
    what: str,
    says: str,
    right: dict[str, Any] | None,
    constants: dict[str, Any],
    wrong: tuple[Edit, ...],
    expected: Expected = ANY,
    policy: Any = "float32",
    **options: Any,
) -> Plant:
    """A loop of the second side that is wrong.

    Args:
        family: of `FAMILIES`.
        pair: "torch nnx".
        what: in words.
        says: as of `Plant`.
        right: the first side's recipe; None: the first side is the same loop without the fault.
        constants: of the loop.
        wrong: further edits of the second side's loop.
        expected: where it must be named.
        policy: of both.
        options: of `harness.compared`.
    """
    first, second = pair.split()
    if right is None:
        one = side(family, first, loop=settings(**constants), recipe={"policy": policy}, loops="trainer")
    else:
        one = side(family, first, recipe={"policy": policy, **right})
    two = side(family, second, loop=(*settings(**constants), *wrong), recipe={"policy": policy}, loops="trainer")
    if policy != "float32":
        expected = expected._replace(phase="policy")
    return Plant(family, "step", what, one, two, expected, says, options=options)
