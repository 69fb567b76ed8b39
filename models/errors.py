"""The one exception of everything that brings models in."""


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message is one sentence naming the file, field or tensor."""
