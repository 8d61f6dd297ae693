"""Keeps a checkpoint from running its own code or being read as a pickle, unless the user allows it.

No single option does this. TransformerLens does not forward an option about pickles, and for some architectures it
imports the checkpoint's code whatever ``trust_remote_code`` says; transformers asks on standard input if the option is
left open. So we wrap the functions of transformers that read pickles and import code, once and permanently. The
wrappers check what is being loaded, but only in the thread and the ``with`` block of one of our loads; other code that
loads a model in this process is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from threading import Lock
from typing import Any, Literal

from mechattn.errors import ModelError

Forbidden = Literal["code", "pickles"]
_forbidden: ContextVar[frozenset[Forbidden] | None] = ContextVar("forbidden", default=None)  # None outside our loads
_lock = Lock()


@contextmanager
def as_trusted(trust_remote_code: bool | None, pickled_weights: bool, name: str = "") -> Iterator[None]:
    """Inside a ``with`` block, this thread treats a checkpoint as the user allowed, without asking on the terminal."""
    with _lock:
        _wrap_once()
    allowed: dict[Forbidden, bool | None] = {"code": trust_remote_code, "pickles": pickled_weights}
    before = _forbidden.set(frozenset(what for what, said in allowed.items() if said is not True))
    try:
        yield
    except ModelError as error:
        if pickled_weights or "safetensors" not in str(error):
            raise
        raise ModelError(
            f"{error}. Without safetensors {name} is a pickle, which can run code when it is read: convert it with "
            f"save_pretrained, or give pickled_weights=True if you trust it"
        ) from error
    finally:
        _forbidden.reset(before)


def is_of_own_code(model: Any) -> bool:
    """Whether the class of a model comes from its checkpoint, whose code the user has then allowed to run."""
    return type(model).__module__.startswith("transformers_modules")


def refuse_own_code(error: Exception, name: str) -> None:
    """Raise our own error if transformers refused to run the checkpoint's code."""
    if "custom code" in str(error):
        raise ModelError(
            f"{name} has its own code, which is run only with load_model(…, trust_remote_code=True); use this if you "
            f"trust it"
        ) from error


@cache
def _wrap_once() -> None:
    from transformers import PreTrainedModel, dynamic_module_utils
    from transformers.models.auto import auto_factory, configuration_auto, tokenization_auto

    loads: Any = PreTrainedModel.__dict__["from_pretrained"].__func__
    PreTrainedModel.from_pretrained = classmethod(_without_pickles(loads))  # type: ignore[method-assign,assignment]
    for name in ("get_cached_module_file", "get_class_in_module"):  # copies the code and runs it
        setattr(dynamic_module_utils, name, _without_code(getattr(dynamic_module_utils, name)))
    for module in (dynamic_module_utils, auto_factory, configuration_auto, tokenization_auto):
        module.resolve_trust_remote_code = _without_a_question(module.resolve_trust_remote_code)  # type: ignore[attr-defined]


def _without_pickles(given: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(given)
    def load(*arguments: Any, **options: Any) -> Any:
        only = {"use_safetensors": True} if "pickles" in (_forbidden.get() or ()) else {}
        return given(*arguments, **(options | only))

    return load


def _without_code(given: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(given)
    def run(*arguments: Any, **options: Any) -> Any:
        if "code" in (_forbidden.get() or ()):
            raise ModelError("the checkpoint has its own code, which is run only with trust_remote_code=True")
        return given(*arguments, **options)

    return run


def _without_a_question(given: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(given)
    def resolve(trust: bool | None, *arguments: Any, **options: Any) -> Any:
        found = _forbidden.get()
        return given("code" not in found if trust is None and found is not None else trust, *arguments, **options)

    return resolve
