"""Users' own models in several frameworks, compared. Nothing stands here yet; the digits are in `polyamp.demo`."""
