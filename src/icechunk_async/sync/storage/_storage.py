"""Where a repository is: one constructor for each kind of store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from icechunk_async.sync._display import public
from icechunk_async.sync._settings import S3Options
from icechunk_async.sync.errors import InvalidInputError, StorageError
from icechunk_async.sync.storage._memory import MemoryObjects
from icechunk_async.sync.storage._options import (
    azure_options,
    check_web_url,
    gcs_options,
    one_set_of_headers,
    s3_options,
    s3_rows,
    web_options,
)
from icechunk_async.sync.storage._place import Place

if TYPE_CHECKING:
    from icechunk_async.sync.credentials import (
        AnyAzureCredential,
        AnyGcsCredential,
        AnyS3Credential,
    )

    type Headers = dict[str, str] | None

__all__ = ["Storage"]


@public("")
class Storage(Place):
    """Where a repository is. Made by the functions of this module, or by :meth:`from_url`.

    It is a description: nothing is opened or sent before a repository is. It pickles with its
    credentials; no repr shows them.
    """

    @classmethod
    def new_in_memory(cls) -> Self:
        """Describe objects in the memory of this process; see ``in_memory_storage``."""
        return cls(MemoryObjects(), rows={"type": "in-memory"})

    @classmethod
    def new_local_filesystem(cls, path: str) -> Self:
        """Describe a directory; see ``local_filesystem_storage``."""
        place = Path(path)
        rows = {"type": "local filesystem", "path": str(place)}
        return cls(place.absolute().as_uri(), rows=rows)

    @classmethod
    def new_s3(
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001 - as theirs
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in S3; see ``s3_storage``."""
        _check_layout(legacy_rooted_keys)
        options = s3_options(config, one_set_of_headers(headers, read_headers, write_headers))
        url, rows = _s3_place(bucket, prefix, config)
        return cls(url, options, credentials=credentials, rows=rows)

    @classmethod
    def new_s3_object_store(
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        credentials: AnyS3Credential | None = None,
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in S3; the same as :meth:`new_s3`, since there is one client here."""
        options = s3_options(config, one_set_of_headers(headers, read_headers, write_headers))
        url, rows = _s3_place(bucket, prefix, config)
        return cls(url, options, credentials=credentials, rows={**rows, "type": "S3"})

    @classmethod
    def new_tigris(  # noqa: PLR0917 - as theirs
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        use_weak_consistency: bool,  # noqa: FBT001 - as theirs
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001 - as theirs
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in Tigris; see ``tigris_storage``."""
        if config.region is None and not use_weak_consistency:
            raise StorageError(
                "Tigris storage needs a region for full consistency. Pass region=, or "
                "use_weak_consistency=True to read what may be old.",
                "storage-config",
            )
        _check_layout(legacy_rooted_keys)
        config = _with(config, endpoint_url=config.endpoint_url or "https://t3.storage.dev")
        options = s3_options(config, one_set_of_headers(headers, read_headers, write_headers))
        if use_weak_consistency:
            options |= {"read_only": True, "region": config.region or "auto"}
        else:
            # Without it a read may be answered from a copy that has not heard of the last write.
            asked = {"x-tigris-consistent": "true"}
            options["extra_headers"] = {**asked, **options.get("extra_headers", {})}
        url, rows = _s3_place(bucket, prefix, config)
        return cls(url, options, credentials=credentials, rows=rows)

    @classmethod
    def new_r2(  # noqa: PLR0917 - as theirs
        cls,
        config: S3Options,
        bucket: str | None = None,
        prefix: str | None = None,
        account_id: str | None = None,
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001 - as theirs
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in Cloudflare's R2; see ``r2_storage``."""
        if config.endpoint_url is None and account_id is None:
            raise StorageError("r2_storage needs endpoint_url or account_id.", "storage-config")
        if bucket is None:
            if prefix is None:
                raise StorageError("r2_storage needs bucket or prefix.", "storage-config")
            bucket, _, rest = prefix.partition("/")
            prefix = rest or None
        endpoint = config.endpoint_url or f"https://{account_id}.r2.cloudflarestorage.com"
        config = _with(
            config,
            endpoint_url=endpoint,
            region=config.region or "auto",
            force_path_style=True,
        )
        return cls.new_s3(
            config,
            bucket,
            prefix,
            credentials,
            legacy_rooted_keys,
            read_headers=read_headers,
            write_headers=write_headers,
            headers=headers,
        )

    @classmethod
    def new_hf(  # noqa: PLR0917 - as theirs
        cls,
        config: S3Options,
        bucket: str,
        prefix: str | None,
        namespace: str,
        credentials: AnyS3Credential | None = None,
        legacy_rooted_keys: bool | None = None,  # noqa: FBT001 - as theirs
        *,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in a Hugging Face storage bucket; see ``hf_storage``."""
        endpoint = config.endpoint_url or f"https://s3.hf.co/{namespace}"
        config = _with(
            config,
            endpoint_url=endpoint,
            region=config.region or "us-east-1",
            force_path_style=True,
        )
        return cls.new_s3(
            config,
            bucket,
            prefix,
            credentials,
            legacy_rooted_keys,
            read_headers=read_headers,
            write_headers=write_headers,
            headers=headers,
        )

    @classmethod
    def new_gcs(
        cls,
        bucket: str,
        prefix: str | None,
        credentials: AnyGcsCredential | None = None,
        *,
        config: dict[str, str] | None = None,
        read_headers: Headers = None,
        write_headers: Headers = None,
        headers: Headers = None,
    ) -> Self:
        """Describe a place in Google Cloud Storage; see ``gcs_storage``."""
        if read_headers or write_headers or headers:
            raise InvalidInputError(
                "gcs_storage(headers=...) is not possible: this library sends no headers of the "
                "caller's to Google Cloud Storage. Leave them out.",
                "invalid-credentials",
            )
        rows = {"type": "GCS", "bucket": bucket, "prefix": prefix}
        url = f"gs://{bucket}/{prefix or ''}"
        return cls(url, gcs_options(config or {}), credentials=credentials, rows=rows)

    @classmethod
    def new_azure_blob(
        cls,
        account: str,
        container: str,
        prefix: str,
        credentials: AnyAzureCredential | None = None,
        *,
        config: dict[str, str] | None = None,
    ) -> Self:
        """Describe a place in Azure Blob Storage; see ``azure_storage``."""
        rows = {"type": "Azure", "account": account, "container": container, "prefix": prefix}
        options = {"account_name": account, **azure_options(config or {})}
        url = f"az://{container}/{quote(prefix)}"
        return cls(url, options, credentials=credentials, rows=rows)

    @classmethod
    def new_http(
        cls, base_url: str, config: dict[str, str] | None = None, headers: Headers = None
    ) -> Self:
        """Describe a place on a web server; see ``http_storage``."""
        check_web_url(base_url)
        options = web_options(base_url, config or {}, headers)
        return cls(base_url, options, rows={"type": "HTTP", "url": base_url})

    @classmethod
    def new_redirect(cls, base_url: str) -> Self:
        """Describe the place that a web server points to; see ``redirect_storage``."""
        check_web_url(base_url)
        return cls(base_url, rows={"type": "redirect", "url": base_url}, redirects=True)


def _check_layout(legacy_rooted_keys: bool | None) -> None:  # noqa: FBT001 - as theirs
    if legacy_rooted_keys:
        raise InvalidInputError(
            "legacy_rooted_keys=True is not possible: this library reads no repository whose keys "
            "begin with a slash. Copy it to a prefix with the official package first.",
            "bad-prefix",
        )


def _with(config: S3Options, **changes: Any) -> S3Options:
    return S3Options(**{**vars(config), **changes})


def _s3_place(bucket: str, prefix: str | None, config: S3Options) -> tuple[str, dict[str, object]]:
    rows = {"type": "S3 (native)", "bucket": bucket, "prefix": prefix, **s3_rows(config)}
    return f"s3://{bucket}/{prefix or ''}", rows
