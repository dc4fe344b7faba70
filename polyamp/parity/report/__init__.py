"""Reports of a parity run: their data, and their text, HTML, picture and JSON forms."""
