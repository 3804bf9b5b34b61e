"""Adapter pagination: completeness, permissions and bounded work per page."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lorax_server.engine.remote import messages
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.adapter_listing import MAX_ALSO_NAMES, MAX_PAGE_SIZE, PageQuery, list_page, select_names
from lorax_server.types import AdapterState
from tests.server.service_harness import ServiceHarness

ADMIN = Key("admin", is_admin=True)


class Pages(ServiceHarness):
    """A server with `count` names (every `every`-th used) and `others` visible to admins only."""

    def __init__(self, count: int, every: int = 1, others: int = 0, host: str = "0.0.0.0") -> None:
        super().__init__(host=host)
        self.asked: list[Sequence[str]] = []  # of the engine
        self.engine._send = self._reply  # type: ignore[method-assign]
        self.service.model_names.set_folder_names([f"a-{number:05}" for number in range(count)])
        for number in range(0, count, every):
            self.service.adapter_index.add(f"hash-{number:05}", AdapterKey("local", f"a-{number:05}"))
        for number in range(others):
            self.service.adapter_index.add(f"other-{number:05}", AdapterKey("hub", f"owner/o-{number:05}"))

    def _reply(self, message: messages.ToEngine) -> None:
        assert isinstance(message, messages.ListAdapters)
        self.asked.append(message.identities)
        states = [AdapterState(each, f"n-{each}", "on the device", 7, False, 0, 1) for each in message.identities]
        asyncio.get_running_loop().call_soon(self.engine._settle, messages.AdaptersReply(message.query_id, states))

    def page(self, key: Key = Key(), **asked: Any) -> dict[str, Any]:  # noqa: B008
        return asyncio.run(list_page(self.service, key, PageQuery(**asked)))

    def walk(self, key: Key = Key(), **asked: Any) -> list[list[str]]:  # noqa: B008
        """Return the adapter IDs of all pages."""
        pages: list[list[str]] = []
        after: str | None = "name:"
        while after is not None:
            page = self.page(key, after=after, **asked)
            assert page["has_more"] == (page["next"] is not None)
            pages.append([each["id"] for each in page["data"]])
            after = page["next"]
        return pages


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 8, 9, 1000])
@pytest.mark.parametrize("others", [0, 1, 4])
def test_pages_cover_all_adapters(limit: int, others: int) -> None:
    harness = Pages(4, every=2, others=others)
    for key, rest in ((Key(), 0), (ADMIN, others)):
        pages = harness.walk(key, limit=limit)
        assert [name for page in pages for name in page] == [
            *(f"a-{number:05}" for number in range(4)),
            *(f"owner/o-{number:05}" for number in range(rest)),
        ]
        assert all(len(page) == limit for page in pages[:-1])


def test_caller_on_same_machine_sees_all_adapters_without_keys() -> None:
    names = [each["id"] for each in Pages(1, others=2, host="127.0.0.1").page()["data"]]
    assert names == ["a-00000", "owner/o-00000", "owner/o-00001"]


def test_used_adapters_show_their_tier() -> None:
    used, unused = Pages(2, every=2).page()["data"]
    assert (used["state"], used["hash"], used["source"]) == ("on the device", "hash-00000", "local")
    assert (unused["state"], unused["hash"], unused["bytes"]) == ("on disk", None, None)


def test_engine_is_queried_for_one_page_only() -> None:
    harness = Pages(3000, others=2000)
    harness.page(ADMIN, limit=10)
    harness.page(ADMIN, limit=10, after="name:a-02990")
    harness.page(ADMIN, limit=MAX_PAGE_SIZE, also=[f"x-{number}" for number in range(MAX_ALSO_NAMES)])
    assert [len(identities) for identities in harness.asked] == [10, 10, MAX_PAGE_SIZE]


def test_page_checks_only_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the first page takes time proportional to the page size, not to the number of names."""
    harness, looks = Pages(3000), []

    def may_use(*named: Any) -> bool:
        looks.append(named)
        return True

    monkeypatch.setattr(Key, "may_use", may_use)
    harness.page(limit=10)
    assert len(looks) == 11


