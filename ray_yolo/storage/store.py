"""Objects by key below an address: s3://bucket/path, gs://bucket/path, az://container/path, file:///folder.

One contract for all of them, which is less than that of a file system: an object is there whole or not at all, is never
appended to, and can be replaced on condition that it still is the version that was read. Keys have parts between
slashes; `list` shows one level, `walk` all. What goes wrong with storage is an OSError.

Credentials are those of the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, AZURE_STORAGE_ACCOUNT_NAME,
GOOGLE_APPLICATION_CREDENTIALS, the role of a machine, ...), as `obstore` reads them.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from ray_yolo.core.errors import InputError
from ray_yolo.core.files import HashingWriter, replacing
from ray_yolo.core.redact import redact

READ_TIMEOUT = timedelta(seconds=30)  # without a byte from the server; a request uploads 5 MB at most
RETRY_TIMEOUT = timedelta(seconds=60)  # for which a request that fails is repeated
_UNLIMITED = timedelta(days=7)  # obstore would end every request after 30 s otherwise, however much it brings
_CHUNK = 1 << 17  # bytes; what has come of one is lost with a connection
_UPLOADS = 4  # parts of an object at once: on a slow line more would only slow each other down
_FOLDER = "file://"
_DIGESTS = "sha256", "md5"
_ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"

P = ParamSpec("P")
T = TypeVar("T")


class Entry(NamedTuple):
    """What a listing tells of an object, or of a level below, whose name ends with a slash."""

    name: str  # the key's last part; of `walk` the key
    modified: float  # Unix seconds by the store's clock; 0 of a level
    size: int = 0  # bytes
    tag: str = ""  # another one for other content; of most objects of S3 and Google the MD5 of their bytes


class StoredObject(NamedTuple):
    """An object, and what `put_if` knows this version of it by."""

    data: bytes
    version: Any
    modified: float


class Fetched(NamedTuple):
    """What an object that was put into a file is known by; the digests are those of the bytes that came."""

    size: int  # bytes
    tag: str  # as in `Entry`
    sha256: str
    md5: str


class Store(Protocol):
    """Objects below an address."""

    def get(self, key: str) -> StoredObject:
        """An object; FileNotFoundError if there is none."""

    def fetch(self, key: str, path: Path) -> Fetched:
        """Put an object into a file, without holding it in memory; OSError if not all of it comes."""

    def put(self, key: str, data: bytes | Path) -> None:
        """Make or replace an object by bytes, or by a file's."""

    def put_if(self, key: str, data: bytes, version: Any = None) -> Any:
        """The same if it still is that version; None: if there is none. Returns the new version, None if it was not."""

    def walk(self, prefix: str = "") -> list[Entry]:
        """All objects below a prefix by their keys, without those of which a part begins with a dot."""

    def list(self, prefix: str = "") -> list[Entry]:
        """What there is one level below a prefix, sorted by name; a prefix is '' or ends with a slash. Names that begin
        with a dot are left out.
        """

    def delete(self, key: str) -> None:
        """Remove an object, which need not be there."""


def is_address(path: str) -> bool:
    """Whether a path is an address of objects, not a file's or folder's."""
    return "://" in path


