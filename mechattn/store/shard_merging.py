"""Merges the stored results of shards into a new stored result, without replacing any of them."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq

from mechattn.errors import OptionError
from mechattn.results.lazy_arrays import lazy_bytes
from mechattn.results.memory import MEMORY, memory_bytes
from mechattn.results.merge import is_part, merge_results
from mechattn.results.result import Result
from mechattn.store import reading
from mechattn.store.addresses import as_place, is_address
from mechattn.store.manifest import is_manifest_of
from mechattn.store.objects import BEGUN, attributes_of
from mechattn.store.own_files import named
from mechattn.store.reading import load_result, read_result
from mechattn.store.saving import check_result_place, save_manifest, save_result


def merge_stored(out: str, places: Seq[str], copy: bool = False) -> Result:
    """Merge stored results and store the merged result.

    Per-prompt values of more than 256 MiB are not copied; instead a manifest that refers to the results is stored.
    """
    check_result_place(out)
    if _real(out) in map(_real, places):
        raise OptionError(f"{out} is both a result to merge and the target; name a new target first")
    merged = merge_results([read_result(place, lazy=True) for place in places])
    if _exists(out) and not _holds_nothing_else(out, places) and not is_part(read_result(out, lazy=True), merged):
        raise OptionError(
            f"{out} exists and is not a merge of {named(places)}: its content would be lost. The first "
            "name is the target (mechattn merge TARGET RESULT…); name a new one, or delete this one first"
        )
    if not copy and lazy_bytes(merged) > memory_bytes(MEMORY) // reading.SHARE:
        save_manifest(out, places)
    else:
        save_result(merged, out)
    return load_result(out)


def _holds_nothing_else(out: str, places: Seq[str]) -> bool:
    """Whether it names some of these results alone, or is what a merge has left that was killed at this address."""
    return is_manifest_of(out, places) or (is_address(out) and BEGUN in attributes_of(out))


def _real(place: str) -> str:
    return place.rstrip("/") if is_address(place) else os.path.realpath(as_place(place))


def _exists(place: str) -> bool:
    import fsspec

    return fsspec.url_to_fs(place)[0].exists(place) if is_address(place) else os.path.lexists(as_place(place))
