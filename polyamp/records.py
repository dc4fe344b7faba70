"""`Record`: frozen values with named fields, of which what a user writes is made.

`Policy`, `LossScaler`, `Recipe`, the optimizer specs and the schedules are records. A class lists its fields as
annotations, with defaults, and checks them in `__post_init__`; the rest is here. `dataclasses` would do, and msgspec
did; importing either costs more than all of polyamp. Files are `polyamp.recipe.files`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, dataclass_transform, get_type_hints

from polyamp.errors import PolyampError, RecipeError


class _Signature:
    """`__signature__` of a record class, made when somebody asks: importing `inspect` takes as long as all else."""

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
    """A frozen value: equal to one of the same class with equal fields, hashable, and to be pickled and copied.

    `copy.replace` of Python 3.13 takes one. `repr` shows the fields that are not at their defaults, and evaluates back.
    """

    field_names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}
    keyword_only: ClassVar[bool] = False
    _known: ClassVar[frozenset[str]] = frozenset()
    _hash: ClassVar[int | None] = None
    tag: ClassVar[str] = ""
    """In a file the `type` of a table, where several classes may stand."""
    word: ClassVar[str] = "record"
    """What a message calls one."""
    error: ClassVar[type[PolyampError]] = RecipeError
    """What `replace` raises."""
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
                raise TypeError("Extra positional arguments provided")
            for name, value in zip(names, values, strict=False):
                if name in named:
                    raise TypeError(f"Argument '{name}' given by name and position")
                named[name] = value
        found = {**kind.defaults, **named}
        if found.keys() != kind._known:
            for name in named:
                if name not in names:
                    raise TypeError(f"Unexpected keyword argument '{name}'")
            missing = next(name for name in names if name not in found)
            raise TypeError(f"Missing required argument '{missing}'")
        for name in names:
            object.__setattr__(self, name, found[name])
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks the fields; a class says how."""

    def _settle(self, name: str, value: Any) -> None:
        """Set a field, while the record is made."""
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen; use {self.word}.replace({name}=...) to get a changed copy."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; use {self.word}.replace(...) to get a changed copy.")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name: `type(record)(**record.to_dict()) == record`."""
        return {name: getattr(self, name) for name in self.field_names}

    def _given(self) -> dict[str, Any]:
        """What makes an equal record, less what the rest settles."""
        return self.to_dict()

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked as the constructor checks. Also `copy.replace`, in Python 3.13.

        Raises:
            PolyampError: there is no such field; or what the constructor raises.

        >>> from polyamp import Policy
        >>> Policy("mixed_float16").replace(mode="cast").mode
        'cast'
        """
        unknown = sorted(set(changes) - set(self.field_names))
        if unknown:
            raise self.error(
                f"{type(self).__name__} has the fields {', '.join(self.field_names)}. Received: {', '.join(unknown)}."
            )
        return type(self)(**{**self._given(), **changes})

    def __replace__(self, /, **changes: Any) -> Self:
        return self.replace(**changes)

    def _key(self) -> tuple[Any, ...]:
        """What is compared."""
        return tuple([getattr(self, name) for name in self.field_names])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Record) or type(other) is not type(self):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        found = self._hash  # kept: `jit` and dictionaries ask often
        if found is None:
            self._settle("_hash", found := hash((type(self), self._key())))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), self._given())

    def __repr__(self) -> str:
        kind = type(self)
        changed = [
            f"{name}={value!r}"
            for name, value in self._given().items()
            if name not in kind.defaults or value != kind.defaults[name]
        ]
        return f"{self.tag or kind.__name__}({', '.join(changed)})"


def _make(kind: type[Record], fields: dict[str, Any]) -> Record:
    return kind(**fields)
