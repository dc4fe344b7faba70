"""Parts of the training step that only the torch backend has."""
