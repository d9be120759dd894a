"""Which page of a pool is whose: on the host, where requests take pages, share them and give them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class PageBook:
    """The page table of a batch, and the pages that nobody uses.

    rows   [requests, table_pages] int32: page ids, every entry of which is a page
    pages  how many the pool has

    Requests that were one share the pages that were full then. The page that a request writes next, and all after it,
    are its own alone: so nothing that one of them writes is seen by another.

    >>> book = PageBook(requests=1, table_pages=3, pages=3)
    >>> book.choose([0, 0], full=[1]), book.rows.tolist()         # forked after its first page: two more are missing
    (2, [[0, 1, 2]])
    >>> book.pages = 5
    >>> book.choose([0, 0], full=[1]), book.rows.tolist()
    (0, [[0, 1, 2], [0, 3, 4]])
    """

    def __init__(self, requests: int, table_pages: int, pages: int) -> None:
        self.rows: Ids = np.arange(requests * table_pages, dtype=np.int32).reshape(requests, table_pages)
        self.pages = pages
        self.shares = False

    def missing(self, table_pages: int) -> int:
        """Pages that the pool lacks for every request to have `table_pages`."""
        requests, held = self.rows.shape
        return max(int(requests * (table_pages - held)) - len(self._free(self.rows)), 0)

    def widen(self, table_pages: int) -> None:
        """Gives every request pages up to `table_pages`; none may be missing."""
        requests, held = self.rows.shape
        free = self._free(self.rows)[: requests * (table_pages - held)]
        self.rows = np.concatenate((self.rows, free.reshape(requests, -1)), axis=1)

    def choose(self, order: Sequence[int], full: Sequence[int]) -> int:
        """Request r becomes what request `order[r]` was.

        full  pages of each present request that will not be written again

        The first to become a request takes its pages over. Others share the full ones and get free ones for the rest.
        Returns how many pages the pool lacks; where it lacks any nothing is changed.
        """
        rows = self.rows[list(order)]
        fresh = np.zeros(rows.shape, dtype=bool)
        seen: set[int] = set()
        for request, source in enumerate(order):
            if source in seen:
                fresh[request, full[source] :] = True
            seen.add(source)
        free = self._free(rows[~fresh])
        lacking = int(fresh.sum()) - len(free)
        if lacking > 0:
            return lacking
        rows[fresh] = free[: int(fresh.sum())]
        self.shares = self.shares or len(seen) < len(order)
        self.rows = rows
        return 0

    def part(self, full: Sequence[int]) -> tuple[int, Ids]:
        """Gives each request pages of its own in the place of those from `full[r]` on that others use too.

        Returns how many pages the pool lacks (then nothing is changed), and the rows as they were.
        """
        before = self.rows
        if not self.shares:
            return 0, before
        rows, uses = before.copy(), np.bincount(before.ravel(), minlength=self.pages)
        free, taken = self._free(rows), 0
        for request, first in enumerate(full):
            for place in range(first, rows.shape[1]):
                page = rows[request, place]
                if uses[page] > 1:
                    uses[page] -= 1
                    if taken < len(free):
                        rows[request, place] = free[taken]
                    taken += 1
        if taken > len(free):
            return taken - len(free), before
        self.rows = rows
        return 0, before

    def begin_anew(self) -> None:
        """Gives every request pages of its own again; there must be so many, and nothing is kept of what they held."""
        self.rows = np.arange(self.rows.size, dtype=np.int32).reshape(self.rows.shape)
        self.shares = False

    def _free(self, used: Ids) -> Ids:
        there = np.ones(self.pages, dtype=bool)
        there[used] = False
        return np.flatnonzero(there).astype(np.int32)
