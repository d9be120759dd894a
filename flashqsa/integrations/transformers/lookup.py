"""Guesses for verify steps, from the text alone: what followed the last few tokens where they stood before."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST, SHORTEST = 3, 2
"""Tokens that must agree with an earlier place: three where there is one, else two."""


class PromptLookup:
    """A request's tokens, prompt and answer, with the places where each run of two and three of them stood last.

    Where a guess reaches the end of the text it goes on with itself, as a text that repeats itself does.

    >>> text = PromptLookup([5, 6, 7, 8, 5, 6])
    >>> text.guess(3), text.guess(7)
    ([7, 8, 5], [7, 8, 5, 6, 7, 8, 5])
    >>> text.extend([9])
    >>> text.guess(3)
    []
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        held, after = self.tokens, self._after
        for token in tokens:
            # What ends before this token goes on with it.
            place = len(held)
            for size in range(SHORTEST, min(LONGEST, place) + 1):
                after[tuple(held[place - size :])] = place
            held.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where the last tokens did not stand anywhere before."""
        held = self.tokens
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self._after.get(tuple(held[-size:])) if len(held) >= size else None
            if place is not None:
                period = len(held) - place
                return [held[place + step % period] for step in range(most)]
        return []
