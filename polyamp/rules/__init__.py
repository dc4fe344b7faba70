"""The rules of `docs/semantics.md` as code, one file a rule. They import nothing above them and know no framework."""
