"""`polyamp.trees`: a mapped tree has the types of the one it was made from."""

from __future__ import annotations

from typing import Any

from polyamp.trees import map_tree


def test_trees_keep_their_types() -> None:
    from collections import OrderedDict, UserDict, defaultdict, namedtuple
    from dataclasses import dataclass

    @dataclass
    class Pair:
        left: int
        right: int

    class Output(OrderedDict[str, int]):
        def __init__(self, **values: int) -> None:
            super().__init__(values)

    point = namedtuple("point", "x y")  # the untyped kind is the harder one

    def doubled(tree: Any) -> Any:
        return map_tree(lambda leaf: 2 * leaf, tree)

    assert doubled(defaultdict(int, a=1)) == {"a": 2}
    assert doubled(defaultdict(int, a=1))["missing"] == 0
    assert doubled(UserDict(a=1)).data == {"a": 2}
    assert type(doubled(Output(a=1))) is Output
    assert doubled(Pair(1, 2)) == Pair(2, 4)
    assert doubled(point(1, 2)) == point(2, 4)
