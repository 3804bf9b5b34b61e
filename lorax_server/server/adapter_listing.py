"""Pagination for `/v1/adapters`. The page size bounds the cost of a request.

Listed names come first, sorted by name. Admins also see all other resolved adapters, sorted by identity. The engine is
queried only for the adapters on the page.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lorax_server.server.access.keys import HUB_SOURCE, Key
from lorax_server.server.access.model_names import AdapterKey, ModelNames
from lorax_server.server.adapter_name_index import IN_MEMORY_STAGES, MERGE_SOURCE
from lorax_server.server.service import Service
from lorax_server.types import AdapterStage, AdapterState

MAX_PAGE_SIZE = 1000  # adapters per page
MAX_QUERY_CHARACTERS = 1024  # maximum length of `search` and `after`
MAX_ALSO_NAMES = 100
NAME_CURSOR, HASH_CURSOR = "name:", "hash:"
CURSOR_PATTERN = f"^({NAME_CURSOR}|{HASH_CURSOR})"  # valid prefixes of `after`


class PageQuery(BaseModel):
    """The query parameters of `/v1/adapters`."""

    model_config = ConfigDict(frozen=True)

    limit: int = Field(
        default=MAX_PAGE_SIZE, ge=1, le=MAX_PAGE_SIZE, description="Maximum number of adapters per page."
    )
    after: str = Field(
        default=NAME_CURSOR,
        max_length=MAX_QUERY_CHARACTERS,
        pattern=CURSOR_PATTERN,
        description="`next` from the previous page; omit it for the first page.",
    )
    search: str = Field(
        default="", max_length=MAX_QUERY_CHARACTERS, description="Only adapters whose name contains this text."
    )
    also: list[str] = Field(
        default=[], max_length=MAX_ALSO_NAMES, description="Names of additional adapters to include on the first page."
    )


class _Entry(NamedTuple):
    alias: str  # "" for adapters that are not listed
    name: AdapterKey | None
    identity: str  # "" if the name was never resolved
    is_listed: bool = True  # shown even if the engine does not know the adapter


async def list_page(service: Service, key: Key, query: PageQuery = PageQuery()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Return one page of adapters as a response body."""
    entries = [] if query.after.startswith(HASH_CURSOR) else await _list_by_name(service, key, query)
    is_admin = key.is_admin or service.allows_local_admin
    if is_admin and len(entries) <= query.limit:
        entries += _list_unlisted_adapters(service, query, query.limit + 1 - len(entries))
    page = entries[: query.limit]
    following = _make_cursor(page[-1], entries[query.limit]) if len(entries) > query.limit else None
    if query.after == NAME_CURSOR and query.also:
        page += _list_also_names(service, key, query.also, page)
    listed = await service.engine.list_adapters([entry.identity for entry in page if entry.identity])
    states, index, data = {state.identity: state for state in listed}, service.adapter_index, []
    for entry in page:
        state, is_merged = states.get(entry.identity), entry.name is not None and entry.name.source == MERGE_SOURCE
        if is_merged and (state is None or state.state not in IN_MEMORY_STAGES):
            index.remove(entry.identity)  # the next request merges the adapters again
        elif entry.is_listed or state is not None:
            problems = index.find_error(entry.name), index.find_warning(entry.name)
            data.append(adapter_to_json(entry.alias, entry.name, state, *problems))
    return {"object": "list", "data": data, "has_more": following is not None, "next": following}


async def select_names(
    names: ModelNames, key: Key, search: str = "", after: str = "", count: int | None = None
) -> list[tuple[str, AdapterKey]]:
    """Return up to `count` listed names that contain `search` and that the caller may use."""
    snapshot, text = names.snapshot, search.casefold()
    listed = snapshot.names

    def select() -> list[tuple[str, AdapterKey]]:
        start = bisect_right(listed, after) if after else 0
        following = ((listed[index], snapshot.adapters[listed[index]]) for index in range(start, len(listed)))
        matching = (pair for pair in following if text in pair[0].casefold() and names.may_use(key, *pair))
        return list(islice(matching, count))

    return await asyncio.to_thread(select)  # on a thread, because there may be a hundred thousand names


