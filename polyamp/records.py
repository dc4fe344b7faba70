"""`Record`: base class of frozen values with named fields.

`Policy`, `LossScaler`, `Recipe`, the optimizer specs and the schedules are records. A class lists its fields as
annotations, with defaults, and checks them in `__post_init__`; `Record` does the rest. `dataclasses` and msgspec would
do, but importing either costs more than all of polyamp. `polyamp.recipe.serialization` reads and writes records.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, dataclass_transform, get_type_hints

from polyamp.errors import ArgumentError, PolyampError, RecipeError, describe_value

_OF_CLASS = frozenset({"called", "defaults", "error", "field_names", "keyword_only", "tag", "word"})


class _Signature:
    """`__signature__` of a record class, built on first access: importing `inspect` takes as long as all else."""

    def __get__(self, instance: Any, kind: type[Record]) -> Any:
        if instance is not None or kind.__init__ is not Record.__init__:
            raise AttributeError("__signature__")  # `inspect` then looks at `__call__`, or at `__init__`
        from inspect import Parameter, Signature

        how = Parameter.KEYWORD_ONLY if kind.keyword_only else Parameter.POSITIONAL_OR_KEYWORD
        hints = get_type_hints(kind)
        fields = [(name, kind.defaults.get(name, Parameter.empty)) for name in kind.field_names]
        return Signature([Parameter(name, how, default=value, annotation=hints[name]) for name, value in fields])


@dataclass_transform(frozen_default=True)
class Record:
    """Frozen value: equal to one of the same class with equal fields, hashable, picklable and copyable.

    `copy.replace` of Python 3.13 supports it. `repr` shows the fields with other values than their defaults, and
    evaluates to an equal record.
    """

    field_names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}
    keyword_only: ClassVar[bool] = False
    _known: ClassVar[frozenset[str]] = frozenset()
    _hash: ClassVar[int | None] = None
    tag: ClassVar[str] = ""
    """`type` of its table in a file, if several classes are accepted there."""
    word: ClassVar[str] = "record"
    """Name of the kind of record in messages."""
    error: ClassVar[type[PolyampError]] = RecipeError
    """Class of the errors of `replace`."""
    __signature__: ClassVar[Any] = _Signature()

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        own = [name for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")]
        cls.field_names = (*cls.field_names, *(name for name in own if name not in cls.field_names))
        cls.defaults = {name: getattr(cls, name) for name in cls.field_names if hasattr(cls, name)}
        cls.keyword_only = kw_only
        cls._known = frozenset(cls.field_names)

    def __init__(self, *values: Any, **named: Any) -> None:
        kind, names = type(self), self.field_names
        if values:
            if kind.keyword_only or len(values) > len(names):
                raise _positional_argument_error(kind, values)
            for name, value in zip(names, values, strict=False):
                if name in named:
                    raise ArgumentError(f"{kind.called()}: {name!r} is given by name and position.")
                named[name] = value
        found = {**kind.defaults, **named}
        if found.keys() != kind._known:
            raise _argument_error(kind, named, found)
        for name in names:
            object.__setattr__(self, name, found[name])
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the fields. Subclasses implement it."""

    def _set_field(self, name: str, value: Any) -> None:
        """Set a field during construction."""
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen; use {self.word}.replace({name}=...) to get a changed copy."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; use {self.word}.replace(...) to get a changed copy.")

    def __dir__(self) -> list[str]:
        """Return what users need, for `dir` and completion: without what describes the class."""
        names = object.__dir__(self)
        return [name for name in names if name.startswith("__") or not (name[0] == "_" or name in _OF_CLASS)]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: `type(record)(**record.to_dict()) == record`."""
        return {name: getattr(self, name) for name in self.field_names}

    @classmethod
    def called(cls) -> str:
        """Return the name with which users create one: "adamw", "Recipe"."""
        return cls.tag or cls.__name__

    def _init_arguments(self) -> dict[str, Any]:
        """Return arguments that create an equal record, without those that others determine."""
        return self.to_dict()

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, checked as in the constructor. Also `copy.replace`, in Python 3.13.

        Raises:
            PolyampError: there is no such field; or the constructor's error.

        >>> from polyamp import Policy
        >>> Policy("mixed_float16").replace(mode="cast").mode
        'cast'
        """
        unknown = sorted(set(changes) - set(self.field_names))
        if unknown:
            raise self.error(
                f"{type(self).__name__} has the fields {', '.join(self.field_names)}. Received: {', '.join(unknown)}."
                + _argument_hint(type(self), unknown)
            )
        return type(self)(**{**self._init_arguments(), **changes})

    def __replace__(self, /, **changes: Any) -> Self:
        return self.replace(**changes)

    def _key(self) -> tuple[Any, ...]:
        """Return the values that equality compares."""
        return tuple([getattr(self, name) for name in self.field_names])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Record) or type(other) is not type(self):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        found = self._hash  # cached: `jit` and dictionaries hash often
        if found is None:
            self._set_field("_hash", found := hash((type(self), self._key())))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_record, (type(self), self._init_arguments())

    def __repr__(self) -> str:
        kind = type(self)
        changed = [
            f"{name}={value!r}"
            for name, value in self._init_arguments().items()
            if name not in kind.defaults or value != kind.defaults[name]
        ]
        return f"{kind.called()}({', '.join(changed)})"


def _make_record(kind: type[Record], fields: dict[str, Any]) -> Record:
    return kind(**fields)


def unknown_argument_error(kind: type[Record], names: list[str]) -> ArgumentError:
    """Return the error for arguments that a record class does not have, with a suggestion among its own."""
    received = ", ".join(f"{name}=" for name in names)
    return ArgumentError(
        f"{kind.called()} has the arguments {', '.join(kind.field_names)}. Received: {received}."
        f"{_argument_hint(kind, names)}"
    )


def _argument_error(kind: type[Record], named: dict[str, Any], found: dict[str, Any]) -> ArgumentError:
    """Return the error for unknown or missing arguments."""
    unknown = [name for name in named if name not in kind._known]
    if unknown:
        return unknown_argument_error(kind, unknown)
    missing = ", ".join(name for name in kind.field_names if name not in found)
    return ArgumentError(f"{kind.called()} has the arguments {', '.join(kind.field_names)}. Missing: {missing}.")


def _positional_argument_error(kind: type[Record], values: tuple[Any, ...]) -> ArgumentError:
    """Return the error for surplus positional arguments."""
    if not kind.keyword_only:
        listed = ", ".join(kind.field_names)
        return ArgumentError(f"{kind.called()} has the arguments {listed}. Received: {len(values)} positional ones.")
    from polyamp.argument_hints import keyword_hint

    shown = ", ".join(map(describe_value, values))
    return ArgumentError(
        f"{kind.called()} takes its arguments by name: {', '.join(kind.field_names)}. Received: {len(values)} "
        f"positional: {shown}.{keyword_hint(kind.word, values)}"
    )


def _argument_hint(kind: type[Record], names: list[str]) -> str:
    from polyamp.argument_hints import argument_hint

    return argument_hint(kind.word, kind.field_names, names)
