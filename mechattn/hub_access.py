"""Access to the hub: which names are possible there, whether it answers, and a model's commit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

_offline_switch = RLock()  # held while HF_HUB_OFFLINE, which all threads read, may be changed


def may_be_on_hub(name: str) -> bool:
    """Whether a name has the form NAME or OWNER/NAME, as names on the hub do.

    An absolute path or a path through several folders does not.
    """
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


@contextmanager
def asked_once(place: str) -> Iterator[None]:
    """Ask once whether the hub answers. If it does not, the ``with`` block uses only files that
    were downloaded before.

    Without this, the client would ask six times for each file, which takes 24 s. Nothing is asked
    for a directory or file on this machine.

    The block is offline for all threads: ``HF_HUB_OFFLINE``, a constant of huggingface_hub, is set
    and then restored. The client reads it before each request and has no such setting for a block
    or a thread, and transformers and datasets make their requests through the client.
    """
    if os.path.exists(place):
        yield
        return
    from huggingface_hub import constants, get_session

    with _offline_switch:
        user_setting = constants.HF_HUB_OFFLINE
        try:
            # The hub's own client knows the user's proxies.
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # its class depends on the client and on the user's offline setting
            constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = user_setting


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """The commit of a model on the hub or, if the hub does not answer, of the downloaded one.

    None if there is no such model, if the hub does not answer and nothing was downloaded, or if the
    name is a directory or file on this machine.
    """
    if os.path.exists(name) or not may_be_on_hub(name):
        return None
    from huggingface_hub import hf_hub_download

    try:
        with asked_once(name):
            config_path = hf_hub_download(name, "config.json", revision=revision)
    except (OSError, ValueError):  # no such model or name, or neither an answer nor a download
        return None
    return Path(config_path).parent.name  # …/snapshots/COMMIT/config.json
