"""Rules of `docs/semantics.md` in code, one file per rule. They import neither higher layers nor frameworks."""
