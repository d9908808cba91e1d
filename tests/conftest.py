"""What every test gets: a home of its own, and a session that fails when something is left behind.

The whole session has one short folder under /tmp (socket paths are limited to 107 bytes). TMPDIR points into
it, so that what tests and their processes write is found and removed at the end, and a process that outlives
its test is known by that path in its environment or command line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from rudra_zmq.errors import ConfigError
from rudra_zmq.tasks import data

HERE = Path(__file__).parent
FOLDER_MARKS = ("unit", "net", "e2e", "hosts", "gpu")
SHARED_PLACES = [("/dev/shm", "rudra*"), ("/tmp", "rudra-[!0-9]*")]
if os.environ.get("CI"):
    # A person's own runtime folder: elsewhere they may start daemons of their own while the tests run.
    SHARED_PLACES += [("/tmp", f"rudra-{os.getuid()}/*"), (f"/run/user/{os.getuid()}", "rudra/*")]
# Helpers of multiprocessing that serve this very process and end with it.
SERVANTS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
GRACE_S = 3.0

# A shell that starts the tests in the background has SIGINT ignored, nohup SIGHUP, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("here", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")


def pytest_configure(config: pytest.Config) -> None:
    session_root = Path(tempfile.mkdtemp(prefix="rz", dir=os.environ.get("RUDRA_TEST_ROOT", "/tmp")))
    (session_root / "t").mkdir()
    config.stash[_ROOT] = session_root
    config.stash[_BEFORE] = _shared_entries()
    config.stash[_DATA] = _find_data()
    os.environ["TMPDIR"] = str(session_root / "t")
    tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_ROOT], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by folder, and the folders in the order of what they cost: a broken rule shows before its processes."""
    order = {}
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in FOLDER_MARKS:
            item.add_marker(folder)
        order[item] = FOLDER_MARKS.index(folder) if folder in FOLDER_MARKS else len(FOLDER_MARKS)
    items.sort(key=order.__getitem__)


def _find_data() -> Path | None:
    """Where Fashion-MNIST lies, found before any test gets another home."""
    try:
        return data.find()
    except ConfigError:
        mine = HERE.parent / ".cache" / data.NAME  # where bin/test puts it on a machine that lacks it
        return None if data.missing_files(mine) else mine


_ROOT = pytest.StashKey[Path]()
_BEFORE = pytest.StashKey[set[str]]()
_DATA = pytest.StashKey["Path | None"]()


# --- nothing may be left behind -------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """At the end of the session: no process, shared memory, socket or folder that was not there before."""
    yield
    root = request.config.stash[_ROOT]
    left = _processes_left(root)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    lines = [f"process {pid}: {command}" for pid, command in left.items()]
    lines += sorted(_shared_entries() - request.config.stash[_BEFORE])
    lines += [str(path) for path in (root / "t").glob("rudra*")]
    if lines:
        pytest.fail("left behind by the tests:\n  " + "\n  ".join(lines), pytrace=False)


def _shared_entries() -> set[str]:
    entries = set()
    for folder, pattern in SHARED_PLACES:
        for path in Path(folder).glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_uid == os.getuid():
                    entries.add(str(path))
    return entries


def _processes_left(root: Path) -> dict[int, str]:
    """Processes of this session that are alive, and stay so for a moment in which the dying may end."""
    deadline = time.monotonic() + GRACE_S
    while (left := _processes(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _processes(root: Path) -> dict[int, str]:
    """Command lines of this process's descendants, and of those that carry the session's path."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    marked: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        # A process may end while it is looked at, or be another user's.
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes()
            if state == "Z" or pid == os.getpid() or any(servant in command for servant in SERVANTS):
                continue
            parents[pid] = int(parent)
            commands[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
            if os.fsencode(root) in command + (entry / "environ").read_bytes():
                marked.add(pid)
    return {pid: text for pid, text in commands.items() if pid in marked or _descends(pid, parents)}


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 1:
        if pid == os.getpid():
            return True
    return False


# --- a home of one's own --------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivateHome:
    """Folders that stand for a person's; the environment of this process and its children points to them."""

    home: Path
    config: Path
    state: Path
    cache: Path
    runtime: Path

    def sockets(self) -> list[Path]:
        """Every socket under the home, for tests that say none is left."""
        return [path for path in self.home.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]


@pytest.fixture
def private_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateHome]:
    """HOME and XDG_* in a fresh short folder, no RUDRA_* but RUDRA_DATA where this machine has the data."""
    home = Path(tempfile.mkdtemp(prefix="h", dir=request.config.stash[_ROOT]))
    folders = PrivateHome(home, home / "c", home / "s", home / "k", home / "r")
    for folder in (folders.config, folders.state, folders.cache, folders.runtime):
        folder.mkdir(mode=0o700)
    for name in [name for name in os.environ if name.startswith("RUDRA_")]:
        monkeypatch.delenv(name)
    if place := request.config.stash[_DATA]:
        monkeypatch.setenv("RUDRA_DATA", str(place))
    monkeypatch.setenv("HOME", str(folders.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folders.config))
    monkeypatch.setenv("XDG_STATE_HOME", str(folders.state))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders.cache))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folders.runtime))
    yield folders
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def fashion_data(request: pytest.FixtureRequest) -> Path:
    """The folder of Fashion-MNIST. Without it the test fails: a skip would hide a broken set-up."""
    place = request.config.stash[_DATA]
    if place is None:
        pytest.fail(f"this machine has no Fashion-MNIST. Fix: {data.FETCH}, or bin/test", pytrace=False)
    return place
