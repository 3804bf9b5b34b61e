"""Pages of `/v1/adapters`. The cost of a page is bounded by its size, for the engine and for the event loop.

Names that the operator gave come first, in their order; then, for an admin, the other adapters by identity. The engine
is asked only for the adapters of the page.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lorax_server.engine.adapters.entry import State
from lorax_server.server.access.keys import HUB, Key
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.seen_adapters import IN_MEMORY, MERGES
from lorax_server.server.service import Service
from lorax_server.server.workers.changes import AdapterForgotten
from lorax_server.types import AdapterState

MAX_LIMIT = 1000  # adapters of a page
MAX_TEXT = 1024  # characters of `search` and `after`
MAX_ALSO = 100
FEW = 1000  # names, which are looked through sooner than a thread has begun
BY_NAME, BY_HASH = "name:", "hash:"
MARK = f"^({BY_NAME}|{BY_HASH})"  # how `after` begins
Made = TypeVar("Made")


class PageQuery(NamedTuple):
    limit: int = MAX_LIMIT
    after: str = BY_NAME
    search: str = ""
    also: Sequence[str] = ()


class _Row(NamedTuple):
    alias: str  # "" where the operator gave none
    name: Named | None
    identity: str  # "" if it was never resolved
    is_listed: bool = True  # also if the engine does not know it: the operator gave the name


async def list_page(service: Service, key: Key, query: PageQuery = PageQuery()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Describe the adapters of a page, as the body of an answer."""
    rows = [] if query.after.startswith(BY_HASH) else await _list_named(service, key, query)
    if key.is_admin and len(rows) <= query.limit:
        rows += await _list_others(service, query, query.limit + 1 - len(rows))
    page = rows[: query.limit]
    following = _mark(page[-1], rows[query.limit]) if len(rows) > query.limit else None
    if query.after == BY_NAME and query.also:
        page += _list_also(service, key, query.also, page)
    states = await service.engine.list_adapters([row.identity for row in page if row.identity])
    data = await _describe_all(service, page, {state.identity: state for state in states})
    return {"object": "list", "data": data, "has_more": following is not None, "next": following}


async def select_names(
    names: ModelNames, key: Key, search: str = "", after: str = "", count: int | None = None
) -> list[tuple[str, Named]]:
    """Return up to `count` names that the operator gave, that the caller may use and that have a text in them."""
    listing, text = names.listing, search.casefold()
    listed = listing.names

    def select() -> list[tuple[str, Named]]:
        start = bisect_right(listed, after) if after else 0
        following = ((listed[index], listing.adapters[listed[index]]) for index in range(start, len(listed)))
        kept = (pair for pair in following if text in pair[0].casefold() and names.may_use(key, *pair))
        return list(islice(kept, count))

    return await off_loop(len(listed) > FEW and bool(text or key.adapters is not None or count is None), select)


async def off_loop(is_much: bool, make: Callable[[], Made]) -> Made:
    """Make something, on another thread if it is much, so that other requests do not wait."""
    return await asyncio.to_thread(make) if is_much else make()


async def _list_named(service: Service, key: Key, query: PageQuery) -> list[_Row]:
    """Return one row more than the page has, if there are more."""
    after, count = query.after.removeprefix(BY_NAME), query.limit + 1
    names = await select_names(service.model_names, key, query.search, after, count)
    return [_Row(alias, name, service.seen.latest(name)) for alias, name in names]


async def _list_others(service: Service, query: PageQuery, count: int) -> list[_Row]:
    """Return up to `count` adapters that have been resolved and whose names the operator did not give.

    After every few of them other requests have their turn.
    """
    seen, listed, text = service.seen, service.model_names.listing.named, query.search.casefold()
    start = query.after.removeprefix(BY_HASH) if query.after.startswith(BY_HASH) else ""
    rows: list[_Row] = []
    while True:
        few = list(islice(seen.identities_after(start), FEW))
        kept = (identity for identity in few if _is_other(seen.names(identity), listed, text))
        for identity in islice(kept, count - len(rows)):
            rows.append(_Row("", seen.first_name(identity), identity, is_listed=False))
        if len(few) < FEW or len(rows) == count:
            return rows
        start = few[-1]
        await asyncio.sleep(0)


def _is_other(names: Iterable[Named], listed: frozenset[Named], text: str) -> bool:
    return not any(name in listed for name in names) and any(text in name.name.casefold() for name in names)


def _mark(last: _Row, following: _Row) -> str:
    """Return the mark at which the next page begins."""
    if following.is_listed:
        return BY_NAME + last.alias
    return BY_HASH + ("" if last.is_listed else last.identity)


def _list_also(service: Service, key: Key, also: Sequence[str], page: Sequence[_Row]) -> list[_Row]:
    """Return further adapters that a caller names and may use, unless the page has them already.

    An adapter that needs a token is left out, unless the operator gave the name: the caller may have no token for it.
    """
    aliases, others = {row.alias for row in page}, {row.name for row in page if not row.alias}
    rows = {row.alias: row for row in _find_rows(service, key, also)}
    return [row for row in rows.values() if row.alias not in aliases and row.name not in others]


def _find_rows(service: Service, key: Key, adapter_ids: Iterable[str]) -> Iterator[_Row]:
    names = service.model_names
    for adapter_id in adapter_ids:
        choice = names.find(adapter_id, None)
        (name,), (allowed,) = choice.names, choice.allowed
        is_listed = choice.label in names.adapters
        is_hidden = service.seen.is_private(name) and not (is_listed or key.is_admin)
        if key.may_use(*allowed, names.default_source, name.source == HUB) and not is_hidden:
            yield _Row(choice.label, name, service.seen.latest(name), is_listed)


async def _describe_all(service: Service, rows: list[_Row], states: dict[str, AdapterState]) -> list[dict[str, Any]]:
    data = []
    for row in rows:
        state, is_merged = states.get(row.identity), row.name is not None and row.name.source == MERGES
        if is_merged and (state is None or state.state not in IN_MEMORY):
            # The next request for it merges anew, so that there is nothing to tell of it.
            await service.change(AdapterForgotten(row.identity))
        elif row.is_listed or state is not None:
            data.append(describe(row.alias, row.name, state, service.seen.error(row.name)))
    return data


def describe(alias: str, name: Named | None, state: AdapterState | None, error: str | None) -> dict[str, Any]:
    """Describe an adapter as a body has it; `alias` is "" where the operator gave none.

    `error` is of the name, whose files may be others by now than those in memory.
    """
    is_gone = state is None or state.state not in IN_MEMORY
    return {
        "id": alias or (name.name if name else state.name if state else ""),
        "object": "adapter",
        "source": name.source or None if name else None,
        "hash": state.identity if state else None,
        "state": State.FAILED.value if error and is_gone else state.state if state else State.DISK.value,
        "bytes": state.num_bytes if state else None,
        "pinned": state.is_pinned if state else False,
        "requests": state.num_requests if state else 0,
        "uses": state.num_uses if state else 0,
        "error": (state and state.error) or error,
    }
