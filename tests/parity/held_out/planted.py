"""`Plant`: a fault, and where and as what a comparison must name it, which is written down before any run.

Called by the lists (`in_*`) and by `__main__`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tests.parity.faults.planted import Expected
from tests.parity.held_out.harness import Side
from tests.porting.faults.planting import Carried, Edit

ANY: Final = Expected("update|step|backward", ".*")
"""What a rule of the step changes: any parameter, moment, norm or loss."""
LATER: Final = Expected("update|step|backward", ".*", step=2)
LOSS: Final = Expected("forward|step", "", what="loss")
WORDS: Final = {
    "formula": "formula",
    "epsilon": "epsilon",
    "dtype": "dtype|not finite",
    "layout": "layout",
    "stopped": "missing",
    "halved": "missing|formula|factor",
    "statistics": "formula|factor|~momentum|~running",
    "factor": "factor",
    "randomness": "formula|randomness|missing|~dropout",
}
"""Kind of fault -> what the comparison must say that it looks like: kinds of divergences, or after "~" what its
sentence or evidence must hold."""


class Plant(NamedTuple):
    """One fault.

    Attributes:
        family: of `harness.FAMILIES`.
        kind: of `WORDS`, or "step", "optimizer", "loss".
        what: in words.
        first: the side that is right, and names the modules.
        second: the side with the fault.
        expected: where it must be named.
        says: as the values of `WORDS`.
        carried: arrays that came wrongly.
        options: further arguments of `harness.compared`.
    """

    family: str
    kind: str
    what: str
    first: Side
    second: Side
    expected: Expected
    says: str
    carried: tuple[Carried, ...] = ()
    options: dict[str, Any] = {}


def named(says: str, kind: str, sentence: str) -> bool:
    """Whether a diagnosis is the one that `says` asks for."""
    parts = says.split("|")
    words = [part[1:] for part in parts if part.startswith("~")]
    return kind in parts or any(re.search(word, sentence, re.IGNORECASE) for word in words)


def at(places: str, stage: str = "forward", **others: Any) -> Expected:
    """Where a fault in a model's code shows; `places` are paths with spaces between, any separator between words."""
    patterns = (
        f"{re.escape(each.removesuffix('/*')).replace('/', '[/_]')}{'(/.*)?' * each.endswith('/*')}"
        for each in places.split()
    )
    pattern = "" if places == "-" else "|".join(patterns).replace("\\-|", "|")
    if stage == "forward":
        others.setdefault("what", "(in|out)put.*")
    return Expected(stage, ".*" if places == "anywhere" else pattern, **others)


def plant(
    family: str, pair: str, kind: str, what: str, places: str, *edits: Edit, stage: str = "forward", **others: Any
) -> Plant:
    """A fault in the second side's code. `pair`: "torch nnx"."""
    first, second = pair.split()
    expected = LOSS if places == "loss" else at(places, stage)
    return Plant(
        family,
        kind,
        what,
        Side(first),
        Side(second, edits),
        expected,
        others.pop("says", WORDS.get(kind, kind)),
        **others,
    )


def wrong_array(family: str, pair: str, what: str, places: str, pattern: str, change: Any) -> Plant:
    """A weight that came wrongly to the second side."""
    first, second = pair.split()
    expected = at(places, "update|forward", step=(0, 1), what="parameter|(in|out)put.*")
    return Plant(family, "layout", what, Side(first), Side(second), expected, "layout", (Carried(pattern, change),))


def policy(
    family: str,
    pair: str,
    what: str,
    places: str,
    recipe: str,
    *edits: Edit,
    both: tuple[Edit, ...] = (),
    **others: Any,
) -> Plant:
    """A fault in the second side's code that only 16 bits show; `both` are edits of right code of both sides."""
    first, second = pair.split()
    sides = Side(first, both, recipe={"policy": recipe}), Side(second, (*both, *edits), recipe={"policy": recipe})
    return Plant(family, "dtype", what, *sides, at(places, phase="policy", **others), WORDS["dtype"])


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
    sides = Side(first, recipe=right), Side(second, recipe={**right, **wrong})
    return Plant(family, "optimizer", what, *sides, expected, says, options=options)


def loop(
    family: str,
    pair: str,
    what: str,
    says: str,
    right: dict[str, Any] | tuple[Edit, ...],
    wrong: tuple[Edit, ...],
    expected: Expected = ANY,
    policy: str = "float32",
    edits: Mapping[str, tuple[Edit, ...]] | None = None,
    **options: Any,
) -> Plant:
    """A loop of the second side that is wrong, beside a recipe or a loop that is right.

    `edits` are of the model in each framework.
    """
    first, second = pair.split()
    ours, theirs = ((edits or {}).get(each, ()) for each in (first, second))
    if isinstance(right, tuple):
        one = Side(first, ours, loop=right, recipe={"policy": policy})
    else:
        one = Side(first, ours, recipe={"policy": policy, **right})
    return Plant(
        family,
        "step",
        what,
        one,
        Side(second, theirs, loop=wrong, recipe={"policy": policy}),
        expected,
        says,
        options=options,
    )
