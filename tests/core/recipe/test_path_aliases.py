"""S5: aliases, the second paths of modules."""

from __future__ import annotations

from typing import Any

import pytest

from polyamp import Policy, PolicyError
from polyamp.recipe.path_aliases import expand_aliases, parse_aliases


@pytest.mark.parametrize(
    ("alias", "own", "path", "name"),
    [
        ("blocks/*", "transformer/h/*", "transformer/h/0/attn/weight", "blocks/0/attn/weight"),
        ("blocks/*", "block_*", "block_12", "blocks/12"),
        ("blocks/*/norm", "h_*/LayerNorm_0", "h_3/LayerNorm_0/scale", "blocks/3/norm/scale"),
        ("head", "model/lm_head", "model/lm_head", "head"),
        ("blocks/*", "block_*", "block_", None),
        ("blocks/*", "block_*", "other_1", None),
        ("head", "lm_head/dense", "lm_head", None),
    ],
)
def test_s05_an_alias_is_a_second_path(alias: str, own: str, path: str, name: str | None) -> None:
    places = dict.fromkeys([(path,), (own.replace("*", "7"),)])
    first, *_ = expand_aliases({alias: {"jax": own, "torch": "elsewhere" + "*" * alias.count("*")}}, "jax", places)
    assert first == ((path,) if name is None else (path, name))


def test_s05_a_backend_without_an_entry_has_the_alias_as_its_path() -> None:
    policy = Policy("mixed_bfloat16", overrides={"head": "float32"}, aliases={"head": {"torch": "lm_head"}})
    assert policy.plan(["lm_head", "body"], backend="torch").overridden == {"lm_head": "float32"}
    assert policy.plan(["head", "body"], backend="jax").overridden == {"head": "float32"}
    with pytest.raises(PolicyError, match="'head' matches no module path"):
        policy.plan(["lm_head", "body"], backend="jax")


def test_s05_the_frameworks_own_path_still_works_and_wildcards_see_aliases() -> None:
    aliases = {"blocks/*": {"torch": "h/*"}}
    for glob in ("h/0", "blocks/0", "bl*/0", "**/0"):
        policy = Policy("mixed_bfloat16", overrides={glob: "float32"}, aliases=aliases)
        assert policy.plan(["h", "h/0", "h/1"], backend="torch").overridden == {"h/0": "float32"}, glob


def test_s05_one_thing_with_several_paths_is_no_conflict() -> None:
    places = [("module/h/0", "h/0"), ("head",)]
    assert expand_aliases({"b/*": {"torch": "h/*"}}, "torch", places)[0] == ("module/h/0", "h/0", "b/0")


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"head": {"torch": "nonesuch"}}, r"'head' is 'nonesuch' on the torch backend.* Nearest: "),
        ({"h/1": {"torch": "h/0"}}, "gives 'h/0' the name 'h/1', which is already a name of 'h/1'"),
        ({"x/": {"torch": "h/0"}}, "separated by '/'"),
        ({"same/*": {"torch": "h/*"}, "same/1": {"torch": "head"}}, "gives 'head' the name 'same/1', .* of 'h/1'"),
        ({"a/*": {"torch": "h"}}, "one '\\*' each"),
        ({"**": {"torch": "**"}}, "at most one '\\*'"),
        ({"h.0": {"torch": "h/0"}}, "no '.'"),
        ({"a": "h"}, r"aliases\['a'\] must map a backend's name to a path"),
        (["a"], "aliases must map a name to its path"),
    ],
)
def test_s20_aliases_that_do_not_fit(aliases: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        expand_aliases(parse_aliases(aliases), "torch", [("h/0",), ("h/1",), ("head",)])
