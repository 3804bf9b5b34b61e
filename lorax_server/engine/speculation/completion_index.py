"""Guesses the next token from earlier completions of the same adapter and tenant."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lorax_server.engine.speculation.guess import Accuracy, Guess
from lorax_server.engine.speculation.prompt_lookup import KINDS

ORDERS = (8, 4, 2, 1)  # context lengths in tokens, longest first
MAX_COMPLETION_TOKENS = 2048  # indexed tokens of a completion; indexing takes about 3 us per token
ENTRY_BYTES = 192  # an integer key and value in a dict
TENANT_BYTES = 16 * 2**20
MAX_TENANTS = 8  # with indexes; the least recently active tenant loses its indexes
MAX_HISTORIES = 64  # of one tenant
MAX_COUNT = 255  # of one context

Scope = tuple[str, str]  # adapter identity, salt of the prefix cache


class CompletionIndex:
    """Stores the most frequent token after each context of 1, 2, 4 and 8 tokens.

    A context is stored as its hash, with one candidate token and two counts. If other tokens outnumber the candidate,
    one of them replaces it (Boyer-Moore majority vote), so each context takes constant memory. When there are
    `max_entries` contexts, the contexts that were not seen again since half of them were added are dropped.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._new: dict[int, int] = {}  # candidate << 16 | votes << 8 | occurrences
        self._old: dict[int, int] = {}

    @property
    def num_entries(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, token_ids: Sequence[int], first: int) -> None:
        """Add all tokens starting at position `first`, each in the context of the preceding tokens."""
        for position in range(max(first, 1), min(len(token_ids), first + MAX_COMPLETION_TOKENS)):
            token_id = token_ids[position]
            for order in ORDERS:
                if order <= position:
                    self._count(hash(tuple(token_ids[position - order : position])), token_id)
        if len(self._new) > self._max_entries // 2:
            self._new, self._old = {}, self._new

    def _count(self, key: int, token_id: int) -> None:
        entry = self._new.get(key)
        if entry is None:
            entry = self._old.pop(key, token_id << 16)
        candidate, votes, count = entry >> 16, entry >> 8 & 255, entry & 255
        if count == MAX_COUNT:
            votes, count = votes // 2, count // 2
        if candidate == token_id:
            votes += 1
        elif votes:
            votes -= 1
        else:
            candidate, votes = token_id, 1
        self._new[key] = candidate << 16 | votes << 8 | count + 1

    def guess(self, context: Sequence[int]) -> Guess | None:
        """Return the most frequent token after the longest known context, or None if no context is known."""
        if not self._new and not self._old:  # the common case of an adapter without completions
            return None
        for number, order in enumerate(ORDERS):
            if order > len(context):
                continue
            key = hash(tuple(context[-order:]))
            entry = self._new.get(key) or self._old.get(key)
            if entry:
                votes, count = entry >> 8 & 255, entry & 255
                certainty = 3 * (2 * votes > count) + (count > 1) + (count > 3)
                return Guess(entry >> 16, KINDS + 8 * number + certainty)
        return None


class AdapterHistory(NamedTuple):
    """A tenant's completions with an adapter, and the accuracy of guesses from them."""

    completions: CompletionIndex
    accuracy: Accuracy


class Histories:
    """The adapter histories of all tenants. No value depends on another tenant's tokens."""

    def __init__(self, tenant_bytes: int = TENANT_BYTES, max_tenants: int = MAX_TENANTS) -> None:
        self._max_entries = tenant_bytes // ENTRY_BYTES
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, OrderedDict[Scope, AdapterHistory]] = OrderedDict()

    def find(self, tenant: str, scope: Scope) -> AdapterHistory:
        """Return the stored history, or a new history."""
        histories = self._tenants.get(tenant, OrderedDict())
        return histories.get(scope) or AdapterHistory(CompletionIndex(self._max_entries), Accuracy())

    def keep(self, tenant: str, scope: Scope, history: AdapterHistory) -> None:
        """Store a history and mark it as the most recently used. Drop the least recently used histories that exceed the
        limits.
        """
        histories = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        histories[scope] = history
        histories.move_to_end(scope)
        num_entries = sum(each.completions.num_entries for each in histories.values())
        while len(histories) > 1 and (num_entries > self._max_entries or len(histories) > MAX_HISTORIES):
            _, dropped = histories.popitem(last=False)
            num_entries -= dropped.completions.num_entries
