"""What can be wrong with a model, as one tree.

ModelError
├── ModelNotFound       the name leads to no file or directory
├── UnsupportedModel    a known feature that this program does not compute; the message names it
├── BrokenModel         files, keys or tensors are missing, or have the wrong shape
├── LayerAway           a layer is asked for whose weights this model does not hold now
├── WrongLayers         layers that the model does not have, or that do not fit it
├── SourceChanged       weights cannot be read again: the files are gone or others now
└── TemplateError       the chat template cannot render these messages
"""


class ModelError(Exception):
    """Any reason why a model cannot be used; the message says what to do."""


class ModelNotFound(ModelError):
    """No model under this name or path."""


class UnsupportedModel(ModelError):
    """The model asks for something that is not implemented."""


class BrokenModel(ModelError):
    """The model's files contradict themselves or are incomplete."""


class LayerAway(ModelError):
    """The layer's weights left this model and did not come back."""


class WrongLayers(ModelError):
    """No such layers, or weights of another shape, dtype or device than the model's."""


class SourceChanged(ModelError):
    """What the model was loaded from no longer gives the same weights."""


class TemplateError(ModelError):
    """The messages do not fit the model's chat template: the caller's fault, not the server's."""
