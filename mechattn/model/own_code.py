"""Trust: a checkpoint does not run its own code unless the user allows it.

No option does this: for some architectures TransformerLens imports the checkpoint's code whatever
``trust_remote_code`` says, and transformers asks on standard input if the option is left open. So
we wrap the functions of transformers that ask and that import code, once and permanently. The
wrappers act only in the thread and the ``with`` block of one of our loads; other code that loads a
model in this process is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from typing import Any

from mechattn.errors import ModelError

# A cached function may run twice if two threads call it for the first time.
_wrapping = Lock()

# Whether a checkpoint's own code may run; None outside our loads.
_own_code_allowed: ContextVar[bool | None] = ContextVar("own_code_allowed", default=None)


@contextmanager
def as_trusted(trust_remote_code: bool | None) -> Iterator[None]:
    """Inside a ``with`` block, this thread runs a checkpoint's own code only if the user allowed
    it, without asking on the terminal."""
    with _wrapping:
        _wrap_transformers()
    before = _own_code_allowed.set(trust_remote_code is True)
    try:
        yield
    finally:
        _own_code_allowed.reset(before)


def is_of_own_code(model: Any) -> bool:
    """Whether the class of a model comes from its checkpoint, whose code the user has then allowed
    to run."""
    return type(model).__module__.startswith("transformers_modules")


def refuse_own_code(error: Exception, name: str) -> None:
    """Raise our own error if transformers refused to run the checkpoint's code.

    Raises:
        ModelError: It did, which only the text of its ``ValueError`` tells.
    """
    if "custom code" in str(error):
        raise ModelError(
            f"{name} has its own code, which is run only with load_model(…,"
            " trust_remote_code=True); use this if you trust it"
        ) from error


@cache
def _wrap_transformers() -> None:
    """Wrap the functions of transformers that import code or ask, for the whole process."""
    from transformers import dynamic_module_utils
    from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto

    importing: Any = dynamic_module_utils
    for name in ("get_cached_module_file", "get_class_in_module"):  # copies the code and runs it
        setattr(importing, name, partial(_refuse_code, getattr(importing, name)))
    asking: list[Any] = [dynamic_module_utils, auto_factory, configuration_auto, tokenization_auto]
    for module in asking:
        module.resolve_trust_remote_code = partial(_decide, module.resolve_trust_remote_code)


def _refuse_code(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a function that imports code gives, unless the user has not allowed it."""
    if _own_code_allowed.get() is False:
        raise ModelError(
            "the checkpoint has its own code, which is run only with trust_remote_code=True"
        )
    return load(*arguments, **options)


def _decide(
    resolve: Callable[..., Any], trust: bool | None, *arguments: Any, **options: Any
) -> Any:
    """The decision about code, without a question inside our loads."""
    if trust is None:
        trust = _own_code_allowed.get()
    return resolve(trust, *arguments, **options)
