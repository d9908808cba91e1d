"""Own secrets: where they lie, who may read them, how they are made, and when a connection needs them.

Owns the key files NAME.key (psd, learnerd, user), one secret in each. Must not know which keys a head takes: that is
its registry's.

    $CREDENTIALS_DIRECTORY/NAME.key     what systemd hands to a unit (LoadCredential=)
    ~/.config/rudra/keys/NAME.key       a person's
    /etc/rudra/keys/NAME.key            the system's daemons'
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from rudra_zmq.config.load import own_folder as config_folder
from rudra_zmq.errors import ConfigError, NotFound, RefusedBySecurity, RudraError
from rudra_zmq.net.addresses import Address, parse
from rudra_zmq.net.auth import KEY_CHARACTERS, KeyPair, to_hex, to_z85
from rudra_zmq.net.handshake import Curve
from rudra_zmq.paths import own_folder

Owner: TypeAlias = Literal["psd", "learnerd", "user"]
SYSTEM = Path("/etc/rudra/keys")
NONE = b"none"  # what systemd hands to a unit whose key was never made (SetCredential=)


def person_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Of whoever runs this."""
    return config_folder(os.environ if environ is None else environ) / "keys"


def find(owner: Owner, environ: Mapping[str, str] | None = None, system: Path = SYSTEM) -> Path | None:
    """The file of a key, None where there is none. The system's are its daemons' alone."""
    env = os.environ if environ is None else environ
    places = [person_folder(env)]
    if given := env.get("CREDENTIALS_DIRECTORY", ""):
        places.insert(0, Path(given))
    if owner != "user":
        places.append(system)
    for place in places:
        path = place / f"{owner}.key"
        with contextlib.suppress(OSError):
            path.lstat()
            return path
    return None


def load(owner: Owner, environ: Mapping[str, str] | None = None, system: Path = SYSTEM) -> KeyPair | None:
    """The key, None where there is none. RefusedBySecurity where others could know its secret."""
    env = os.environ if environ is None else environ
    path = find(owner, env, system)
    if path is None:
        return None
    handed = env.get("CREDENTIALS_DIRECTORY", "") == str(path.parent)
    if handed:
        with contextlib.suppress(OSError):
            if path.read_bytes() == NONE:
                return None
    return read(path, handed=handed)


def read(path: Path, *, handed: bool = False) -> KeyPair:
    """The pair of a secret's file. ``handed``: by systemd, which may keep its owner root.

    NotFound without a file; RefusedBySecurity where it is another's, others can read it, or it is no secret.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound("there is no key", where=str(path), fix=f"make it: {_new(path)}") from None
    except OSError as error:
        reason = error.strerror or "it cannot be opened"
        raise RefusedBySecurity(f"cannot read the key: {reason}", where=str(path), fix=_chown(path)) from None
    try:
        found = os.fstat(fd)
        text = os.read(fd, 256) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(fd)
    if found.st_uid != os.getuid() and not (handed and found.st_uid == 0):
        raise RefusedBySecurity(f"the key belongs to uid {found.st_uid}", where=str(path), fix=_chown(path))
    if found.st_mode & (0o027 if handed else 0o077):
        message = f"others can read the secret key (mode {stat.S_IMODE(found.st_mode):04o})"
        fix = f"chmod 600 {path} if nobody else uses this machine; else rm {path} and make a new one: {_new(path)}"
        raise RefusedBySecurity(message, where=str(path), fix=fix)
    try:
        return KeyPair.of(text.decode("ascii").strip())
    except ValueError:
        fix = f"rm {path}, then make a new one: {_new(path)}"
        raise RefusedBySecurity("this is no secret key", where=str(path), fix=fix) from None


def _new(path: Path) -> str:
    """How the key of this file is made, and who has to hear of it."""
    owner = path.stem
    told = {"psd": "; every host and person that has the old one as head.key must then be told"}
    command = "rudra keys new" + (f" {owner}" if owner in ("psd", "learnerd") else "")
    command += " --system" * (path.parent == SYSTEM)
    return command + told.get(owner, "; the head must then be told (rudra keys authorize)")


def _chown(path: Path) -> str:
    return f"chown {os.getuid()} {path}, or let systemd hand it over (LoadCredential={path.name}:{path})"


def make(owner: str, folder: Path) -> tuple[Path, KeyPair]:
    """A new key, mode 0600, in ``folder`` (made 0700 if need be). RudraError where there is one already."""
    path = own_folder(folder) / f"{owner}.key"
    pair = KeyPair.new()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                assert len(pair.secret) == KEY_CHARACTERS
                file.write(pair.secret + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
    except FileExistsError:
        fix = f"use it, or rm {path} first: whoever has authorised it must then be told the new one"
        raise RudraError(f"there is a key of {owner} already", where=str(path), fix=fix) from None
    except OSError as error:
        reason = error.strerror or "it cannot be made"
        raise ConfigError(f"cannot write the key: {reason}", where=str(path), fix="see to the folder") from None
    return path, pair


def is_loopback(address: Address) -> bool:
    """Whether an address never leaves this machine."""
    if address.kind == "ipc" or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def wanted(address: str, head_key: str) -> bool:
    """Whether a connection to the head is encrypted."""
    target = parse(address)
    return target.kind == "tcp" and (bool(head_key) or not is_loopback(target))


def curve_to(address: str, head_key: str, owner: Owner) -> Curve:
    """What a connection to the head is encrypted with; None on ipc, and on loopback where no head.key is set.

    Raises RefusedBySecurity where the head's key is not known, or there is no key of ``owner``.
    """
    if not wanted(address, head_key):
        return None
    if not head_key:
        fix = "set head.key to what `rudra keys list` on the head prints first"
        raise RefusedBySecurity("beyond this machine a head is known by its key, and head.key is not set",
                                where=address, fix=fix)  # fmt: skip
    pair = load(owner)
    if pair is None:
        which = "" if owner == "user" else f" {owner}"
        fix = f"`rudra keys new{which}` makes one; then let the head's people authorise it"
        raise RefusedBySecurity(f"there is no key of {owner} here", where=str(person_folder()), fix=fix)
    return pair, to_z85(head_key)


def shown(pair: KeyPair) -> str:
    """The public key as people have it."""
    return to_hex(pair.public)
