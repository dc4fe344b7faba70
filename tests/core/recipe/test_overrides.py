"""S5: module-path globs of `Policy.overrides`, against an independent translation to regular expressions."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import Policy, PolicyError
from polyamp.recipe.overrides import covers

NAMES = st.sampled_from(["a", "b", "ab", "norm", "norm1", "head", "0"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
PIECES = st.sampled_from(["a", "b", "ab", "norm", "norm1", "head", "*", "**", "norm*", "*b", "n*m?", "[ab]", "a*b*"])
GLOBS = st.lists(PIECES, min_size=1, max_size=4).map("/".join)


def as_pattern(glob: str) -> re.Pattern[str]:
    """`glob` as a pattern over a path with a '/' after every segment."""
    parts = {"**": r"(?:[^/]+/)*"}
    segment = {"*": "[^/]*", "?": "[^/]", "[ab]": "[ab]"}
    pattern = ""
    for piece in glob.split("/"):
        if piece in parts:
            pattern += parts[piece]
        else:
            tokens = re.findall(r"\[ab\]|.", piece)
            pattern += "".join(segment.get(token, re.escape(token)) for token in tokens) + "/"
    return re.compile(pattern + "(?:[^/]+/)*")


@given(GLOBS, PATHS)
def test_s05_globs_agree_with_regular_expressions(glob: str, path: str) -> None:
    assert covers(glob, path) == (as_pattern(glob).fullmatch(path + "/") is not None)


@given(PATHS, PATHS)
def test_s05_a_plain_path_covers_itself_and_what_is_inside_it(outer: str, inner: str) -> None:
    assert covers(outer, outer)
    assert covers(outer, f"{outer}/{inner}")
    assert not covers(f"{outer}/x", outer)


@given(PATHS)
def test_s05_stars(path: str) -> None:
    depth = path.count("/") + 1
    assert covers("**", path)
    assert covers("/".join(["*"] * depth), path)
    assert not covers("/".join(["*"] * (depth + 1)), path), "one star is one whole segment"
    assert covers(f"**/{path.rpartition('/')[2]}", path)


@given(st.dictionaries(GLOBS, st.sampled_from(["float16", "float32"]), max_size=4), PATHS)
def test_s05_the_longest_matching_glob_wins(overrides: dict[str, str], path: str) -> None:
    policy = Policy("mixed_bfloat16", overrides=overrides)
    matching = [glob for glob in overrides if as_pattern(glob).fullmatch(path + "/")]
    dtype = policy.dtype_at(path)
    if not matching:
        assert dtype is None
    else:
        longest = max(map(len, matching))
        assert dtype in {overrides[glob] for glob in matching if len(glob) == longest}
    backwards = Policy("mixed_bfloat16", overrides=dict(reversed(overrides.items())))
    assert backwards.dtype_at(path) == dtype, "equal policies decide equally"


@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ("encoder/norm1", "float32"),
        ("encoder/norm1/scale", "float32"),
        ("encoder/dense", "float16"),
        ("encoder/block/norm1", "float16"),
        ("head", "bfloat16"),
        ("heads", None),
        ("decoder/head", None),
        ("a/b/c/gate", "float32"),
    ],
)
def test_s05_examples(path: str, dtype: str | None) -> None:
    overrides = {"encoder": "float16", "encoder/norm*": "float32", "head": "bf16", "**/gate": "f32"}
    assert Policy("mixed_bfloat16", overrides=overrides).dtype_at(path) == dtype


def test_s05_equally_long_globs_decide_the_same_in_any_order() -> None:
    one, other = {"a/*": "float16", "*/b": "float32"}, {"*/b": "float32", "a/*": "float16"}
    assert Policy("mixed_bfloat16", overrides=one) == Policy("mixed_bfloat16", overrides=other)
    for overrides in (one, other):
        assert Policy("mixed_bfloat16", overrides=overrides).dtype_at("a/b") == "float16"


def test_s05_resolve_overrides() -> None:
    policy = Policy("mixed_float16", overrides={"encoder/norm*": "float32", "head": "float32"})
    paths = ["encoder", "encoder/dense", "encoder/norm1", "encoder/norm2", "head"]
    assert policy.resolve_overrides(paths) == {
        "encoder/norm1": "float32",
        "encoder/norm2": "float32",
        "head": "float32",
    }
    assert Policy("mixed_float16").resolve_overrides(paths) == {}


def test_s05_a_glob_that_matches_nothing_lists_the_nearest_paths() -> None:
    policy = Policy("mixed_float16", overrides={"head": "float32", "encoder/nrm1": "float32"})
    with pytest.raises(PolicyError) as caught:
        policy.resolve_overrides(["encoder/norm1", "encoder/norm2", "head", "zzz"])
    assert str(caught.value) == (
        "overrides: the glob 'encoder/nrm1' matches no module path. Nearest: 'encoder/norm1', 'encoder/norm2'. Paths "
        "are separated by '/', and '*' stays inside one segment."
    )


def test_s05_a_glob_near_to_nothing_lists_the_first_paths() -> None:
    with pytest.raises(PolicyError, match=r"the glob 'q' matches no module path\. Nearest: 'aaa', 'bbb'\."):
        Policy(overrides={"q": "float32"}).resolve_overrides(["bbb", "aaa"])


@pytest.mark.parametrize("glob", ["encoder.norm1", "layers.0", "/head", "head/", "", 3])
def test_s05_keys_that_cannot_be_a_path_are_refused(glob: Any) -> None:
    with pytest.raises(PolicyError, match=r"overrides: a key is a module-path glob .*no '\.'\. Received: "):
        Policy("mixed_float16", overrides={glob: "float32"})
