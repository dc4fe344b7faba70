"""Settings of polyamp on a Keras model (a policy, the guard of `fit`), saved in Keras's own model files.

Keras saves a model as a class name and a configuration, and loads it by that class. So a model with settings becomes an
instance of a subclass of its own class. The subclass has the same attributes and methods, and its configuration
contains the settings next to the model's own values.

Loading needs the name `polyamp_tensorflow>PolyampModel`, which importing polyamp_tensorflow or polyamp_keras registers.
Otherwise Keras's error names the missing class.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import keras

from polyamp.errors import ModelError
from polyamp_keras.models.layers import OWN_CLASS, is_built, own_class

_PACKAGE: Final = "polyamp_tensorflow"
"""Package of the registered names, in files of every Keras backend and of earlier versions."""
PUBLIC_MODULE: Final = "polyamp_tensorflow" if keras.config.backend() == "tensorflow" else "polyamp_keras"
"""Module that Keras names where the class is not registered."""
_NAME: Final = "PolyampModel"
_SETTINGS: Final = "_polyamp_settings"
_register: Final = keras.saving.register_keras_serializable(package=_PACKAGE, name=_NAME)


class ModelSetting(ABC):
    """Setting of polyamp on a model, registered with Keras as serializable.

    Attributes:
        needs_compile: whether a loaded model gets the setting when it is compiled, not as soon as it is built.
    """

    needs_compile: ClassVar[bool]

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return plain values, from which the class's `from_config` creates an equal setting."""

    @abstractmethod
    def install(self, model: Any) -> None:
        """Apply the setting to a loaded model, and store it there."""

    def suspend(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the model's configuration is what it is without the setting."""
        return contextlib.nullcontext()


@_register
class PolyampModel:
    """Mixin of the classes of models with settings; all of them have this one name in Keras's files."""

    def get_config(self) -> dict[str, Any]:
        """Return the model's own configuration, with its own class and the settings."""
        cls = own_class(self)
        public = cls is keras.Sequential
        own = {
            "module": "keras" if public else cls.__module__,
            "class_name": cls.__name__,
            "registered_name": None if public else keras.saving.get_registered_name(cls),
            "build_config": self.get_build_config(),  # type: ignore[attr-defined]  # of the model's own class
            "settings": [keras.saving.serialize_keras_object(setting) for setting in model_settings(self)],
        }
        with contextlib.ExitStack() as stack:
            for setting in model_settings(self):
                stack.enter_context(setting.suspend())
            return {**super().get_config(), _PACKAGE: own}  # type: ignore[misc]  # of the model's own class

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create the saved model, of its own class, with the settings that do not need `compile`.

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
                add_setting(model, setting)
            else:
                setting.install(model)
        return model

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile the model as its own class does, then apply the settings that need it."""
        super().compile_from_config(config)  # type: ignore[misc]  # of the model's own class
        for setting in model_settings(self):
            if setting.needs_compile:
                setting.install(self)

    def __reduce__(self) -> Any:
        """Pickle as Keras does, as a file in memory, with a class that pickle can import."""
        found: Any = super().__reduce__()
        return getattr(keras.Model, found[0].__name__), found[1]


def model_settings(model: Any) -> list[Any]:
    """Return the settings of a model, in the order in which they were added."""
    return list(vars(model).get(_SETTINGS, ()))


def add_setting(model: Any, setting: ModelSetting) -> None:
    """Add a setting to those that a model saves. A layer that is not a model has no file and stores nothing."""
    if isinstance(model, keras.Model):
        _store_settings(model, [*(other for other in model_settings(model) if other is not setting), setting])


def remove_setting(model: Any, setting: ModelSetting) -> None:
    """Remove a setting; a second call does nothing."""
    if isinstance(model, keras.Model):
        _store_settings(model, [other for other in model_settings(model) if other is not setting])


def check_built(model: Any) -> None:
    """Raise if a loaded model is not built, so that its layers for the settings do not exist yet.

    Raises:
        ModelError: names the methods that the class lacks.
    """
    if not is_built(model):
        raise ModelError(
            f"load_model: Keras did not build the {own_class(model).__qualname__} {model.name!r} from its "
            "configuration, so what the file says of its policy and training has no layers to be put on. Give the "
            "class get_build_config and build_from_config, which create its layers; or build the model by hand and "
            "load its weights alone."
        )


def _store_settings(model: Any, settings: list[Any]) -> None:
    vars(model)[_SETTINGS] = settings  # bypasses Keras's attribute tracking
    cls = own_class(model)
    wanted = _with_settings(cls) if settings else cls  # type: ignore[arg-type]  # a class is hashable
    if type(model) is not wanted:
        object.__setattr__(model, "__class__", wanted)


@functools.cache
def _with_settings(cls: type[Any]) -> type[Any]:
    """Return the subclass of a model's class that saves settings."""
    name = f"Polyamp{cls.__name__}"
    made = type(name, (PolyampModel, cls), {"__module__": PUBLIC_MODULE, "__doc__": cls.__doc__, OWN_CLASS: cls})
    registered: type[Any] = _register(made)
    return registered


for _class in ("Sequential", "Functional"):  # an .h5 file identifies classes by bare names
    keras.saving.get_custom_objects()[f"Polyamp{_class}"] = PolyampModel
