"""The contract of all stores: files of a folder, and objects of S3 over HTTP."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from ray_yolo.core.errors import InputError
from ray_yolo.storage import store as store_module
from ray_yolo.storage.store import Store, open_store

PIECE = os.urandom(1 << 20)


@pytest.fixture(params=["folder", "s3", pytest.param("azure", marks=pytest.mark.azure)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/stored"
    request.getfixturevalue(request.param)
    return f"{'s3' if request.param == 's3' else 'az'}://bucket/{tmp_path.name}"


@pytest.fixture
def store(address: str) -> Store:
    return open_store(address)


def names(store: Store, prefix: str = "") -> list[str]:
    return [entry.name for entry in store.list(prefix)]


def digests(data: bytes) -> tuple[str, str]:
    return hashlib.sha256(data).hexdigest(), hashlib.md5(data).hexdigest()


def test_an_object_is_readable_and_listed_at_once(store: Store) -> None:
    assert names(store) == []
    with pytest.raises(FileNotFoundError):
        store.get("a")
    for number in range(12):
        store.put(f"a/b{number:02d}", b"%d" % number)
        assert names(store, "a/") == [f"b{each:02d}" for each in range(number + 1)]
        assert store.get(f"a/b{number:02d}").data == b"%d" % number
    store.put("ab", b"")
    store.put("a/c/d", b"")
    store.put(".hidden", b"")
    assert names(store) == ["a/", "ab"]
    assert names(store, "a/c/") == ["d"]
    assert names(store, "none/") == []
    assert store.list()[0].modified == 0
    assert abs(store.list()[1].modified - time.time()) < 60


def test_the_last_put_wins_and_a_deleted_object_is_gone(store: Store) -> None:
    store.put("a/b", b"1")
    store.put("a/b", b"22")
    assert store.get("a/b").data == b"22"
    store.delete("a/b")
    store.delete("a/b")
    assert names(store, "a/") == []


def test_files_are_transferred_completely(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(PIECE * 11)  # in several parts
    store.put("states/big", source)
    store.fetch("states/big", target)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(FileNotFoundError):
        store.fetch("states/none", target)


def test_walk_lists_all_objects_below_a_prefix_with_size_and_tag(
        address: str, store: Store, tmp_path: Path) -> None:
    content = {"a/b/c": b"1", "a/b": b"22", "a/bc/d": b"333", "ä /+%41#": b"4444"}
    if "Folder" in type(store).__name__:
        del content["a/b"]
    for key, data in content.items():
        store.put(key, data)
    for hidden in ("a/.d", "a/.e/f", ".g"):
        store.put(hidden, b"")
    entries = {entry.name: entry for entry in store.walk()}
    assert {key: entry.size for key, entry in entries.items()} == {key: len(data) for key, data in content.items()}
    assert [entry.name for entry in store.walk("a/b/")] == ["a/b/c"]
    assert store.walk("none/") == []
    for key, entry in entries.items():
        assert store.fetch(key, tmp_path / "target") == (entry.size, entry.tag, *digests(content[key]))
        assert (tmp_path / "target").read_bytes() == content[key]
    assert store.list("a/b/") == [entries["a/b/c"]._replace(name="c")]
    store.put("a/b/c", b"5")
    assert store.walk("a/b/")[0].tag != entries["a/b/c"].tag
    if address.startswith("s3://"):  # a dataset snapshot is checked by it; Azure has other tags
        assert entries["a/b/c"].tag == hashlib.md5(b"1").hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a store with objects `a` and `b/c`."""
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "a").touch()
    (folder / "b" / "c").touch()
    return folder


