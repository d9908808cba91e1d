"""A machine with a real systemd: this one's files under a layer of its own, booted by systemd-nspawn.

Nothing of the machine below is changed: what the booted one writes lies in memory and goes with it. It shares the
network, so that packages can be installed as they are here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = Path("/srv/checkout")
PARTS = ("bin", "etc", "rudra_zmq", "systemd", "LICENSE", "README.rst", "constraints.txt", "pyproject.toml")
MASKED = (
    "apt-daily-upgrade.timer", "apt-daily.timer", "cron.service", "console-getty.service", "e2scrub_all.timer",
    "getty.target", "networking.service", "postgresql.service", "ssh.service", "systemd-networkd.service",
    "systemd-resolved.service", "systemd-timesyncd.service",
)  # fmt: skip
PASSED = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")


def lacking() -> str:
    """Why no machine can be booted here; "" where one can."""
    if os.geteuid() != 0:
        return "not root: a machine of one's own takes it"
    if shutil.which("systemd-nspawn") is None:
        return "there is no systemd-nspawn. Fix: apt-get install systemd-container"
    if shutil.which("nsenter") is None:
        return "there is no nsenter. Fix: apt-get install util-linux"
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        return "this container may not mount: run it with CAP_SYS_ADMIN"
    return ""


def until(done: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of ``done``."""
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.05)
    return value


class Machine:
    """Call it to run a command in it, as root."""

    def __init__(self, folder: Path) -> None:
        self._base = folder
        self.tree = folder / "m"
        self._console: subprocess.Popen[bytes] | None = None
        self.pid = 0
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder], check=True)
        for name in ("up", "work", "m"):
            (folder / name).mkdir()
        layers = f"lowerdir=/,upperdir={folder}/up,workdir={folder}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, self.tree], check=True)
        self._prepare()

    def _prepare(self) -> None:
        (self.tree / "etc/machine-id").write_text("")
        for unit in MASKED:
            path = self.tree / "etc/systemd/system" / unit
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/null")
        shutil.rmtree(self.tree / "var/log/journal", ignore_errors=True)
        inside = self.tree / CHECKOUT.relative_to("/")
        inside.mkdir(parents=True)
        for part in PARTS:
            copy: Callable[..., object] = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, inside / part)
        subprocess.run(["chmod", "-R", "a+rX", inside], check=True)
        # The interpreter with torch may lie in a home that other users cannot enter.
        for place in {sys.prefix, sys.base_prefix, os.environ.get("RUDRA_DATA", "/")}:
            for folder in Path(place).resolve().parents:
                here = self.tree / folder.relative_to("/")
                if not here.stat().st_mode & stat.S_IXOTH:
                    here.chmod(here.stat().st_mode | stat.S_IXOTH)

    def boot(self) -> None:
        """Until systemd has started everything."""
        name = f"rz{os.getpid()}"
        command = ["systemd-nspawn", "-q", "-D", str(self.tree), "-M", name, "--register=no", "--keep-unit", "--boot"]
        with open(self._base / "console", "wb") as log:
            self._console = subprocess.Popen(
                [*command, "--console=pipe", "--tmpfs=/tmp"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        children = Path(f"/proc/{self._console.pid}/task/{self._console.pid}/children")

        def up() -> bool:
            assert self._console is not None and self._console.poll() is None, (self._base / "console").read_text()
            with contextlib.suppress(OSError, IndexError):
                self.pid = int(children.read_text().split()[0])
            return bool(self.pid) and self.say("systemctl", "is-system-running") in ("running", "degraded")

        until(up, "the boot", 60)

    def __call__(
        self, *command: str | Path, user: str = "", status: int | None = 0, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end. ``user``: with a login of that user."""
        words = [str(word) for word in command]
        if user:
            words = ["runuser", "-l", user, "-c", " ".join(words)]
        passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("PIP_")}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-a", *words],
            env={**passed, "HOME": "/root", "PATH": path, "LANG": "C.UTF-8", "SYSTEMD_COLORS": "0"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        assert status is None or done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def say(self, *command: str, user: str = "") -> str:
        """What a command prints, whatever its exit status."""
        return self(*command, user=user, status=None).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.say("systemctl", "show", unit, "-P", name)

    def close(self) -> None:
        """Power it off, and take its layers away."""
        if self._console is not None and self._console.poll() is None:
            if self.pid:
                self("systemctl", "poweroff", status=None)
            try:
                self._console.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._console.pid, signal.SIGKILL)
                self._console.wait()
        for place in (self.tree, self._base):
            subprocess.run(["umount", "-l", place], check=False)
        self._base.rmdir()
