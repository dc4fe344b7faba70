"""`python -m polyamp`: the command line, for when the script `polyamp` is not on the path."""

from __future__ import annotations

from polyamp.cli import main

if __name__ == "__main__":
    main()
