"""What can go wrong, in the user's words: every error that mechattn raises on purpose is a MechattnError."""

from mechattn.shown import shown


class MechattnError(Exception):
    """Something given to mechattn cannot be used; the message says what was given, what was expected, what to do.

    What was given may come from a file of somebody else's: as text it acts on no terminal and tells no password.
    """

    def __str__(self) -> str:
        return shown(super().__str__())


class ModelError(MechattnError):
    """A model or its tokenizer cannot be loaded or used."""


class RowError(ModelError):
    """A row of a batch shows something that cannot be; ``row`` says which."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class PromptError(MechattnError):
    """A prompt, or a file of prompts, cannot be used."""


class PromptTooLong(PromptError):
    """A prompt does not fit the context of the model."""


class ConditionError(MechattnError):
    """A condition cannot be applied to these prompts with this tokenizer."""


class OptionError(MechattnError, ValueError):
    """An argument is out of its range."""


class ServerError(MechattnError):
    """A server that generates cannot be reached, refuses, or is not the model that it is taken for."""


class OutputError(MechattnError):
    """A result cannot be written or read at this place."""


class Interrupted(MechattnError):
    """The work was stopped from outside; what is done is kept, and the message says how to go on."""
