"""How a repository was opened, as plain data: what travels, so that others can open it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from icechunk_async.credentials._refresh import Credential
from icechunk_async.repository.opened import Request

if TYPE_CHECKING:
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.repository.packing import Packing
    from icechunk_async.repository.virtual import VirtualAccess
    from icechunk_async.storage import Storage

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a repository is and what it was opened with; it pickles with its secrets."""

    url: str
    storage_options: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)
    config: RepositoryConfig | None = None
    authorized: Mapping[str, Credential | Mapping[str, object] | None] = field(
        default_factory=dict[str, "Credential | Mapping[str, object] | None"], repr=False
    )
    """Containers of virtual chunks that may be read; those opened by the caller are left out."""
    packing: Packing | None = None

    @classmethod
    def of(cls, request: Request, storage: Storage) -> Self:
        """Answer how to open again what was opened from ``request``."""
        description = storage.description
        plain = {
            prefix: access
            for prefix, access in request.authorized.items()
            if access is None or isinstance(access, Mapping | Credential)
        }
        return cls(
            description.url, dict(description.options), request.config, plain, request.packing
        )

    def request(
        self, storage: Storage | None, authorized: Mapping[str, VirtualAccess] | None
    ) -> Request:
        """Answer the request that opens it: from an open storage, if one is given."""
        access = self.authorized if authorized is None else authorized
        if storage is not None:
            return Request(storage, {}, self.config, access, packing=self.packing)
        return Request(self.url, self.storage_options, self.config, access, packing=self.packing)
