"""The rules of `tests/unit/conftest.py`, tried on tests that break them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "unit" / "conftest.py"
TESTS = '''
import multiprocessing, os, subprocess, sys, threading, time
import pytest

def test_popen():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_fork():
    child = os.fork() or os._exit(0)
    os.waitpid(child, 0)

@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(method):
    process = multiprocessing.get_context(method).Process(target=int)
    process.start()
    process.join()

@pytest.fixture(scope="module")
def server():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_fixture(server):
    pass

def test_sleep():
    time.sleep(1.1)

def test_hangs():
    while True:
        time.sleep(0.01)

def test_allowed(server):
    subprocess.run(["uname"], check=True)
    time.sleep(0.01)
    thread = threading.Thread(target=time.sleep, args=[1.1])
    thread.start()
    thread.join()
'''


def test_tests_that_start_processes_sleep_or_take_long_fail(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    text = (tmp_path / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(text.replace("LIMIT = 60\n", "LIMIT = 5\n"))
    (tmp_path / "test_tier.py").write_text(TESTS)
    ended = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path], cwd=tmp_path,
                           env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
                           check=False)
    reasons = dict(re.findall(r"^FAILED test_tier\.py::(\S+) - (.*)$", ended.stdout, re.MULTILINE))
    starts, sleeps = "Failed: it starts a process", "Failed: it sleeps 1.1 s"
    expected = {"test_popen": starts, "test_fork": starts, "test_multiprocessing[fork]": starts,
                "test_multiprocessing[forkserver]": starts, "test_multiprocessing[spawn]": starts,
                "test_fixture": starts, "test_sleep": sleeps, "test_hangs": "Failed: Timeout"}
    assert reasons.keys() == expected.keys(), ended.stdout
    for name, reason in expected.items():
        assert reasons[name].startswith(reason), f"{name}: {reasons[name]}"
