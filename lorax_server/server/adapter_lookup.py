"""From the name of an adapter to its identity, on behalf of one request: access, quotas and tokens of sources."""

from typing import NamedTuple

from lorax_server.errors import (
    AdapterAccessError,
    AdapterError,
    AdapterNotFoundError,
    EngineError,
    ForbiddenError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.server.access.keys import HUB, Key
from lorax_server.server.access.model_names import Choice, Named, unknown_model, with_nearest
from lorax_server.server.adapter_name_index import MERGES
from lorax_server.server.http.problems import OPENAI_PREFIX
from lorax_server.server.service import Service
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import AdapterRef, Resolved

LOCAL, FETCHED = "local", "fetched"  # the source that fetches nothing; the tier of an adapter fetched just now
TRANSIENT = (SourceError, OverloadedError, EngineError)  # errors after which the same name may be found
MAX_LABEL = 256  # characters of a merge's label that are remembered


class ResolvedModel(NamedTuple):
    """The model that answers: an adapter, or the base model by an empty identity, and its tokenizer."""

    adapter: Resolved
    tokenizer: TextTokenizer


class AdapterLookup:
    """Finds adapters for a caller."""

    def __init__(self, service: Service, key: Key, bearer: str | None, path: str) -> None:
        self._service = service
        self._key = key
        self._bearer = bearer
        self._path = path

    async def resolve(self, choice: Choice) -> Resolved:
        """Resolve the adapter that a request chose, if the caller may use it; the base model has no identity."""
        if not choice.refs:
            self._key.check_may_use_base()
            return Resolved("")
        for ref, allowed in zip(choice.refs, choice.allowed, strict=True):
            await self.check_may_use(allowed, ref.source == HUB, choice.asked_source)
        refs, adapters = [], []
        for ref, allowed in zip(choice.refs, choice.allowed, strict=True):
            try:
                authorized_ref, adapter = await self._resolve_one(ref)
            except AdapterNotFoundError as error:
                is_folder = ref.source == LOCAL and self._path.startswith(OPENAI_PREFIX)
                unknown = unknown_model(allowed.name) if is_folder else error  # OpenAI's clients do not know folders
                raise await self.add_nearest(unknown, allowed.name, choice.asked_source) from None
            refs.append(authorized_ref)
            adapters.append(adapter)
        if choice.merge is None:
            return adapters[0]
        merged = await self._service.engine.resolve(refs, choice.merge)
        self._service.adapter_index.add(merged.identity, Named(MERGES, choice.label[:MAX_LABEL]))
        is_fetched = any(adapter.tier == FETCHED for adapter in adapters)  # by now the engine has them all
        return merged._replace(tier=FETCHED) if is_fetched else merged

    async def check_may_use(self, name: Named, has_revisions: bool, source: str | None) -> None:
        """Refuse an adapter that the key may not use, in the same words whether it exists or not."""
        try:
            self._key.check_may_use(*name, self._service.model_names.default_source, has_revisions)
        except ForbiddenError as error:
            raise await self.add_nearest(error, name.name, source) from None

    async def add_nearest(self, error: LoraxError, name: str, source: str | None) -> LoraxError:
        """Return the error of a name that may be misspelt, with similar names."""
        return await with_nearest(error, name, source, self._service.model_names, self._key)

    async def _resolve_one(self, ref: AdapterRef) -> tuple[AdapterRef, Resolved]:
        """Resolve one name. A new name counts against the caller's quota, unless the failure is transient."""
        service, name = self._service, Named(ref.source, ref.name)
        with service.adapter_quota.share(self._key, name) as quota:
            if ref.source != LOCAL and not service.adapter_index.latest(name):
                quota.charge()
            try:
                ref, adapter = await self._ask_source(ref)
            except TRANSIENT:
                quota.refund()
                raise
            except AdapterNotFoundError:
                await service.forget_unloaded(name)
                raise
            except AdapterError as error:
                service.record_failure(ref, error)
                raise
            if adapter.tier == FETCHED:
                quota.charge_late()
        service.adapter_index.add(adapter.identity, name, ref.token is not None)
        if adapter.stale is not None:
            service.adapter_index.set_error(name, adapter.stale.message)
        return ref, adapter

    async def _ask_source(self, ref: AdapterRef) -> tuple[AdapterRef, Resolved]:
        """Show the caller's bearer only to a source that refuses requests without one.

        A hub that knows the server's own token answers 404 for private repositories which that token may not read.
        """
        engine = self._service.engine
        try:
            return ref, await engine.resolve([ref])
        except (AdapterAccessError, AdapterNotFoundError) as error:
            is_hidden = isinstance(error, AdapterNotFoundError)
            if ref.token is not None or self._bearer is None or (is_hidden and ref.source != HUB):
                raise
            ref = ref._replace(token=self._bearer)
            try:
                return ref, await engine.resolve([ref])
            except (AdapterAccessError, AdapterNotFoundError):
                if is_hidden:
                    raise error from None  # an invalid bearer says nothing about the name
                raise
