"""What polyamp set up on a Keras model (a policy, the watch over `fit`), in the files that Keras saves the model in.

Keras writes a model as the name of its class and a configuration, and builds it again by the class of that name. So a
model that holds settings becomes an instance of a subclass of its own class, with the same attributes and methods,
whose configuration holds the settings beside the model's own. Loading it needs the name
`polyamp_tensorflow>PolyampModel`, which is registered when polyamp_tensorflow is imported; without that Keras's error
says which class is missing.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, ClassVar, Final, Protocol

import keras

from polyamp.errors import ModelError
from polyamp_tensorflow.models.layers import OWN_CLASS, is_built, own_class

_PACKAGE: Final = "polyamp_tensorflow"
_NAME: Final = "PolyampModel"
_SETTINGS: Final = "_polyamp_settings"
_register: Final = keras.saving.register_keras_serializable(package=_PACKAGE, name=_NAME)


class Setting(Protocol):
    """One thing that is set up on a model, registered with Keras as serializable.

    Attributes:
        needs_compile: whether it is put on a model that was loaded when that is compiled, not as soon as it is built.
    """

    needs_compile: ClassVar[bool]

    def get_config(self) -> dict[str, Any]:
        """Plain values, from which the class's `from_config` makes an equal setting."""

    def off(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the model's own configuration is what it is without the setting."""

    def put_on(self, model: Any) -> None:
        """Set it up on a model that was loaded, and have the model keep it."""


@_register
class PolyampModel:
    """Mixin of the classes of models that hold settings; Keras's name for all of them in files."""

    def get_config(self) -> dict[str, Any]:
        """The model's own configuration, and beside it its own class and the settings."""
        cls = own_class(self)
        public = cls is keras.Sequential
        own = {
            "module": "keras" if public else cls.__module__,
            "class_name": cls.__name__,
            "registered_name": None if public else keras.saving.get_registered_name(cls),
            "build_config": self.get_build_config(),  # type: ignore[attr-defined]  # of the model's own class
            "settings": [keras.saving.serialize_keras_object(setting) for setting in settings_of(self)],
        }
        with contextlib.ExitStack() as stack:
            for setting in settings_of(self):
                stack.enter_context(setting.off())
            return {**super().get_config(), _PACKAGE: own}  # type: ignore[misc]  # of the model's own class

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The model of the file, of its own class, with the settings that do not wait for `compile`.

        Raises:
            ModelError: Keras cannot build the model from its configuration, so there are no layers to set up.
        """
        own = dict(config[_PACKAGE])
        settings = keras.saving.deserialize_keras_object(own.pop("settings"))
        plain = {**own, "config": {name: value for name, value in config.items() if name != _PACKAGE}}
        model = keras.saving.deserialize_keras_object(plain, custom_objects=custom_objects)
        check_built(model)
        for setting in settings:
            if setting.needs_compile:
                keep(model, setting)
            else:
                setting.put_on(model)
        return model

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """The model's own, and then the settings that wait for it."""
        super().compile_from_config(config)  # type: ignore[misc]  # of the model's own class
        for setting in settings_of(self):
            if setting.needs_compile:
                setting.put_on(self)

    def __reduce__(self) -> Any:
        """Keras's way, a file in memory, by a class that pickle can name."""
        found: Any = super().__reduce__()
        return getattr(keras.Model, found[0].__name__), found[1]


def settings_of(model: Any) -> list[Any]:
    """What the model holds now, in the order in which it was set up."""
    return list(vars(model).get(_SETTINGS, ()))


def keep(model: Any, setting: Setting) -> None:
    """Have a model save a setting, after the others. A layer that is no model has no
    file of its own, and keeps nothing."""
    if isinstance(model, keras.Model):
        _hold(model, [*(other for other in settings_of(model) if other is not setting), setting])


def forget(model: Any, setting: Setting) -> None:
    """Take a setting out again; a second call does nothing."""
    if isinstance(model, keras.Model):
        _hold(model, [other for other in settings_of(model) if other is not setting])


def check_built(model: Any) -> None:
    """Refuse a model from a file that has no layers yet for its settings.

    Raises:
        ModelError: says what the class lacks.
    """
    if not is_built(model):
        raise ModelError(
            f"load_model: Keras did not build the {own_class(model).__qualname__} {model.name!r} from its "
            "configuration, so what the file says of its policy and training has no layers to be put on. Give the "
            "class get_build_config and build_from_config, which create its layers; or build the model by hand and "
            "load its weights alone."
        )


def _hold(model: Any, settings: list[Any]) -> None:
    vars(model)[_SETTINGS] = settings  # past Keras's tracking of attributes
    cls = own_class(model)
    wanted = _with_settings(cls) if settings else cls  # type: ignore[arg-type]  # a class is hashable
    if type(model) is not wanted:
        object.__setattr__(model, "__class__", wanted)


@functools.cache
def _with_settings(cls: type[Any]) -> type[Any]:
    """The subclass of a model's class that saves settings."""
    name = f"Polyamp{cls.__name__}"
    made = type(name, (PolyampModel, cls), {"__module__": _PACKAGE, "__doc__": cls.__doc__, OWN_CLASS: cls})
    registered: type[Any] = _register(made)
    return registered


for _class in ("Sequential", "Functional"):  # an .h5 file knows classes by their bare names
    keras.saving.get_custom_objects()[f"Polyamp{_class}"] = PolyampModel
