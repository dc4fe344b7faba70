"""`RefusedError`, by which the tables of layers say why one cannot be moved."""

from __future__ import annotations


class RefusedError(Exception):
    """Error for a layer or setting without a canonical equivalent; the text gives the reason."""
