"""Lookup of the backend of an object, a name or a function, through entry points. Knows no policy and no framework."""
