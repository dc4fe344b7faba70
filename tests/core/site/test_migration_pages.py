"""The pages for those who come from another library have one form, and a test runs both sides of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page_diffs import GUIDES, one_side, page_blocks

TESTS = Path(__file__).parents[2]
PAGES = sorted(path.stem for path in GUIDES.glob("from_*.md") if "```diff" in path.read_text(encoding="utf-8"))


def test_there_is_a_page_for_each_library() -> None:
    libraries = "accelerate apex deepspeed flax_dynamic_scale jmp keras_fit lightning nanogpt"
    assert {f"from_{library}" for library in libraries.split()} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_form_of_the_others(page: str) -> None:
    """A goal, what to install, the diff, what changes, limitations; 300 to 900 words with its code."""
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    positions = [text.index(part) for part in ("\nGoal: ", "```sh\npip install", "```diff", "\n## What changes\n")]
    assert [*positions, text.index("\n## Limitations\n")] == sorted([*positions, text.index("\n## Limitations\n")])
    assert 300 <= len(text.split()) <= 900


@pytest.mark.parametrize("page", PAGES)
def test_both_sides_of_its_diffs_are_run(page: str) -> None:
    """By a test of the framework that it belongs to; polyamp is on the side after alone."""
    tests = [path.read_text(encoding="utf-8") for path in (TESTS / "backends").rglob("test_*.py")]
    assert any("tests.page_diffs" in text and f'"{page}"' in text for text in tests)
    diffs = [text for language, text in page_blocks(page) if language == "diff"]
    assert "polyamp" not in "".join(one_side(diff, "-") for diff in diffs)
    assert "polyamp" in "".join(one_side(diff, "+") for diff in diffs)


def test_the_two_sides_of_a_diff() -> None:
    diff = "-a = 1\n+a = 2\n\n b = 3\n"
    assert (one_side(diff, "-"), one_side(diff, "+")) == ("a = 1\n\nb = 3\n", "a = 2\n\nb = 3\n")
