"""Words for people: numbers with the nouns that they count."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return "1 task", "1,000 tasks"."""
    return f"{number:,} {noun}" + "s" * (number != 1)
