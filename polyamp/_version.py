"""Version of polyamp, used by the build and in the checkpoint header."""

__version__ = "0.1.0"
