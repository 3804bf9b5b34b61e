"""Suggestions for a name that does not exist: the nearest names that the caller may use."""

import asyncio
from bisect import bisect
from difflib import get_close_matches

from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import ModelNames

MAX_NAMES = 2000  # compared; with more, those next to the misspelt one in alphabetical order
MAX_CHARACTERS = 128  # compared per name
MAX_CHECKS = 20_000  # of a key's patterns against names
NUM_SUGGESTIONS = 3
MIN_RATIO = 0.6


async def with_nearest(error: LoraxError, misspelt: str, source: str | None, names: ModelNames, key: Key) -> LoraxError:
    """Return the same error, with suggestions if there are any."""
    nearest = await asyncio.to_thread(find_nearest, misspelt, source, names, key)
    if not nearest:
        return error
    suggesting = type(error)(f"{error}; did you mean {' or '.join(map(repr, nearest))}?")
    suggesting.status, suggesting.retry_after_s = error.status, error.retry_after_s
    return suggesting


def find_nearest(misspelt: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """Return the nearest names, the best first. If a request names a source, they are names of that source."""
    misspelt = names.without_base(misspelt).partition("@")[0]
    if not 0 < len(misspelt) <= MAX_CHARACTERS:
        return []
    candidates = [*_list_candidates(misspelt, source, names, key), *(names.base_names if key.base_model else ())]
    by_plain = {_plain(name): name for name in reversed(candidates) if name != misspelt}
    return [by_plain[near] for near in get_close_matches(_plain(misspelt), by_plain, NUM_SUGGESTIONS, MIN_RATIO)]


def _list_candidates(misspelt: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    listing, candidates = names.listing, []
    count = min(MAX_NAMES, MAX_CHECKS // max(1, len(key.adapters or ())))
    start = max(0, min(bisect(listing.names, misspelt) - count // 2, len(listing.names) - count))
    for name in listing.names[start : start + count]:
        named = listing.adapters[name]
        if source is None and names.may_use(key, name, named):
            candidates.append(name)
        elif source == named.source and key.may_use(*named, names.default_source):
            candidates.append(named.name)
    return candidates


def _plain(name: str) -> str:
    return name[:MAX_CHARACTERS].casefold()
