"""`Capabilities`: what was measured of one device in one framework, and its text."""

from __future__ import annotations

import msgspec
from rich.console import Console

from polyamp.display import first_lines
from polyamp.doctor import text_table
from polyamp.doctor.float8_times import Float8Capability
from polyamp.doctor.measurements import DtypeCapability, KnownTrap, Recommendation


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What each dtype is on one device, measured in one framework. `print` shows it as a table.

    Attributes:
        backend: the backend's name.
        version: the framework's version.
        device: the device's name in the framework ("cuda:0").
        device_label: the model of an accelerator ("NVIDIA H100"); else the device's name.
        dtypes: dtype -> what it is here.
        recommendation: the policy to train with.
        traps: known defects and surprises of this version on this device.
        float8: products in 8 bits against bfloat16, if they were asked for.
        seconds: that the measurement took, without the import of the framework.
    """

    backend: str
    version: str
    device: str
    device_label: str
    dtypes: dict[str, DtypeCapability]
    recommendation: Recommendation
    traps: list[KnownTrap]
    seconds: float
    float8: Float8Capability | None = None

    def __str__(self) -> str:
        return text_table.render(self.print)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def print(self, console: Console) -> None:
        """Print it on a console of rich, without the legend of the table."""
        label = "" if self.device_label == self.device else f" ({self.device_label})"
        text_table.print_heading(console, f"{self.backend} {self.version} on {self.device}{label}")
        text_table.print_dtypes(console, self.dtypes)
        if self.float8 is not None:
            text_table.print_float8(console, self.float8)
        text_table.print_recommendation(console, self.recommendation)
        text_table.print_traps(console, self.traps, f"{self.backend} {self.version}")
