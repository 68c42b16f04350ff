"""Words for people: numbers with the nouns that they count."""

from __future__ import annotations


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 task", "1,000 tasks"; `ending` is that of the plural."""
    return f"{number:,} {noun}" + ending * (number != 1)
