"""The digits run in several frameworks side by side, and the report on how far they part."""