async def _list_by_name(service: Service, key: Key, query: PageQuery) -> list[_Entry]:
    """Return the listed adapters for a page, and one more adapter if there is a next page."""
    after, count = query.after.removeprefix(NAME_CURSOR), query.limit + 1
    names = await select_names(service.model_names, key, query.search, after, count)
    return [_Entry(alias, name, service.adapter_index.latest_identity(name)) for alias, name in names]


def _list_unlisted_adapters(service: Service, query: PageQuery, count: int) -> list[_Entry]:
    """Return up to `count` resolved adapters that have no listed name."""
    index, listed, text = service.adapter_index, service.model_names.snapshot.adapter_keys, query.search.casefold()
    start = query.after.removeprefix(HASH_CURSOR) if query.after.startswith(HASH_CURSOR) else ""
    others = (each for each in index.identities_after(start) if _is_unlisted(index.names_of(each), listed, text))
    return [_Entry("", index.first_name(each), each, is_listed=False) for each in islice(others, count)]


def _is_unlisted(names: Iterable[AdapterKey], listed_keys: frozenset[AdapterKey], text: str) -> bool:
    return not any(name in listed_keys for name in names) and any(text in name.name.casefold() for name in names)


def _make_cursor(last_entry: _Entry, next_entry: _Entry) -> str:
    """Return the cursor for the next page."""
    if next_entry.is_listed:
        return NAME_CURSOR + last_entry.alias
    return HASH_CURSOR + ("" if last_entry.is_listed else last_entry.identity)


def _list_also_names(service: Service, key: Key, also: Sequence[str], page: Sequence[_Entry]) -> list[_Entry]:
    """Return the adapters in the `also` query parameter that the caller may use and that are not on the page.

    Unlisted adapters that require a token are omitted, because the caller may not have a valid token.
    """
    names, index, entries = service.model_names, service.adapter_index, dict[str, _Entry]()
    aliases, others = {entry.alias for entry in page}, {entry.name for entry in page if not entry.alias}
    for adapter_id in also:
        selection = names.select_adapter(adapter_id, None)
        (name,), (allowed,) = selection.adapter_keys, selection.access_keys
        allowed = allowed._replace(name=names.strip_version(allowed.name))
        is_listed, is_on_page = selection.label in names.adapters, selection.label in aliases or name in others
        is_hidden = index.is_private(name) and not (is_listed or key.is_admin or service.allows_local_admin)
        if not (is_on_page or is_hidden) and key.may_use(*allowed, names.default_source, name.source == HUB_SOURCE):
            entries[selection.label] = _Entry(selection.label, name, index.latest_identity(name), is_listed)
    return list(entries.values())


def adapter_to_json(
    alias: str,
    name: AdapterKey | None,
    state: AdapterState | None,
    error: str | None = None,
    warning: str | None = None,
) -> dict[str, Any]:
    """Return an adapter as a response body. `alias` is "" for unlisted adapters.

    `error` is the last error for the name. A loaded adapter can have an error if its files changed later.
    """
    is_unloaded = state is None or state.state not in IN_MEMORY_STAGES
    return {
        "id": alias or (name.name if name else state.name if state else ""),
        "object": "adapter",
        "source": name.source or None if name else None,
        "hash": state.identity if state else None,
        "state": AdapterStage.FAILED.value
        if error and is_unloaded
        else state.state
        if state
        else AdapterStage.DISK.value,
        "bytes": state.num_bytes if state else None,
        "pinned": state.is_pinned if state else False,
        "requests": state.num_requests if state else 0,
        "uses": state.num_uses if state else 0,
        "error": (state and state.error) or error,
        "warning": warning,
    }
