"""Records as plain data, and back: what stands in TOML, JSON and framework configs. Imported at the first file.

`convert` reads through msgspec, which says what is wrong and where. It knows no records, so it fills a mirror of each:
a struct of the same fields that makes its record, and so has it checked, while the path is still known.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from polyamp.errors import RecipeError, did_you_mean
from polyamp.other_names import advice
from polyamp.recipe.policy import Policy
from polyamp.records import Record


class _Mirror(msgspec.Struct, dict=True, forbid_unknown_fields=True, tag_field="type", tag=False):
    """What mirrors share; each has the fields of its record, which it holds as `record`."""


def convert(value: Any, kind: Any) -> Any:
    """A record of `kind`, a record class or a union of some, from plain data.

    Raises:
        msgspec.ValidationError: an unknown key, a wrong type or an impossible value, with what is known there; it ends
            with the path.
    """
    try:
        return msgspec.convert(value, _mirrored(kind), dec_hook=_policy).record
    except msgspec.ValidationError as error:
        clearer = _clearer(str(error), value, kind)
        if clearer is None:
            raise
        raise msgspec.ValidationError(clearer) from error


def _clearer(message: str, value: Any, kind: Any) -> str | None:
    """msgspec's message for an unknown key or `type`, with those that there are; None for other messages."""
    found = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", message, re.DOTALL)
    assert found is not None
    problem, path = found[1], found[2] or ""
    where = f" - at `${path}`" if path else ""
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        kinds = _kinds_at(kind, value, path)
        if len(kinds) != 1:
            return None
        fields, name = kinds[0].field_names, unknown[1]
        return (
            f"{kinds[0].called()} has the keys {', '.join(fields)}. Received: {name!r}."
            f"{advice(kinds[0].word, fields, [name])}{where}"
        )
    wrong = re.fullmatch(r"Invalid value '(.*)'", problem)
    if (wrong and path.endswith(".type")) or problem == "Object missing required field `type`":
        tags = [each.tag for each in _kinds_at(kind, value, path.removesuffix(".type"), by_type=False)]
        received = f"{wrong[1]!r}.{did_you_mean(wrong[1], tags)}" if wrong else "no type."
        return f"type must be one of {', '.join(tags)}. Received: {received}{where}"
    return None


def _kinds_at(kind: Any, value: Any, path: str, *, by_type: bool = True) -> list[Any]:
    """The record classes that may stand at a path of plain data, such as ".optimizer.learning_rate".

    Args:
        kind: what stands at the root.
        value: the plain data.
        path: the path from the root.
        by_type: look at the table's own `type`, where there is one, at the end of the path too.
    """
    kinds = _records(kind)
    for key, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path):
        if key:
            kinds = [each for k in _chosen(kinds, value) for each in _records(get_type_hints(k).get(key))]
            value = value.get(key) if isinstance(value, dict) else None
        else:  # msgspec writes an index of a list; a record in it is found among the list's members
            value = value[int(index)] if isinstance(value, list | tuple) and index.isdigit() else None
    return _chosen(kinds, value) if by_type else kinds


def _chosen(kinds: list[Any], value: Any) -> list[Any]:
    tag = value.get("type") if isinstance(value, dict) else None
    return [each for each in kinds if not each.tag or each.tag == tag]


def _records(hint: Any) -> list[Any]:
    """The record classes in a type."""
    if isinstance(hint, type) and issubclass(hint, Record) and hint is not Policy:
        return [hint]
    return [each for inner in get_args(hint) for each in _records(inner)]


def plain(value: Any) -> Any:
    """A record as plain data, and what is in it. What has a `type` is written whole, the rest without defaults."""
    if isinstance(value, Policy):
        return {name: each for name, each in value.to_dict().items() if each not in (None, {}, "polyamp")}
    if isinstance(value, Record):
        kind = type(value)
        fields = {
            name: plain(each)
            for name, each in value.to_dict().items()
            if (kind.tag or isinstance(each, Record) or each is not kind.defaults.get(name, Record))
            and not (isinstance(each, tuple) and not each and name in kind.defaults)
        }
        return {"type": kind.tag, **fields} if kind.tag else fields
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value  # NumPy's float64 is a float that no encoder knows


@functools.cache
def _mirrored(kind: Any) -> Any:
    """`kind`, with mirrors for records."""
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Policy:
        return _mirror(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(_mirrored(each) for each in get_args(kind))]  # noqa: UP007  # they are known only now
    if get_origin(kind) is Sequence and issubclass(inner := get_args(kind)[0], Record):
        return list[_mirror(inner)]  # type: ignore[misc]  # known only now
    return kind


def _mirror(kind: type[Record]) -> type[msgspec.Struct]:
    def make(mirror: Any) -> None:
        values = {name: getattr(mirror, name) for name in kind.field_names}
        mirror.record = kind(**{name: _held(value) for name, value in values.items()})

    hints = get_type_hints(kind)
    fields = [
        (name, _mirrored(hints[name]), *([kind.defaults[name]] if name in kind.defaults else []))
        for name in kind.field_names
    ]
    return msgspec.defstruct(
        kind.__name__, fields, bases=(_Mirror,), namespace={"__post_init__": make}, kw_only=True, tag=kind.tag or None
    )


def _held(value: Any) -> Any:
    return [_held(item) for item in value] if isinstance(value, list) else getattr(value, "record", value)


def _policy(_: type[Any], value: Any) -> Policy:
    if isinstance(value, str):
        return Policy(value)
    if isinstance(value, dict):
        known = (*Policy.field_names, "name")
        for key in value:
            if key not in known:
                close = advice("policy", known, [key])
                raise RecipeError(
                    f"policy has the keys {', '.join(known)}. Received: {key!r}.{close}".removesuffix(".")
                )
        if "compute" not in value and "name" not in value:
            raise RecipeError(
                'policy must say in which dtype it computes: compute = "float16", or a spelling in '
                f'name = "mixed_float16". Received the keys: {", ".join(value) or "none"}'
            )
        return Policy(value.get("name"), **{key: v for key, v in value.items() if key != "name"})
    raise RecipeError(f"policy must be a string or a table. Received: {value!r}")
