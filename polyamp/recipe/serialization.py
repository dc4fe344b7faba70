"""Conversion of records to plain data and back, for TOML, JSON and framework configs. Imported at the first file.

`record_from_data` parses with msgspec, which reports the error and its path. msgspec knows no records, so each record
class has a mirror: a struct with the same fields. It builds and checks its record while the path is still known.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from polyamp.argument_hints import argument_hint
from polyamp.errors import RecipeError, did_you_mean
from polyamp.recipe.policy import Policy
from polyamp.records import Record


class _RecordMirror(msgspec.Struct, dict=True, forbid_unknown_fields=True, tag_field="type", tag=False):
    """Base of the mirrors. Each has the fields of its record, and stores the record as `record`."""


def record_from_data(value: Any, kind: Any) -> Any:
    """Parse plain data as a record of `kind`, a record class or a union of record classes.

    Raises:
        msgspec.ValidationError: an unknown key, a wrong type or an impossible value; lists the accepted ones and ends
            with the path.
    """
    try:
        return msgspec.convert(value, _mirror_type(kind), dec_hook=_decode_policy).record
    except msgspec.ValidationError as error:
        clearer = _clearer_message(str(error), value, kind)
        if clearer is None:
            raise
        raise msgspec.ValidationError(clearer) from error


def _clearer_message(message: str, value: Any, kind: Any) -> str | None:
    """Return msgspec's message for an unknown key or `type` with the known ones; None for other messages."""
    found = re.fullmatch(r"(.*?)(?: - at `\$(.*)`)?", message, re.DOTALL)
    assert found is not None
    problem, path = found[1], found[2] or ""
    where = f" - at `${path}`" if path else ""
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        kinds = _classes_at(kind, value, path)
        if len(kinds) != 1:
            return None
        fields, name = kinds[0].field_names, unknown[1]
        return (
            f"{kinds[0].called()} has the keys {', '.join(fields)}. Received: {name!r}."
            f"{argument_hint(kinds[0].word, fields, [name])}{where}"
        )
    wrong = re.fullmatch(r"Invalid value '(.*)'", problem)
    if (wrong and path.endswith(".type")) or problem == "Object missing required field `type`":
        tags = [each.tag for each in _classes_at(kind, value, path.removesuffix(".type"), by_type=False)]
        received = f"{wrong[1]!r}.{did_you_mean(wrong[1], tags)}" if wrong else "no type."
        return f"type must be one of {', '.join(tags)}. Received: {received}{where}"
    return None


def _classes_at(kind: Any, value: Any, path: str, *, by_type: bool = True) -> list[Any]:
    """Return the record classes that are accepted at a path of plain data, such as ".optimizer.learning_rate".

    Args:
        kind: the accepted classes at the root.
        value: the plain data.
        path: the path from the root.
        by_type: also use the table's own `type`, if present, at the end of the path.
    """
    kinds = _record_classes(kind)
    for key, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path):
        if key:
            kinds = [
                each for k in _classes_with_tag(kinds, value) for each in _record_classes(get_type_hints(k).get(key))
            ]
            value = value.get(key) if isinstance(value, dict) else None
        else:  # msgspec reports the index of a list; its records are members of the list
            value = value[int(index)] if isinstance(value, list | tuple) and index.isdigit() else None
    return _classes_with_tag(kinds, value) if by_type else kinds


def _classes_with_tag(kinds: list[Any], value: Any) -> list[Any]:
    tag = value.get("type") if isinstance(value, dict) else None
    return [each for each in kinds if not each.tag or each.tag == tag]


def _record_classes(hint: Any) -> list[Any]:
    """Return the record classes in a type."""
    if isinstance(hint, type) and issubclass(hint, Record) and hint is not Policy:
        return [hint]
    return [each for inner in get_args(hint) for each in _record_classes(inner)]


def to_plain_data(value: Any) -> Any:
    """Convert a record and its content to plain data. Records with a `type` keep their defaults, others omit them."""
    if isinstance(value, Policy):
        return {name: each for name, each in value.to_dict().items() if each not in (None, {}, "polyamp")}
    if isinstance(value, Record):
        kind = type(value)
        fields = {
            name: to_plain_data(each)
            for name, each in value.to_dict().items()
            if (kind.tag or isinstance(each, Record) or each is not kind.defaults.get(name, Record))
            and not (each is None and kind.defaults.get(name, Record) is None)  # TOML has no word for it
            and not (isinstance(each, tuple) and not each and name in kind.defaults)
        }
        return {"type": kind.tag, **fields} if kind.tag else fields
    if isinstance(value, tuple):
        return tuple(map(to_plain_data, value))
    if isinstance(value, Mapping):
        return {key: to_plain_data(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value  # NumPy's float64 is a float that encoders reject


@functools.cache
def _mirror_type(kind: Any) -> Any:
    """Return `kind` with every record class replaced by its mirror."""
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Policy:
        return _mirror_class(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(_mirror_type(each) for each in get_args(kind))]  # noqa: UP007  # known only now
    if get_origin(kind) is Sequence and _record_classes(kind):
        return list[_mirror_type(get_args(kind)[0])]  # type: ignore[misc]  # known only at run time
    return kind


def _mirror_class(kind: type[Record]) -> type[msgspec.Struct]:
    def make(mirror: Any) -> None:
        values = {name: getattr(mirror, name) for name in kind.field_names}
        mirror.record = kind(**{name: _unwrap_records(value) for name, value in values.items()})

    hints = get_type_hints(kind)
    fields = [
        (name, _mirror_type(hints[name]), *([kind.defaults[name]] if name in kind.defaults else []))
        for name in kind.field_names
    ]
    return msgspec.defstruct(
        kind.__name__,
        fields,
        bases=(_RecordMirror,),
        namespace={"__post_init__": make},
        kw_only=True,
        tag=kind.tag or None,
    )


def _unwrap_records(value: Any) -> Any:
    return [_unwrap_records(item) for item in value] if isinstance(value, list) else getattr(value, "record", value)


def _decode_policy(_: type[Any], value: Any) -> Policy:
    if isinstance(value, str):
        return Policy(value)
    if isinstance(value, dict):
        known = (*Policy.field_names, "name")
        for key in value:
            if key not in known:
                close = argument_hint("policy", known, [key])
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
