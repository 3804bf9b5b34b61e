"""The nearest names to one that does not exist, of those that the caller may see.

Signatures of names find the few that are worth a real comparison, so that a flood of misspelt names costs little:
`benchmarks/shared_costs.py` measures it.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher
from heapq import nlargest

from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import HUB, Key
from lorax_server.server.access.model_names import Listing, ModelNames, signature_of
from lorax_server.server.adapter_pages import off_loop

FEW = 100  # names, which are compared sooner than a thread has begun
MAX_CHARACTERS = 128  # of a name that are compared
MAX_CHECKS = 2000  # patterns of a key that are held against names
NUM_COMPARED = 24
NUM_TOLD = 3
LEAST_RATIO = 0.6


async def with_nearest(error: LoraxError, wanted: str, source: str | None, names: ModelNames, key: Key) -> LoraxError:
    """The same error, with the names that may have been meant, if there are any."""
    found = await off_loop(len(names.adapters) > FEW, lambda: find_nearest(wanted, source, names, key))
    if not found:
        return error
    told = type(error)(f"{error}; did you mean {' or '.join(map(repr, found))}?")
    told.status, told.retry_after_s = error.status, error.retry_after_s
    return told


def find_nearest(wanted: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """The nearest names, the best first. Where a request names a source, it is names there that count."""
    wanted = names.without_base(wanted).partition("@")[0]
    if not 0 < len(wanted) <= MAX_CHARACTERS:
        return []
    matcher = SequenceMatcher(b=_plain(wanted), autojunk=False)
    rated = []
    for name in _candidates(wanted, source, names, key):
        matcher.set_seq1(_plain(name))
        if matcher.real_quick_ratio() >= LEAST_RATIO and matcher.quick_ratio() >= LEAST_RATIO:
            rated.append((matcher.ratio(), name))
    best = nlargest(NUM_TOLD, ((ratio, name) for ratio, name in rated if ratio >= LEAST_RATIO and name != wanted))
    return [name for _, name in best]


def _candidates(wanted: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """The names that look most alike, and that the caller may use."""
    listing, found = names.listing, []
    checks_left = MAX_CHECKS
    for name in _by_likeness(wanted, listing):
        checks_left -= max(1, len(key.adapters or ()))
        place = listing.places[name]
        is_hub = place.source == HUB
        if source is None and key.may_use(names.default_source, name, names.default_source, is_hub):
            found.append(name)
        elif source == place.source and key.may_use(*place, names.default_source):
            found.append(place.name)
        if len(found) == NUM_COMPARED or checks_left <= 0:
            break
    return [*found, *(names.base_names if key.base_model else ())]


def _by_likeness(wanted: str, listing: Listing) -> Iterator[str]:
    of_wanted, signatures = signature_of(wanted), listing.signatures
    likeness = [(of_wanted & signature).bit_count() - signature.bit_count() // 2 for signature in signatures]
    order = sorted(range(len(signatures)), key=likeness.__getitem__, reverse=True)
    return (listing.names[place] for place in order)


def _plain(name: str) -> str:
    return name[:MAX_CHARACTERS].casefold()
