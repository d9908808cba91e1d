"""Whom learners may run as, and what they are lent."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.daemons import account as module
from rudra_zmq.daemons.account import Account, account
from rudra_zmq.errors import ConfigError


def test_without_a_name_learners_run_as_we_do() -> None:
    assert account("") is None


def test_who_cannot_be_become_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no user no-such-user \(host.user\). Fix: "):
        account("no-such-user")
    with pytest.raises(ConfigError, match="do not run as root"):
        account(pwd.getpwuid(0).pw_name)
    monkeypatch.setattr(module, "_effective", lambda: 1 << 5 | 1 << 7)
    with pytest.raises(ConfigError, match="becoming nobody takes CAP_SETGID"):
        account("nobody")


def test_the_environment_is_the_accounts_own() -> None:
    whom = Account("rudra-job", 1, 1, (1,), "/var/lib/rudra/job")
    env = whom.environment({"HOME": "/root", "USER": "root", "XDG_CACHE_HOME": "/root/.cache", "PATH": "/bin"})
    assert env == {"HOME": "/var/lib/rudra/job", "USER": "rudra-job", "LOGNAME": "rudra-job", "PATH": "/bin"}


def test_what_is_lent_can_be_read_or_written_by_the_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whom = Account("me", os.getuid(), os.getgid(), (), "/")
    (tmp_path / "code/deep").mkdir(parents=True)
    (tmp_path / "code/deep/run").write_text("")
    (tmp_path / "code/deep/run").chmod(0o700)
    (tmp_path / "code/a").write_text("")
    (tmp_path / "code/out").symlink_to("/etc/passwd")
    before = os.stat("/etc/passwd").st_mode
    assert whom.lend_tree(tmp_path / "code") == ""
    modes = {p.name: p.lstat().st_mode & 0o777 for p in (tmp_path / "code").rglob("*") if not p.is_symlink()}
    assert modes == {"deep": 0o770, "run": 0o770, "a": 0o660} and os.stat("/etc/passwd").st_mode == before
    # What a learner wrote there is its own: a job that goes on finds it.
    (tmp_path / "code/theirs").write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (tmp_path / "code/theirs").chmod(0o604)
    assert whom.lend_tree(tmp_path / "code") == ""
    assert (tmp_path / "code/theirs").stat().st_mode & 0o777 == 0o604
    whom.lend_file(tmp_path / "log")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o660


def test_a_file_that_becomes_a_link_while_it_is_looked_at_gives_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whom = Account("me", os.getuid(), os.getgid(), (), "/")
    secret, file = tmp_path / "token", tmp_path / "code/a"
    secret.write_text("")
    secret.chmod(0o600)
    file.parent.mkdir()
    file.write_text("")

    def swapping(look: Any) -> Any:
        def looked(*args: Any) -> os.stat_result:
            found: os.stat_result = look(*args)
            if stat.S_ISREG(found.st_mode) and not os.path.islink(file):
                file.unlink()
                file.symlink_to(secret)
            return found

        return looked

    monkeypatch.setattr(Path, "lstat", swapping(Path.lstat))
    monkeypatch.setattr(os, "fstat", swapping(os.fstat))
    assert whom.lend_tree(file.parent) == ""
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600
