"""What this integration refuses, by name. Bad arguments of a call itself are `flashqsa.InputError`."""

from __future__ import annotations


class UnsupportedVllmError(ImportError):
    """The installed vLLM is missing, not a release this integration was written for, or not laid out as that one."""


class _RefusalError(ValueError):
    def __init__(self, what: str, wanted: str, got: object) -> None:
        # The arguments are kept as they are, so that the error survives pickling: vLLM's workers hand theirs on.
        super().__init__(what, wanted, str(got))

    def __str__(self) -> str:
        return "{}: wanted {}; got {}".format(*self.args)


class LayoutError(_RefusalError):
    """A tensor that is not laid out as vLLM lays it out: which one, what was wanted, and what came."""


class UnsupportedSettingError(_RefusalError):
    """A setting of vLLM's that these layers do not serve: which one, what was wanted, and what came."""
