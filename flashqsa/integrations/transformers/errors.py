"""What this integration refuses, by name. Bad arguments of a call itself are `flashqsa.InputError`."""

from __future__ import annotations


class UnsupportedTransformersError(ImportError):
    """The installed Transformers is missing, or outside the range this integration was tested with."""


class UnsupportedModelError(ValueError):
    """A model, or a config, whose sparse layers FlashQSA cannot stand in for."""


class CacheMismatchError(ValueError):
    """A cache whose parts do not belong together: lengths, batch or kinds of layers differ."""


class MaskMismatchError(ValueError):
    """A padding mask that contradicts the one under which a cache was filled."""