def test_an_entry_that_vanishes_while_it_is_listed_hides_no_other(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes old checkpoints: an empty listing would start the training again at step 0."""
    seen = os.scandir

    @contextmanager
    def scandir(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with seen(path) as entries:
            listed = list(entries)
            (folder / "gone").unlink(missing_ok=True)
            yield iter(listed)

    (folder / "gone").touch()
    monkeypatch.setattr(os, "scandir", scandir)
    assert names(open_store(f"file://{folder}")) == ["a", "b/"]


@pytest.mark.parametrize("target", ["loop", ".", "nothing", "b"])
def test_a_link_ends_neither_list_nor_walk(folder: Path, target: str) -> None:
    (folder / "loop").symlink_to(target)
    store = open_store(f"file://{folder}")
    through = {".": ["loop/"], "b": ["loop/"]}.get(target, [])
    assert names(store) == ["a", "b/", *through]
    beyond = ["loop/c"] if target == "b" else []  # a link into another folder is followed, one to a parent is not
    assert [entry.name for entry in store.walk()] == ["a", "b/c", *beyond]


def test_calls_in_parallel_are_bounded_and_keep_their_order() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def call(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return number * number

    assert store_module.in_parallel(call, range(200)) == [number * number for number in range(200)]
    assert 8 < most <= 32
    with pytest.raises(ZeroDivisionError):
        store_module.in_parallel(lambda number: 1 // number, range(5))


def test_a_condition_holds_for_the_version_that_was_read(store: Store) -> None:
    assert store.put_if("lease", b"x", {"e_tag": '"none"'} if "Object" in type(store).__name__ else "none") is None
    first = store.put_if("lease", b"1")
    assert first
    assert store.put_if("lease", b"2") is None
    assert store.get("lease").data == b"1"
    assert store.get("lease").version == first
    second = store.put_if("lease", b"2", first)
    assert second
    assert store.put_if("lease", b"3", first) is None
    assert store.get("lease").data == b"2"
    store.put("lease", b"4")
    assert store.put_if("lease", b"5", second) is None


def test_a_bucket_that_does_not_exist_is_no_refused_condition(s3: None) -> None:
    with pytest.raises(OSError, match="there is no such bucket"):
        open_store("s3://typo-bucket/runs").put_if("a", b"1")


def test_of_many_conditional_writers_one_succeeds(store: Store) -> None:
    for round_ in range(5):
        version = store.get("lease").version if round_ else None
        won: list[int] = []
        start = threading.Barrier(6)

        def write(number: int, version: object = version, won: list[int] = won, start: threading.Barrier = start
                  ) -> None:
            start.wait()
            if store.put_if("lease", b"%d" % number, version):
                won.append(number)

        threads = [threading.Thread(target=write, args=(10 * round_ + number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [b"%d" % number for number in won] == [store.get("lease").data]


def test_an_interrupted_upload_leaves_no_object(address: str, store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(PIECE * 48)
    store.put("states/before", b"1")
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent("""
        import sys
        from pathlib import Path
        from ray_yolo.storage.store import open_store
        print("begins", flush=True)
        open_store(sys.argv[1]).put("states/torn", Path(sys.argv[2]))
        """), address, str(source)], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    time.sleep(0.03)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert names(store, "states/") in (["before"], ["before", "torn"])
    if "torn" in names(store, "states/"):  # the upload finished first
        store.fetch("states/torn", tmp_path / "target")
        assert (tmp_path / "target").stat().st_size == source.stat().st_size


@pytest.mark.parametrize("address", ["ftp://bucket/x", "file://relative/x", "s3://"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="storage_path: "):
        open_store(address)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(InputError, match=r"pip install 'ray_yolo\[s3\]'"):
        open_store("s3://bucket/x")


def test_a_storage_failure_is_an_os_error_without_secrets(s3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="bucket") as refused:
        open_store("s3://no-such-bucket/x").put("a", b"")
    assert "canary" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("address", "error", "reason"), [
    ("s3://bucket/x", GenericError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token"),
     "there are no credentials for s3://bucket/x; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "),
    ("gs://bucket", GenericError("Generic GCS error: Error performing GET http://metadata/computeMetadata/v1/token"),
     "there are no credentials for gs://bucket; set GOOGLE_APPLICATION_CREDENTIALS, or "),
    ("s3://bucket/x", PermissionDeniedError("403 Forbidden: <Error>canary</Error>"),
     "403 Forbidden; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what they permit at s3://bucket/x"),
    ("s3://bucket/x", GenericError("500 Internal: <Error>"), "500 Internal")])
def test_credentials_are_named_where_they_are_missing_or_refused(address: str, error: Exception, reason: str) -> None:
    assert store_module._reason(error, address).startswith(reason)


def test_an_account_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InputError, match=r"storage_path: az://bucket/x: .* no credentials .* set AZURE_STORAGE_"):
        open_store("az://bucket/x")


def test_obstore_is_imported_lazily() -> None:
    code = "import sys; import ray_yolo.storage.store; assert not {'obstore', 'boto3'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
