"""A Keras model: its layers and variables by name, and the settings of polyamp in its files."""