def test_names_are_searched_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, aside = Pages(20), []
    to_thread = asyncio.to_thread

    async def note(work: Any) -> Any:
        aside.append(work)
        return await to_thread(work)

    monkeypatch.setattr(asyncio, "to_thread", note)
    assert len(asyncio.run(select_names(harness.service.model_names, Key()))) == 20
    key = Key(name="k", adapters=("*-00007",))
    assert [name for name, _ in asyncio.run(select_names(harness.service.model_names, key, count=5))] == ["a-00007"]
    assert len(aside) == 2


def test_caller_sees_only_allowed_adapters() -> None:
    harness = Pages(20, others=3)
    key = Key("k", adapters=("a-0000[3-6]", "hub:owner/*"))
    assert harness.walk(key, limit=3) == [["a-00003", "a-00004", "a-00005"], ["a-00006"]]
    page = harness.page(key, limit=1, also=["a-00005", "a-00010", "owner/o-00001", "owner/unused"])
    assert [each["id"] for each in page["data"]] == ["a-00003", "a-00005", "owner/o-00001"]


def test_private_adapter_is_shown_to_admins_only() -> None:
    harness, name = Pages(0), AdapterKey("hub", "owner/private")
    harness.service.adapter_index.add("hash", name, needs_token=True)

    def ids(key: Key) -> list[str]:
        return [each["id"] for each in harness.page(key, also=["owner/private"])["data"]]

    assert ids(Key()) == ids(Key("k")) == ids(Key("k", adapters=("*",))) == []
    assert ids(ADMIN) == ["owner/private"]
    harness.service.model_names.add_alias("mine", *name)
    assert [each["id"] for each in harness.page(also=["mine"])["data"]] == ["mine"]
    harness.service.model_names.remove_alias("mine")
    harness.service.adapter_index.add("hash", name)  # it was found without a token, so it is public
    harness.service.adapter_index.add("hash", name, needs_token=True)
    assert ids(Key()) == ["owner/private"]


def test_search_filters_names() -> None:
    harness = Pages(20, others=3)
    assert harness.walk(ADMIN, search="-0000", limit=7) == [
        [f"a-{number:05}" for number in range(7)],
        [*(f"a-{number:05}" for number in range(7, 10)), *(f"owner/o-{number:05}" for number in range(3))],
    ]
    assert harness.walk(search="A-0001", limit=100) == [[f"a-{number:05}" for number in range(10, 20)]]
    assert harness.walk(search="\0") == [[]]


def test_also_parameter_adds_adapters_to_first_page() -> None:
    harness = Pages(4, others=2)
    first = harness.page(ADMIN, limit=2, also=["a-00001", "a-00003"])
    assert [each["id"] for each in first["data"]] == ["a-00000", "a-00001", "a-00003"]
    second = harness.page(ADMIN, limit=2, after=first["next"])
    assert [each["id"] for each in second["data"]] == ["a-00002", "a-00003"]
    all_of_them = harness.page(ADMIN, also=["owner/o-00000", "a-00003"])  # the hub is the default source here
    assert [each["hash"] for each in all_of_them["data"]].count("other-00000") == 1
    assert len(all_of_them["data"]) == 6


def test_pages_survive_concurrent_name_changes() -> None:
    harness = Pages(6)
    first = harness.page(limit=2)
    harness.service.model_names.set_folder_names(
        ["a-00000", "a-00002", "a-000015", "a-00004"]
    )  # the last one shown has gone
    second = harness.page(limit=9, after=first["next"])
    assert [each["id"] for each in second["data"]] == ["a-000015", "a-00002", "a-00004"]


def test_adapter_unknown_to_engine_is_listed_by_name() -> None:
    harness = Pages(1, others=1)

    def send(message: messages.ToEngine) -> None:
        assert isinstance(message, messages.ListAdapters)
        asyncio.get_running_loop().call_soon(harness.engine._settle, messages.AdaptersReply(message.query_id, []))

    harness.engine._send = send  # type: ignore[method-assign]
    page = harness.page(ADMIN)
    assert [(each["id"], each["state"]) for each in page["data"]] == [("a-00000", "on disk")]
