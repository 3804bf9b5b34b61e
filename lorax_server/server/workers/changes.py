"""Changes to what all API processes must know alike: the operator's names, and the adapters that were found.

With one API process a change is made at once. With several, the parent puts all changes in one order, and every process
makes them in that order, so that all have the same.
"""

import msgspec

from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.seen_adapters import SeenAdapters


class Change(msgspec.Struct, frozen=True, tag=True):
    """Base of all changes; the name of the class tells them apart."""


class NameAdded(Change, frozen=True):
    """The operator gave a name to an adapter."""

    alias: str
    source: str
    name: str


class NameRemoved(Change, frozen=True):
    alias: str


class FolderRead(Change, frozen=True):
    """The folder that is watched has these adapters."""

    names: list[str]


class AdapterFound(Change, frozen=True):
    """A name means an adapter from now on."""

    identity: str
    name: Named
    needs_token: bool = False  # it was found with a token that a caller sent


class AdapterForgotten(Change, frozen=True):
    identity: str


class NameForgotten(Change, frozen=True):
    """A name no longer has meant an adapter."""

    identity: str
    name: Named


class AdapterPinned(Change, frozen=True):
    """An adapter was pinned by a name."""

    identity: str
    name: Named


class AdapterUnpinned(Change, frozen=True):
    identity: str


class NameFailed(Change, frozen=True):
    """The adapter of a name cannot be served."""

    name: Named
    error: str


Changes = (
    NameAdded
    | NameRemoved
    | FolderRead
    | AdapterFound
    | AdapterForgotten
    | NameForgotten
    | AdapterPinned
    | AdapterUnpinned
    | NameFailed
)


def make_change(change: Changes, names: ModelNames, seen: SeenAdapters) -> None:
    """Make a change, or raise before anything is changed."""
    match change:
        case NameAdded(alias, source, name):
            names.add(alias, source, name)
        case NameRemoved(alias):
            names.remove(alias)
        case FolderRead(folder):
            names.set_folder(folder)
        case AdapterFound(identity, named, needs_token):
            seen.note(identity, named, needs_token)
        case AdapterForgotten(identity):
            seen.forget(identity)
        case NameForgotten(identity, named):
            seen.forget_name(identity, named)
        case AdapterPinned(identity, named):
            seen.pin(identity, named)
        case AdapterUnpinned(identity):
            seen.unpin(identity)
        case NameFailed(named, error):
            seen.set_error(named, error)
