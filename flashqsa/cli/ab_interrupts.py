"""Control-C and its like during a run: taken once, so that nothing that was started is left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SIGNALS = (
    (signal.SIGINT, signal.SIGTERM)
    if sys.platform == "win32"
    else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
)


@dataclass
class Interrupts:
    """What has interrupted so far.

    The first one raises KeyboardInterrupt, at once or at the end of what is `held`. Those after it raise nothing, since
    they would stop the ending of servers: people press control-C twice, and supervisors send two signals at once.

    count  how many have come; what waits may look at it and hurry
    """

    count: int = 0
    _raised: bool = field(default=False, repr=False)
    _holds: int = field(default=0, repr=False)

    @contextmanager
    def taken(self) -> Iterator[Interrupts]:
        """Takes the signals until the end of the `with` block. One that is ignored stays so, as under `nohup`."""
        heeded = [each for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, lambda *_: self._come()) for each in heeded}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the first one back until the end of the `with` block: for what must not stop half way."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        self._raise()

    def _come(self) -> None:
        self.count += 1
        self._raise()

    def _raise(self) -> None:
        if self.count and not self._raised and not self._holds:
            self._raised = True
            raise KeyboardInterrupt
