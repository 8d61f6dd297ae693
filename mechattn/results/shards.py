"""Merges the stored results of shards into a new stored result, without replacing any of them."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq

from mechattn.errors import OptionError
from mechattn.results.addresses import as_place, is_address
from mechattn.results.large_store import A_COPY, BEGUN, attributes_of
from mechattn.results.lazy import is_lazy
from mechattn.results.manifest import is_manifest_of
from mechattn.results.merge import is_part, merge_results
from mechattn.results.ours import named
from mechattn.results.reading import load_result
from mechattn.results.result import Result
from mechattn.results.storage import check_result_place, save_manifest, save_result


def merge_stored(out: str, places: Seq[str], copy: bool = False) -> Result:
    """Merge stored results and store the merged result.

    Results in regions (``Job(large=True)``) are not copied; instead a manifest that refers to them is stored.

    Args:
        out: The target; an earlier merge of these results, or of some of them, is replaced.
        places: The paths of the results.
        copy: Copy them anyway, one chunk at a time.

    Raises:
        OptionError: They don't belong together, or the content of ``out`` would be lost.
        OutputError: A result cannot be read, or ``out`` cannot be written.
    """
    check_result_place(out)
    if _real(out) in map(_real, places):
        raise OptionError(f"{out} is both a result to merge and the target; name a new target first")
    results = [load_result(place) for place in places]
    merged, named_alone = merge_results(results), not copy and all(map(is_lazy, results))
    if _exists(out) and not _holds_nothing_else(out, places) and not is_part(load_result(out), merged):
        raise OptionError(
            f"{out} exists and is not a merge of {named(places)}: its content would be lost. The first "
            "name is the target (mechattn merge TARGET RESULT…); name a new one, or delete this one first"
        )
    if named_alone:
        save_manifest(out, places)
    else:
        save_result(merged, out)
    return merged


def _holds_nothing_else(out: str, places: Seq[str]) -> bool:
    """Whether it names some of these results alone, or is what a merge has left that was killed at this address."""
    if out.endswith(".nc"):
        return False
    return is_manifest_of(out, places) or (is_address(out) and attributes_of(out).get(BEGUN) == A_COPY)


def _real(place: str) -> str:
    return place.rstrip("/") if is_address(place) else os.path.realpath(as_place(place))


def _exists(place: str) -> bool:
    import fsspec

    return fsspec.url_to_fs(place)[0].exists(place) if is_address(place) else os.path.lexists(as_place(place))
