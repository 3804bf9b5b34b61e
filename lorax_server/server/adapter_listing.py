"""Pages of `/v1/adapters`, whose cost for the engine and the event loop is bounded by their size.

The operator's names come first, in their order; then, for an admin, the other adapters by identity. The engine is
queried only for the adapters of the page.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from lorax_server.server.access.keys import HUB, Key
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.adapter_name_index import IN_MEMORY, MERGES
from lorax_server.server.service import Service
from lorax_server.types import AdapterStage, AdapterState

MAX_LIMIT = 1000  # adapters per page
MAX_TEXT = 1024  # characters of `search` and `after`
MAX_ALSO = 100
BY_NAME, BY_HASH = "name:", "hash:"
MARK = f"^({BY_NAME}|{BY_HASH})"  # prefix of `after`


class PageQuery(NamedTuple):
    limit: int = MAX_LIMIT
    after: str = BY_NAME
    search: str = ""
    also: Sequence[str] = ()


class _Row(NamedTuple):
    alias: str  # "" without an operator's name
    name: Named | None
    identity: str  # "" if it was never resolved
    is_listed: bool = True  # even if the engine does not know it: it has an operator's name


async def list_page(service: Service, key: Key, query: PageQuery = PageQuery()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Return the adapters of a page, as a response body."""
    rows = [] if query.after.startswith(BY_HASH) else await _list_named(service, key, query)
    if key.is_admin and len(rows) <= query.limit:
        rows += _list_others(service, query, query.limit + 1 - len(rows))
    page = rows[: query.limit]
    following = _mark(page[-1], rows[query.limit]) if len(rows) > query.limit else None
    if query.after == BY_NAME and query.also:
        page += _list_also(service, key, query.also, page)
    listed = await service.engine.list_adapters([row.identity for row in page if row.identity])
    states, index, data = {state.identity: state for state in listed}, service.adapter_index, []
    for row in page:
        state, is_merged = states.get(row.identity), row.name is not None and row.name.source == MERGES
        if is_merged and (state is None or state.state not in IN_MEMORY):
            index.remove(row.identity)  # the next request merges again
        elif row.is_listed or state is not None:
            data.append(describe(row.alias, row.name, state, index.error(row.name)))
    return {"object": "list", "data": data, "has_more": following is not None, "next": following}


async def select_names(
    names: ModelNames, key: Key, search: str = "", after: str = "", count: int | None = None
) -> list[tuple[str, Named]]:
    """Return up to `count` operator's names that contain `search` and that the caller may use."""
    listing, text = names.listing, search.casefold()
    listed = listing.names

    def select() -> list[tuple[str, Named]]:
        start = bisect_right(listed, after) if after else 0
        following = ((listed[index], listing.adapters[listed[index]]) for index in range(start, len(listed)))
        kept = (pair for pair in following if text in pair[0].casefold() and names.may_use(key, *pair))
        return list(islice(kept, count))

    return await asyncio.to_thread(select)  # there may be a hundred thousand names


async def _list_named(service: Service, key: Key, query: PageQuery) -> list[_Row]:
    """Return one row more than the page holds, if there are more."""
    after, count = query.after.removeprefix(BY_NAME), query.limit + 1
    names = await select_names(service.model_names, key, query.search, after, count)
    return [_Row(alias, name, service.adapter_index.latest(name)) for alias, name in names]


def _list_others(service: Service, query: PageQuery, count: int) -> list[_Row]:
    """Return up to `count` adapters that have been resolved and have no operator's name."""
    index, listed, text = service.adapter_index, service.model_names.listing.named, query.search.casefold()
    start = query.after.removeprefix(BY_HASH) if query.after.startswith(BY_HASH) else ""
    others = (each for each in index.identities_after(start) if _is_other(index.names(each), listed, text))
    return [_Row("", index.first_name(each), each, is_listed=False) for each in islice(others, count)]


def _is_other(names: Iterable[Named], listed: frozenset[Named], text: str) -> bool:
    return not any(name in listed for name in names) and any(text in name.name.casefold() for name in names)


def _mark(last: _Row, following: _Row) -> str:
    """Return the mark of the next page."""
    if following.is_listed:
        return BY_NAME + last.alias
    return BY_HASH + ("" if last.is_listed else last.identity)


def _list_also(service: Service, key: Key, also: Sequence[str], page: Sequence[_Row]) -> list[_Row]:
    """Return further adapters that a caller names and may use, unless the page has them already.

    An adapter that needs a token is left out, unless it has an operator's name: the caller may have no token for it.
    """
    names, index, rows = service.model_names, service.adapter_index, dict[str, _Row]()
    aliases, others = {row.alias for row in page}, {row.name for row in page if not row.alias}
    for adapter_id in also:
        choice = names.find(adapter_id, None)
        (name,), (allowed,) = choice.names, choice.allowed
        is_listed, is_there = choice.label in names.adapters, choice.label in aliases or name in others
        is_hidden = index.is_private(name) and not (is_listed or key.is_admin)
        if not (is_there or is_hidden) and key.may_use(*allowed, names.default_source, name.source == HUB):
            rows[choice.label] = _Row(choice.label, name, index.latest(name), is_listed)
    return list(rows.values())


def describe(alias: str, name: Named | None, state: AdapterState | None, error: str | None) -> dict[str, Any]:
    """Return an adapter as a response body; `alias` is "" without an operator's name.

    `error` belongs to the name, whose files may differ from the files in memory.
    """
    is_gone = state is None or state.state not in IN_MEMORY
    return {
        "id": alias or (name.name if name else state.name if state else ""),
        "object": "adapter",
        "source": name.source or None if name else None,
        "hash": state.identity if state else None,
        "state": AdapterStage.FAILED.value if error and is_gone else state.state if state else AdapterStage.DISK.value,
        "bytes": state.num_bytes if state else None,
        "pinned": state.is_pinned if state else False,
        "requests": state.num_requests if state else 0,
        "uses": state.num_uses if state else 0,
        "error": (state and state.error) or error,
    }
