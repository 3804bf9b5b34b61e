"""Suggestions for a name that does not exist: the nearest names that the caller may use.

Signatures of names find the few that are worth a real comparison, so that a flood of misspelt names costs little:
`benchmarks/shared_costs.py` measures it.
"""

from collections.abc import Iterator
from difflib import get_close_matches

from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import Listing, ModelNames, signature_of
from lorax_server.server.adapter_pages import off_loop

FEW = 100  # names, which take less time to compare than a thread to begin
MAX_CHARACTERS = 128  # of a name that are compared
MAX_CHECKS = 2000  # of patterns of a key against names
NUM_COMPARED = 24
NUM_TOLD = 3
LEAST_RATIO = 0.6


async def with_nearest(error: LoraxError, misspelt: str, source: str | None, names: ModelNames, key: Key) -> LoraxError:
    """Return the same error, with suggestions if there are any."""
    nearest = await off_loop(len(names.adapters) > FEW, lambda: find_nearest(misspelt, source, names, key))
    if not nearest:
        return error
    suggesting = type(error)(f"{error}; did you mean {' or '.join(map(repr, nearest))}?")
    suggesting.status, suggesting.retry_after_s = error.status, error.retry_after_s
    return suggesting


def find_nearest(misspelt: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """Return the nearest names, the best first. Where a request names a source, they are names of that source."""
    misspelt = names.without_base(misspelt).partition("@")[0]
    if not 0 < len(misspelt) <= MAX_CHARACTERS:
        return []
    candidates = _list_candidates(misspelt, source, names, key)
    by_plain = {_plain(name): name for name in reversed(candidates) if name != misspelt}  # of two, the likelier one
    return [by_plain[near] for near in get_close_matches(_plain(misspelt), by_plain, NUM_TOLD, LEAST_RATIO)]


def _list_candidates(misspelt: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """Return the names that look most alike, of those that the caller may use."""
    listing, candidates = names.listing, []
    checks_left = MAX_CHECKS
    for name in _sort_by_likeness(misspelt, listing):
        checks_left -= max(1, len(key.adapters or ()))
        named = listing.adapters[name]
        if source is None and names.may_use(key, name, named):
            candidates.append(name)
        elif source == named.source and key.may_use(*named, names.default_source):
            candidates.append(named.name)
        if len(candidates) == NUM_COMPARED or checks_left <= 0:
            break
    return [*candidates, *(names.base_names if key.base_model else ())]


def _sort_by_likeness(misspelt: str, listing: Listing) -> Iterator[str]:
    bits, signatures = signature_of(misspelt), listing.signatures
    likeness = [(bits & signature).bit_count() - signature.bit_count() // 2 for signature in signatures]
    order = sorted(range(len(signatures)), key=likeness.__getitem__, reverse=True)
    return (listing.names[index] for index in order)


def _plain(name: str) -> str:
    return name[:MAX_CHARACTERS].casefold()
