"""The hub: which names it can have, and whether it answers, asked once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

_offline_switch = RLock()  # held while HF_HUB_OFFLINE, which all threads read, may be changed


def may_be_on_hub(name: str) -> bool:
    """Whether a name has the form of those on the hub, "name" or "owner/name": no absolute path
    has it, and no path through several folders."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


@contextmanager
def asked_once(place: str) -> Iterator[None]:
    """Ask once whether the hub answers; if not, the ``with`` block finds only what was downloaded
    before.

    Without this, the client would ask six times for each file, which takes 24 s. A directory or
    file needs no hub, so nothing is asked for it.
    """
    if os.path.exists(place):
        yield
        return
    from huggingface_hub import constants, get_session

    with _offline_switch:
        offline = constants.HF_HUB_OFFLINE
        try:
            # By the hub's own client, which knows the user's proxies.
            get_session().head(constants.ENDPOINT, timeout=5)
        except Exception:  # of whichever client it uses, and where the user chose to be offline
            constants.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """The commit of a model on the hub, or else of the one downloaded before; None if there is no
    such model, or the name is that of a directory or file here."""
    if os.path.exists(name) or not may_be_on_hub(name):
        return None
    from huggingface_hub import hf_hub_download

    try:
        with asked_once(name):
            config = hf_hub_download(name, "config.json", revision=revision)
    except (OSError, ValueError):  # no such model, or no name that a model can have
        return None
    return Path(config).parent.name  # …/snapshots/COMMIT/config.json
