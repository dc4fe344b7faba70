"""The version, in one place: read by the build and by the checkpoint header."""

__version__ = "0.1.0"
