"""What a backend has to be, in types, and how polyamp finds the one of an object."""
