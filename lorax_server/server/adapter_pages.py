"""Pages of `/v1/adapters`. What a page costs is bounded by its size, for the engine and for the event loop.

Names that the operator gave come first, in their order; then, for an admin, the other adapters by their hashes. The
engine is asked only for the adapters of the page.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lorax_server.engine.adapters.entry import State
from lorax_server.server.access.keys import HUB, Key
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.parts import IN_MEMORY, MERGES, Parts, Seen
from lorax_server.types import AdapterState

MAX_LIMIT = 1000  # adapters of a page
MAX_TEXT = 1024  # characters of `search` and `after`
MAX_ALSO = 100
FEW = 1000  # names, which are looked through sooner than a thread has begun
BY_NAME, BY_HASH = "name:", "hash:"
MARK = f"^({BY_NAME}|{BY_HASH})"  # how `after` begins
Made = TypeVar("Made")


class Asked(NamedTuple):
    """The page that a caller asks for."""

    limit: int = MAX_LIMIT
    after: str = BY_NAME
    search: str = ""
    also: Sequence[str] = ()


class _Row(NamedTuple):
    name: str  # "" where only the engine knows it
    place: Named | None
    identity: str  # "" if it was never resolved
    is_named: bool = True  # by the operator: listed also if the engine does not know it


async def list_page(parts: Parts, key: Key, asked: Asked = Asked()) -> dict[str, Any]:  # noqa: B008 - never changed
    """Describe the adapters of a page, as the body of an answer."""
    rows = [] if asked.after.startswith(BY_HASH) else await _named(parts, key, asked)
    if key.is_admin and len(rows) <= asked.limit:
        rows += await _others(parts, asked, asked.limit + 1 - len(rows))
    page = rows[: asked.limit]
    following = _mark(page[-1], rows[asked.limit]) if len(rows) > asked.limit else None
    if asked.after == BY_NAME and asked.also:
        page += _also(parts, key, asked.also, page)
    states = await parts.engine.list_adapters([row.identity for row in page if row.identity])
    data = _describe_all(parts.seen, page, {state.identity: state for state in states})
    return {"object": "list", "data": data, "has_more": following is not None, "next": following}


async def select(
    names: ModelNames, key: Key, search: str = "", after: str = "", count: int | None = None
) -> list[tuple[str, Named]]:
    """The names that the operator gave, that the caller may use and that have a text in them, from one on."""
    listing, default_source, wanted = names.listing, names.default_source, search.casefold()
    listed = listing.names

    def keep(name: str) -> bool:
        return wanted in name.casefold() and key.may_use(
            default_source, name, default_source, listing.places[name].source == HUB
        )

    def look() -> list[tuple[str, Named]]:
        start = bisect_right(listed, after) if after else 0
        kept = filter(keep, (listed[place] for place in range(start, len(listed))))
        return [(name, listing.places[name]) for name in islice(kept, count)]

    return await off_loop(len(listed) > FEW and bool(wanted or key.adapters is not None or count is None), look)


async def off_loop(is_much: bool, make: Callable[[], Made]) -> Made:
    """Make something, on another thread if it is much, so that nobody waits for it."""
    return await asyncio.to_thread(make) if is_much else make()


async def _named(parts: Parts, key: Key, asked: Asked) -> list[_Row]:
    """One more than the page has, if there are more."""
    names = await select(parts.model_names, key, asked.search, asked.after.removeprefix(BY_NAME), asked.limit + 1)
    return [_Row(name, place, parts.seen.latest(place)) for name, place in names]


async def _others(parts: Parts, asked: Asked, count: int) -> list[_Row]:
    """Up to `count` adapters that have been resolved and whose names the operator did not give.

    After every few of them other requests have their turn.
    """
    seen, named, wanted = parts.seen, parts.model_names.listing.named, asked.search.casefold()
    start = asked.after.removeprefix(BY_HASH) if asked.after.startswith(BY_HASH) else ""
    rows: list[_Row] = []
    while True:
        few = list(islice(seen.after(start), FEW))
        kept = (identity for identity in few if _is_other(seen.names(identity), named, wanted))
        rows += (_Row("", seen.name(each), each, is_named=False) for each in islice(kept, count - len(rows)))
        if len(few) < FEW or len(rows) == count:
            return rows
        start = few[-1]
        await asyncio.sleep(0)


def _is_other(places: Iterable[Named], named: frozenset[Named], wanted: str) -> bool:
    return not any(place in named for place in places) and any(wanted in place.name.casefold() for place in places)


def _mark(last: _Row, following: _Row) -> str:
    """The mark at which the next page begins."""
    if following.is_named:
        return BY_NAME + last.name
    return BY_HASH + ("" if last.is_named else last.identity)


def _also(parts: Parts, key: Key, also: Sequence[str], page: Sequence[_Row]) -> list[_Row]:
    """Further adapters that a caller names, on the first page: of those that it may use."""
    names, others = {row.name for row in page}, {row.place for row in page if not row.name}
    rows = {row.name: row for row in _those(parts, key, also)}
    return [row for row in rows.values() if row.name not in names and row.place not in others]


def _those(parts: Parts, key: Key, wanted: Iterable[str]) -> Iterator[_Row]:
    for name in wanted:
        choice = parts.model_names.find(name, None)
        (ref,), (allowed,) = choice.refs, choice.named
        if key.may_use(*allowed, parts.model_names.default_source, ref.source == HUB):
            place = Named(ref.source, ref.name)
            yield _Row(choice.label, place, parts.seen.latest(place), choice.label in parts.model_names.adapters)


def _describe_all(seen: Seen, rows: list[_Row], states: dict[str, AdapterState]) -> list[dict[str, Any]]:
    data = []
    for row in rows:
        state, is_merged = states.get(row.identity), row.place is not None and row.place.source == MERGES
        if is_merged and (state is None or state.state not in IN_MEMORY):
            seen.forget(row.identity)  # it is made anew when it is asked for, so that there is nothing to tell of it
        elif row.is_named or state is not None:
            data.append(describe(row.name, row.place, state, seen.error(row.place)))
    return data


def describe(name: str, place: Named | None, state: AdapterState | None, error: str | None) -> dict[str, Any]:
    """An adapter as a body has it; `name` is empty where it was not given by the operator. `error` is of its place,
    whose files may be others by now than those in memory."""
    is_gone = state is None or state.state not in IN_MEMORY
    return {
        "id": name or (place.name if place else state.name if state else ""),
        "object": "adapter",
        "source": place.source or None if place else None,
        "hash": state.identity if state else None,
        "state": State.FAILED.value if error and is_gone else state.state if state else State.DISK.value,
        "bytes": state.num_bytes if state else None,
        "pinned": state.is_pinned if state else False,
        "requests": state.num_requests if state else 0,
        "uses": state.num_uses if state else 0,
        "error": (state and state.error) or error,
    }
