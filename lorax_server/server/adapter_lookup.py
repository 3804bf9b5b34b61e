"""Resolves adapter names to identities for a request. Checks permissions and quotas, and handles source tokens."""

import logging
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
from lorax_server.server.access.keys import HUB_SOURCE, Key
from lorax_server.server.access.model_names import (
    AdapterKey,
    ModelSelection,
    make_unknown_model_error,
    with_suggestions,
)
from lorax_server.server.adapter_name_index import MERGE_SOURCE
from lorax_server.server.http.error_responses import OPENAI_PREFIX
from lorax_server.server.service import Service
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import AdapterRef, ResolvedAdapter

LOCAL_SOURCE = "local"  # needs no fetch
FETCHED_TIER = "fetched"  # the adapter was fetched by this request
TRANSIENT_ERRORS = (SourceError, OverloadedError, EngineError)  # a retry may succeed
MAX_LABEL_CHARACTERS = 256  # labels of merged adapters are truncated to this length


class ResolvedModel(NamedTuple):
    """A resolved adapter and its tokenizer. The base model has an empty identity."""

    adapter: ResolvedAdapter
    tokenizer: TextTokenizer


logger = logging.getLogger(__name__)


class AdapterLookup:
    """Resolves adapters for one caller, with the caller's API key and bearer token."""

    def __init__(self, service: Service, key: Key, bearer: str | None, path: str, request_id: str) -> None:
        self._service = service
        self._key = key
        self._bearer = bearer
        self._path = path
        self._request_id = request_id  # selects one version of a weighted split
        self.name: str | None = None  # the name that the request uses; None for merges and names with a source
        self.adapter_keys: set[AdapterKey] = set()  # adapters that the request may use until it finishes
        self.version: int | None = None  # the version that was selected, for adapters with uploaded versions
        self.warnings: list[str] = []  # about adapters that are served, but may be for another base model

    async def resolve(self, selection: ModelSelection) -> ResolvedAdapter:
        """Return the selected adapter, or a merge that is added to the index. Raise if the caller may not use it."""
        is_named = selection.merge is None and selection.requested_source is None
        self.name = selection.label if is_named else None
        if not selection.refs:
            self._key.check_may_use_base()
            return ResolvedAdapter("")
        for ref, allowed in zip(selection.refs, selection.access_keys, strict=True):
            await self.check_may_use(allowed, ref.source == HUB_SOURCE, selection.requested_source)
        refs, adapters = [], []
        for named_ref, allowed in zip(selection.refs, selection.access_keys, strict=True):
            is_listed = selection.requested_source is None
            ref = self._select_version(named_ref, allowed.name) if is_listed else named_ref
            self.adapter_keys.add(AdapterKey(ref.source, ref.name))
            try:
                authorized_ref, adapter = await self._resolve_one(ref)
            except AdapterNotFoundError as error:
                if is_listed and ref.source == LOCAL_SOURCE:
                    self._service.versions.check_has_version(allowed.name)
                is_folder = ref.source == LOCAL_SOURCE and self._path.startswith(OPENAI_PREFIX)
                # OpenAI routes do not reveal folder paths.
                unknown = make_unknown_model_error(allowed.name) if is_folder else error
                raise await self.add_suggestions(unknown, allowed.name, selection.requested_source) from None
            refs.append(authorized_ref)
            adapters.append(adapter)
        if selection.merge is None:
            return adapters[0]
        merged = await self._service.engine.resolve(refs, selection.merge)
        self._service.adapter_index.add(
            merged.identity, AdapterKey(MERGE_SOURCE, selection.label[:MAX_LABEL_CHARACTERS])
        )
        # Not `merged.tier`, because the merge finds all adapters in memory.
        is_fetched = any(adapter.tier == FETCHED_TIER for adapter in adapters)
        return merged._replace(tier=FETCHED_TIER) if is_fetched else merged

    def _select_version(self, ref: AdapterRef, name: str) -> AdapterRef:
        selected = self._service.versions.select(name, self._request_id)
        if selected is None:
            return ref
        self.version, key = selected
        return ref._replace(source=key.source, name=key.name)

    async def check_may_use(self, name: AdapterKey, has_revisions: bool, source: str | None) -> None:
        """Raise if the key may not use the adapter. The message does not reveal whether the adapter exists."""
        names = self._service.model_names
        try:
            self._key.check_may_use(name.source, names.strip_version(name.name), names.default_source, has_revisions)
        except ForbiddenError as error:
            raise await self.add_suggestions(error, name.name, source) from None

    async def add_suggestions(self, error: LoraxError, name: str, source: str | None) -> LoraxError:
        """Return the error with similar adapter names appended to its message."""
        return await with_suggestions(error, name, source, self._service.model_names, self._key)

    async def _resolve_one(self, ref: AdapterRef) -> tuple[AdapterRef, ResolvedAdapter]:
        """Resolve an adapter. Return the result and the ref that was used, which may include the caller's token.

        New names are charged to the caller's quota unless a transient error occurs.
        """
        service, name = self._service, AdapterKey(ref.source, ref.name)
        with service.adapter_quota.open_charge(self._key, name) as quota:
            if ref.source != LOCAL_SOURCE and not service.adapter_index.latest_identity(name):
                quota.charge()
            try:
                ref, adapter = await self._query_source(ref)
            except TRANSIENT_ERRORS:
                quota.refund()
                raise
            except AdapterNotFoundError:
                await service.forget_unloaded(name)
                raise
            except AdapterError as error:
                service.record_failure(ref, error)
                raise
            if adapter.tier == FETCHED_TIER:
                quota.charge_after_fetch()
        service.adapter_index.add(adapter.identity, name, ref.token is not None)
        if adapter.stale is not None:
            service.adapter_index.set_error(name, adapter.stale.message)
        self._check_base_model(name, adapter.base_model_name)
        return ref, adapter

    def _check_base_model(self, name: AdapterKey, base_model_name: str | None) -> None:
        """Record a warning if an adapter was trained on a base model with another name. The warning is logged once per
        adapter.
        """
        names, warning = self._service.model_names, None
        if base_model_name is not None and not names.is_base_alias(base_model_name):
            warning = (
                f"adapter {name.name!r} was trained on {base_model_name!r}; this server's base model is "
                f"{names.primary_name!r}; if both are the same model, add the first name with --served-model-name"
            )
            self.warnings.append(warning)
        if self._service.adapter_index.set_warning(name, warning) and warning is not None:
            logger.warning(warning)

    async def _query_source(self, ref: AdapterRef) -> tuple[AdapterRef, ResolvedAdapter]:
        """Resolve an adapter without the caller's bearer token, and retry with it only if the source requires a token.

        The hub returns 404 for private repositories that the server's token may not read.
        """
        engine = self._service.engine
        try:
            return ref, await engine.resolve([ref])
        except (AdapterAccessError, AdapterNotFoundError) as error:
            is_hidden = isinstance(error, AdapterNotFoundError)
            if ref.token is not None or self._bearer is None or (is_hidden and ref.source != HUB_SOURCE):
                raise
            ref = ref._replace(token=self._bearer)
            try:
                return ref, await engine.resolve([ref])
            except (AdapterAccessError, AdapterNotFoundError):
                if is_hidden:
                    raise error from None  # raise the first error, because the bearer token may be invalid
                raise
