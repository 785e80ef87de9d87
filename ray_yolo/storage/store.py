"""Objects by key below an address: s3://bucket/path, gs://bucket/path, az://container/path, file:///folder.

All have one contract, weaker than a file system's. An object appears atomically and is never appended to. A write can
be conditional on the version that was read. Keys have parts between slashes; `list` returns one level, `walk` all.
Storage failures are OSErrors.

`obstore` reads credentials from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, AZURE_STORAGE_ACCOUNT_NAME,
GOOGLE_APPLICATION_CREDENTIALS, the role of a machine, ...).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from ray_yolo.core.errors import InputError
from ray_yolo.core.files import HashingWriter, replacing
from ray_yolo.core.redact import redact

READ_TIMEOUT = timedelta(seconds=30)  # the server may send no byte for this long; a request uploads at most 5 MB
RETRY_TIMEOUT = timedelta(seconds=60)  # A failed request is tried again for so long.
_UNLIMITED = timedelta(days=7)  # otherwise obstore ends every request after 30 s, even one that progresses
_CHUNK = 1 << 17  # bytes; an incomplete chunk is lost with its connection
_UPLOADS = 4  # concurrent parts of an object; on a slow line more only compete
_FOLDER = "file://"
_DIGESTS = "sha256", "md5"
_CREDENTIALS = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
                "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"}
# obstore asks a cloud machine for those of its role if the environment has none; Azure needs at least the account
_NO_CREDENTIALS = "http://169.254.169.254", "http://metadata", "Account must be specified"
_ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"

_REQUESTS = 32  # So many run at the same time.

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class Entry(NamedTuple):
    """A listed object, or a level below, whose name ends with a slash."""

    name: str  # the last part of the key; in `walk` the whole key
    modified: float  # Unix seconds by the store's clock; 0 for a level
    size: int = 0  # bytes
    tag: str = ""  # differs with the content; for most objects of S3 and Google their MD5


class StoredObject(NamedTuple):
    """An object, and its version for `put_if`."""

    data: bytes
    version: Any
    modified: float


class Fetched(NamedTuple):
    """A downloaded object; the digests are those of the received bytes."""

    size: int  # bytes
    tag: str  # the same as in `Entry`
    sha256: str
    md5: str


class Store(Protocol):
    """Objects below an address."""

    def get(self, key: str) -> StoredObject:
        """An object; FileNotFoundError if there is none."""

    def fetch(self, key: str, path: Path) -> Fetched:
        """Download an object to a file without holding it in memory; OSError if it is incomplete."""

    def put(self, key: str, data: bytes | Path) -> None:
        """Create or replace an object with bytes, or with a file's."""

    def put_if(self, key: str, data: bytes, version: Any = None) -> Any:
        """Write if the object still is `version` (None: does not exist). Returns the new version, None if it is not."""

    def walk(self, prefix: str = "") -> list[Entry]:
        """All objects below a prefix, sorted by key; keys with a part that begins with a dot are left out."""

    def list(self, prefix: str = "") -> list[Entry]:
        """One level below a prefix ('' or ending with a slash), sorted by name; leading dots are left out."""

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""


