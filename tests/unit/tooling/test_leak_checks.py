"""The session's own check (tests/conftest.py): it must see what a test leaves behind, and end it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = """
import os, subprocess, sys, tempfile
from pathlib import Path

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]

def test_child():
    child = subprocess.Popen(SLEEP, env={"PATH": os.environ["PATH"]})
    print(f"pid={child.pid}")

def test_daemon_of_a_private_home(private_home):
    # its parent is gone: only the path in its environment tells whose it was
    code = f"import subprocess; print('pid=', subprocess.Popen({SLEEP}, start_new_session=True).pid, sep='')"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_shared_memory_and_folders():
    Path("/dev/shm/rudra-leak-check-PID").write_text("")
    tempfile.mkdtemp(prefix="rudra-")
"""

CLEAN = """
import os, tempfile
from pathlib import Path

def test_homes_are_private_and_short(private_home):
    assert os.environ["HOME"] == str(private_home.home)
    assert len(str(private_home.runtime)) < 40
    assert [n for n in os.environ if n.startswith("RUDRA_") and n != "RUDRA_DATA"] == []
    assert private_home.sockets() == []
    (Path(tempfile.gettempdir()) / "anything").write_text("")
    print(f"folder={tempfile.gettempdir()}")
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    root = Path(__file__).parents[3]
    pytester.makeconftest((root / "tests" / "conftest.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("RUDRA_SOMETHING", "of the person's own")
    return pytester


def test_leaks_fail_the_session_and_are_ended(inner: pytest.Pytester) -> None:
    shared = Path(f"/dev/shm/rudra-leak-check-{os.getpid()}")
    inner.makepyfile(LEAKS.replace("PID", str(os.getpid())))
    try:
        result = inner.runpytest_subprocess("-s", "-p", "no:cacheprovider")
    finally:
        shared.unlink(missing_ok=True)
    result.assert_outcomes(passed=3, errors=1)
    text = result.stdout.str()
    pids = [int(pid) for pid in re.findall(r"pid=(\d+)", text)]
    assert len(pids) == 2
    for pid in pids:
        assert f"process {pid}: {sys.executable}" in text
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert str(shared) in text
    assert re.search(r"/tmp/rz\w+/t/rudra-\w+", text)


def test_a_clean_session_passes_and_leaves_nothing(inner: pytest.Pytester) -> None:
    inner.makepyfile(CLEAN)
    result = inner.runpytest_subprocess("-s", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    found = re.search(r"folder=(/tmp/rz\w+)/t", result.stdout.str())  # other sessions may run, and have theirs
    assert found and not Path(found[1]).exists()
