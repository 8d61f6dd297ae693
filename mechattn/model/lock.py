"""Lets one thread at a time use a model, because hooks and patches are on the model and not on the call."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from threading import Lock, RLock
from typing import Any, TypeVar, cast

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mechattn.errors import warn
from mechattn.model.hooked import config_of

Function = TypeVar("Function", bound=Callable[..., Any])
making = RLock()  # of any model, as transformers and accelerate modify torch while they make one
_LONG = 10.0  # seconds of waiting before a warning
_locks = WeakIdKeyDictionary()  # by the configuration and the first parameter, so no lock is pickled or copied
_finding = Lock()


def alone(function: Function) -> Function:
    """Let a function whose first argument is a model run in one thread at a time per model."""

    @wraps(function)
    def waiting(model: Any, *given: Any, **named: Any) -> Any:
        with holding(model):
            return function(model, *given, **named)

    return cast(Function, waiting)


def holding(model: Any) -> ExitStack:
    """Hold the lock of a model until the end of a ``with`` block; a thread that has it may take it again."""
    with ExitStack() as stack:
        for lock in _locks_of(model):
            if not lock.acquire(timeout=_LONG):
                name = getattr(getattr(model, "cfg", None), "model_name", type(model).__name__)
                warn(
                    f"waiting: another thread has used {name} for {_LONG:.0f} s. Hooks and patches are on the model, "
                    "so one thread at a time can use it; load it by name in each thread to use several at once"
                )
                lock.acquire()
            stack.callback(lock.release)
        return stack.pop_all()


def _locks_of(model: Any) -> list[Any]:
    """The locks of what a model may share with others, always in the same order, so that no two threads block."""
    if not isinstance(model, nn.Module):
        return []
    shared = (config_of(model) or getattr(model, "config", None), next(model.parameters(), None))
    with _finding:
        return [_locks.setdefault(thing, RLock()) for thing in shared if type(thing).__weakrefoffset__]


def _forget() -> None:
    """In a forked process, drop locks that are held by threads of its parent."""
    global _locks, _finding
    _locks, _finding = WeakIdKeyDictionary(), Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