def open_store(address: str, setting: str = "storage_path") -> Store:
    """The store at an address; nothing is asked of it yet.

    Args:
        setting: what the address was given by, for messages.

    Raises:
        InputError: if it is none, or what reads it is not installed.
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
    except Exception as error:  # of obstore's or ValueError: what it says of addresses and settings
        raise InputError(f"{setting}: {redact(f'{address}: {error}').splitlines()[0]}") from None


class FolderStore:
    """Objects as files of a folder. Versions are digests; conditions hold among users of one file system's locks."""

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
        return _fetched(writer, _file_entry(key, self._folder / key))  # as it is now: one that changes has another tag

    def put(self, key: str, data: bytes | Path) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            if isinstance(data, Path):
                shutil.copyfile(data, temporary)
            else:
                temporary.write_bytes(data)

    def put_if(self, key: str, data: bytes, version: Any = None) -> Any:
        with self._alone():
            try:
                known = self.get(key).version
            except FileNotFoundError:
                known = None
            if known != version:
                return None
            self.put(key, data)
        return hashlib.sha256(data).hexdigest()

    def walk(self, prefix: str = "") -> list[Entry]:
        found = []
        for here, folders, names in os.walk(self._folder / prefix, followlinks=True):
            folders[:] = [name for name in folders if name[0] != "."]
            found += [_file_entry(Path(here, name).relative_to(self._folder).as_posix(), Path(here, name))
                      for name in names if name[0] != "."]
        return sorted(found)

    def list(self, prefix: str = "") -> list[Entry]:
        try:
            with os.scandir(self._folder / prefix) as found:
                return sorted(Entry(f"{each.name}/", 0.0) if each.is_dir() else
                              _file_entry(each.name, each) for each in found if each.name[0] != ".")
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, key: str) -> None:
        (self._folder / key).unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Between a version that is read and the one that replaces it nobody comes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".conditions").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _file_entry(name: str, file: Path | os.DirEntry[str]) -> Entry:
    found = file.stat()
    return Entry(name, found.st_mtime, found.st_size, f"{found.st_mtime_ns:x}-{found.st_size:x}")


def _as_os_errors(method: Callable[P, T]) -> Callable[P, T]:
    """What obstore raises, as an OSError without secrets and on one line."""
    @wraps(method)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        from obstore.exceptions import BaseError

        try:
            return method(*args, **kwargs)
        except (BaseError, FileNotFoundError) as error:
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(redact(str(error).splitlines()[0].partition(": <")[0])) from None  # the rest is a server's XML

    return asked


class ObjectStore:
    """Objects of S3, Google's or Azure's storage, or of what speaks as they do."""

    def __init__(self, address: str) -> None:
        from obstore.store import from_url

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
        """Write an object into a file. Returns its metadata.

        A connection that breaks is resumed where it broke, as long as the one before it brought anything: what limits
        a download is the time without progress, not its length.
        """
        from obstore.exceptions import GenericError

        found = self._store.get(key)
        meta, begin = found.meta, 0
        while True:
            with suppress(GenericError):
                for chunk in found.stream(min_chunk_size=_CHUNK):
                    file.write(chunk)
            if file.size == meta["size"]:
                return meta
            if file.size == begin:
                raise OSError(f"{key}: the download stopped after {begin} of {meta['size']} bytes; see that the "
                              "network and the storage work, and start again")
            begin = file.size
            found = self._store.get(key, options={"range": {"offset": begin}, "if_match": meta["e_tag"]})

    @_as_os_errors
    def put(self, key: str, data: bytes | Path) -> None:
        self._store.put(key, data, max_concurrency=_UPLOADS)

    @_as_os_errors
    def put_if(self, key: str, data: bytes, version: Any = None) -> Any:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            return _version(self._store.put(key, data, mode="create" if version is None else version))
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return None

    @_as_os_errors
    def walk(self, prefix: str = "") -> list[Entry]:
        found = (_object_entry(each) for part in self._store.list(prefix or None, chunk_size=1000) for each in part)
        return sorted(entry for entry in found if not f"/{entry.name}".count("/."))

    @_as_os_errors
    def list(self, prefix: str = "") -> list[Entry]:
        found = self._store.list_with_delimiter(prefix or None)
        entries = [Entry(f"{key.rpartition('/')[2]}/", 0.0) for key in found["common_prefixes"]]
        entries += [_object_entry(each)._replace(name=each["path"].rpartition("/")[2]) for each in found["objects"]]
        return sorted(entry for entry in entries if entry.name[0] != ".")

    @_as_os_errors
    def delete(self, key: str) -> None:
        try:
            self._store.delete(key)
        except FileNotFoundError:
            return


def _fetched(writer: HashingWriter, entry: Entry) -> Fetched:
    return Fetched(writer.size, entry.tag, *map(writer.hexdigest, _DIGESTS))


def _object_entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["last_modified"].timestamp(), meta["size"], (meta["e_tag"] or "").strip('"'))


def _version(meta: Any) -> dict[str, str]:
    """What an object's metadata say that a condition can be made of."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
