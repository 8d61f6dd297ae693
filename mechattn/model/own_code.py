"""Trust: a checkpoint does not run its own code unless the user allows it.

No option of these libraries ensures this. For some architectures TransformerLens imports the
checkpoint's code whatever ``trust_remote_code`` says, and transformers asks on standard input if
the option is not given. So the functions of transformers that ask or import code are wrapped, once
and permanently. The wrappers act only in the thread and the ``with`` block of a load by mechattn;
other code that loads a model in this process is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from typing import Any

from mechattn.errors import ModelError

# Held around ``_wrap_transformers``: a cached function runs twice if two threads call it at once.
_wrapping_lock = Lock()

# Whether a checkpoint's own code may run; None outside our loads.
_own_code_allowed: ContextVar[bool | None] = ContextVar("own_code_allowed", default=None)


@contextmanager
def as_trusted(trust_remote_code: bool | None) -> Iterator[None]:
    """Inside a ``with`` block, this thread runs a checkpoint's own code only if the user allowed
    it, without asking on the terminal."""
    with _wrapping_lock:
        _wrap_transformers()
    token = _own_code_allowed.set(trust_remote_code is True)
    try:
        yield
    finally:
        _own_code_allowed.reset(token)


def is_of_own_code(model: Any) -> bool:
    """Whether the class of a model comes from its checkpoint's own code.

    The model exists, so the user has allowed this code to run.
    """
    return type(model).__module__.startswith("transformers_modules")


def refuse_own_code(error: Exception, name: str) -> None:
    """Explain an error of transformers that refuses to run the checkpoint's code.

    Raises:
        ModelError: The error is such a refusal. Only its text tells, because its class is
            ``ValueError``.
    """
    if "custom code" in str(error):
        raise ModelError(
            f"{name} has its own code, which is run only with load_model(…,"
            " trust_remote_code=True); use this if you trust it"
        ) from error


@cache
def _wrap_transformers() -> None:
    """Wrap the functions of transformers that import code or ask, for the rest of the process."""
    from transformers import dynamic_module_utils
    from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto

    code_module: Any = dynamic_module_utils
    for name in ("get_cached_module_file", "get_class_in_module"):  # copies the code and runs it
        setattr(code_module, name, partial(_refuse_code, getattr(code_module, name)))
    # Each of these modules has imported the function that asks.
    modules: list[Any] = [code_module, auto_factory, configuration_auto, tokenization_auto]
    for module in modules:
        module.resolve_trust_remote_code = partial(_decide, module.resolve_trust_remote_code)


def _refuse_code(load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function that imports a checkpoint's code, unless the user has not allowed it.

    Raises:
        ModelError: The user has not allowed this load to run the code.
    """
    if _own_code_allowed.get() is False:
        raise ModelError(
            "the checkpoint has its own code, which is run only with trust_remote_code=True"
        )
    return load(*arguments, **options)


def _decide(
    resolve: Callable[..., Any], trust: bool | None, *arguments: Any, **options: Any
) -> Any:
    """Decide whether code is trusted, without asking during a load by mechattn."""
    if trust is None:
        trust = _own_code_allowed.get()
    return resolve(trust, *arguments, **options)
