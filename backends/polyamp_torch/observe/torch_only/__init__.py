"""Parts of this package that only the torch backend needs."""
