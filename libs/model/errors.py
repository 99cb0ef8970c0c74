"""What can be wrong with a model, as one tree.

ModelError
├── ModelNotFound       the name leads to no file or directory
├── UnsupportedModel    a known feature that this program does not compute; the message names it
├── BrokenModel         files, keys or tensors are missing, or have the wrong shape
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


class TemplateError(ModelError):
    """The messages do not fit the model's chat template: the caller's fault, not the server's."""