def in_parallel(call: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """The results of a call for each item, in order. At most `_REQUESTS` calls run at the same time.

    A request to a bucket takes about 0.1 s, nearly all of it waiting, so many requests must not follow each other.
    The first error of a call is raised, after the calls that run have ended.
    """
    with ThreadPoolExecutor(_REQUESTS) as threads:
        futures = [threads.submit(call, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            threads.shutdown(cancel_futures=True)


def is_address(path: str) -> bool:
    """Whether a path is an address in a store instead of a file or folder."""
    return "://" in path


def open_store(address: str, setting: str = "storage_path") -> Store:
    """The store at an address, which messages call `setting`; no request is made yet.

    Raises:
        InputError: if the address is invalid, or `obstore` is not installed.
    """
    scheme = address.partition("://")[0]
    if scheme == "file":
        return FolderStore(Path(address.removeprefix(_FOLDER)), setting)
    if scheme not in ("s3", "gs", "az"):
        raise InputError(f"{setting}: {redact(address)}: give a folder, or an address with s3://, gs://, az:// or "
                         "file://")
    try:
        return ObjectStore(address)
    except ImportError:
        raise InputError(f"{setting}: {redact(address)} needs pip install 'ray_yolo[s3]' on every node") from None
    except Exception as error:  # obstore's own or ValueError: invalid addresses and settings
        raise InputError(f"{setting}: {redact(address)}: {_reason(error, address)}") from None


class FolderStore:
    """Objects as files of a folder. Versions are digests; conditions hold among processes that share its locks."""

    def __init__(self, folder: Path, setting: str = "storage_path") -> None:
        if not folder.is_absolute():
            raise InputError(f"{setting}: {_FOLDER}{folder} is not absolute; write {_FOLDER}/folder")
        self._folder = folder

    def get(self, key: str) -> StoredObject:
        path = self._folder / key
        data = path.read_bytes()
        return StoredObject(data, hashlib.sha256(data).hexdigest(), path.stat().st_mtime)

    def fetch(self, key: str, path: Path) -> Fetched:
        with (self._folder / key).open("rb") as source, path.open("wb") as file:
            writer = HashingWriter(file, *_DIGESTS)
            shutil.copyfileobj(source, writer, 1 << 20)
        return _fetched(writer, _file_entry(key, self._folder / key))  # now: a changed file has another tag

    def put(self, key: str, data: bytes | Path) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            if isinstance(data, Path):
                shutil.copyfile(data, temporary)
            else:
                temporary.write_bytes(data)

    def put_if(self, key: str, data: bytes, version: Any = None) -> Any:
        with self._locked():
            try:
                current = self.get(key).version
            except FileNotFoundError:
                current = None
            if current != version:
                return None
            self.put(key, data)
        return hashlib.sha256(data).hexdigest()

    def walk(self, prefix: str = "") -> list[Entry]:
        return sorted(self._walk(prefix, ()))

    def _walk(self, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
        """`walk`, below folders with the ids `above`. A link to one of them is left out: it would never end."""
        try:
            status = (self._folder / prefix).stat()
        except FileNotFoundError:  # removed since it was listed
            return
        own_id = status.st_dev, status.st_ino
        if own_id in above:
            return
        for entry in self.list(prefix):
            if entry.name.endswith("/"):
                yield from self._walk(f"{prefix}{entry.name}", (*above, own_id))
            else:
                yield entry._replace(name=f"{prefix}{entry.name}")

    def list(self, prefix: str = "") -> list[Entry]:
        try:
            with os.scandir(self._folder / prefix) as entries:
                visible = [entry for entry in entries if entry.name[0] != "."]
        except (FileNotFoundError, NotADirectoryError):
            return []
        listed = []
        for entry in visible:
            try:
                listed.append(Entry(f"{entry.name}/", 0.0) if entry.is_dir() else _file_entry(entry.name, entry))
            except FileNotFoundError:  # removed since, or a link to nothing
                continue
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link to itself
                    raise
        return sorted(listed)

    def delete(self, key: str) -> None:
        (self._folder / key).unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Excludes other conditional writes between reading a version and replacing it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".conditions").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _file_entry(name: str, file: Path | os.DirEntry[str]) -> Entry:
    status = file.stat()
    return Entry(name, status.st_mtime, status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}")


def _reason(error: Exception, address: str) -> str:
    """An error of obstore on one line, without secrets, with the environment variables that are missing or refused."""
    first_line = str(error).splitlines()[0]
    text = redact(first_line.partition(": <")[0])  # the rest is a server's XML
    credentials = _CREDENTIALS[address.partition("://")[0]]
    if any(part in text for part in _NO_CREDENTIALS):
        return (f"there are no credentials for {redact(address)}; set {credentials}, or give this machine a role that "
                "may use the bucket")
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"{text}; check {credentials}, and what they permit at {redact(address)}"
    return text


def _as_os_errors(method: Callable[Concatenate[ObjectStore, P], T]) -> Callable[Concatenate[ObjectStore, P], T]:
    """Turn obstore's errors into OSErrors on one line without secrets."""
    @wraps(method)
    def call(store: ObjectStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        from obstore.exceptions import BaseError

        try:
            return method(store, *args, **kwargs)
        except (BaseError, FileNotFoundError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(_reason(error, store.address)) from None

    return call


class ObjectStore:
    """Objects of S3, Google or Azure storage, or of a compatible server."""

    def __init__(self, address: str) -> None:
        from obstore.store import from_url

        self.address = address
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
        self._store = from_url(
            address, client_options={"timeout": _UNLIMITED, "read_timeout": READ_TIMEOUT,
                                     "allow_http": endpoint.startswith("http://")},
            retry_config={"retry_timeout": RETRY_TIMEOUT})

    @_as_os_errors
    def get(self, key: str) -> StoredObject:
        content = io.BytesIO()
        meta = self._download(key, HashingWriter(content))
        return StoredObject(content.getvalue(), _version(meta), meta["last_modified"].timestamp())

    @_as_os_errors
    def fetch(self, key: str, path: Path) -> Fetched:
        with path.open("wb") as file:
            writer = HashingWriter(file, *_DIGESTS)
            return _fetched(writer, _object_entry(self._download(key, writer)))

    def _download(self, key: str, file: HashingWriter) -> Any:
        """Write an object to a file. Returns its metadata.

        A broken download resumes where it stopped, as long as each connection delivers data: only the time without
        progress is limited.
        """
        from obstore.exceptions import GenericError

        response = self._store.get(key)
        meta, start = response.meta, 0
        while True:
            with suppress(GenericError):
                for chunk in response.stream(min_chunk_size=_CHUNK):
                    file.write(chunk)
            if file.size == meta["size"]:
                return meta
            if file.size == start:
                raise OSError(f"{key}: the download stopped after {start} of {meta['size']} bytes; check the "
                              "network and the storage, and start again")
            start = file.size
            response = self._store.get(key, options={"range": {"offset": start}, "if_match": meta["e_tag"]})

    @_as_os_errors
    def put(self, key: str, data: bytes | Path) -> None:
        self._store.put(key, data, max_concurrency=_UPLOADS)

    @_as_os_errors
    def put_if(self, key: str, data: bytes, version: Any = None) -> Any:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            return _version(self._store.put(key, data, mode="create" if version is None else version))
        except (AlreadyExistsError, PreconditionError):
            return None
        except FileNotFoundError:
            if version is None:  # a new object needs nothing but its bucket
                raise FileNotFoundError(f"{redact(self.address)}: there is no such bucket") from None
            return None

    @_as_os_errors
    def walk(self, prefix: str = "") -> list[Entry]:
        entries = (_object_entry(meta) for page in self._store.list(prefix or None, chunk_size=1000) for meta in page)
        return sorted(entry for entry in entries if not f"/{entry.name}".count("/."))

    @_as_os_errors
    def list(self, prefix: str = "") -> list[Entry]:
        level = self._store.list_with_delimiter(prefix or None)
        entries = [Entry(f"{key.rpartition('/')[2]}/", 0.0) for key in level["common_prefixes"]]
        entries += [_object_entry(meta)._replace(name=meta["path"].rpartition("/")[2]) for meta in level["objects"]]
        return sorted(entry for entry in entries if entry.name[0] != ".")

    @_as_os_errors
    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self._store.delete(key)


def _fetched(writer: HashingWriter, entry: Entry) -> Fetched:
    return Fetched(writer.size, entry.tag, *map(writer.hexdigest, _DIGESTS))


def _object_entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["last_modified"].timestamp(), meta["size"], (meta["e_tag"] or "").strip('"'))


def _version(meta: Any) -> dict[str, str]:
    """The metadata that identify a version for a conditional write."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
