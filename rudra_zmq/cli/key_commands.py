"""``rudra keys``: own secrets, and the keys that the head takes."""

from __future__ import annotations

import click

from rudra_zmq.cli.base import COMMANDS, Cli, json_option, key_name
from rudra_zmq.cli.output import ago, emit_json, say, table, utc
from rudra_zmq.commands import Group
from rudra_zmq.errors import UsageError
from rudra_zmq.net import keys as files
from rudra_zmq.wire.messages import control as c

OWNERS: dict[str, files.Owner] = {"user": "user", "psd": "psd", "learnerd": "learnerd"}


@click.group("keys", cls=Group, short_help=COMMANDS["keys"][1])
def keys() -> None:
    """Make keys, and say which ones the head takes.

    \b
      rudra keys new                 your own; the public key is printed
      rudra keys authorize 3fa9... alice --role submit          at the head
    """


@keys.command("new", short_help="Make a key: yours, psd's or learnerd's.")
@click.argument("owner", type=click.Choice(list(OWNERS)), default="user")
@click.option("--system", is_flag=True, help=f"For the system's daemons: into {files.SYSTEM}.")
@json_option
def new(owner: str, system: bool, as_json: bool) -> None:
    """Make a key: yours, psd's or learnerd's. Its secret stays in a file of mode 0600; the public key is printed.

    \b
      rudra keys new
      sudo rudra keys new psd --system
    """
    if system and owner == "user":
        raise UsageError("a person's key is no daemon's", fix="leave out --system, or name psd or learnerd")
    path, pair = files.make(owner, files.SYSTEM if system else files.person_folder())
    public = files.shown(pair)
    if as_json:
        emit_json({"owner": owner, "key": public, "path": str(path)})
        return
    say(f"{owner}'s key is {public} (secret in {path})")
    if owner == "psd":
        say("psd has it from its next start on; others set it as head.key in their rudra.toml")
    else:
        role = "host" if owner == "learnerd" else "submit"
        say(f"on the head: rudra keys authorize {public} NAME --role {role}")


@keys.command("authorize", short_help="Let a key in, under a name and with a role.")
@click.argument("key")
@click.argument("name", callback=key_name)
@click.option(
    "--role",
    type=click.Choice(["read", "submit", "admin", "host"]),
    default="submit",
    show_default=True,
    help="read: look; submit: own jobs; admin: all; host: a learnerd.",
)
@json_option
@click.pass_obj
def authorize(cli: Cli, key: str, name: str, role: c.Role, as_json: bool) -> None:
    """Let a key in, under a name and with a role; a revoked one gets both anew.

    Of a key that is let in already the name or the role changes; what else it was must be revoked first.

    \b
      rudra keys authorize 3fa9... alice --role submit
    """
    public = key.strip().lower()
    if len(public) != 64 or set(public) - set("0123456789abcdef"):
        raise UsageError(f"{key!r} is no public key", fix="give the 64 hex digits that `rudra keys new` printed")
    with cli.places() as places:
        text = places.head().do(c.AuthorizeKey(key=public, name=name, role=role))
    emit_json({"key": public, "name": name, "role": role}) if as_json else say(text)


@keys.command("revoke", short_help="Let a key in no more, and end what it has open.")
@click.argument("key")
@json_option
@click.pass_obj
def revoke(cli: Cli, key: str, as_json: bool) -> None:
    """Let a key in no more, and end what it has open. KEY is its name, or at least 8 digits of it.

    \b
      rudra keys revoke alice
    """
    with cli.places() as places:
        text = places.head().do(c.RevokeKey(key=key))
    emit_json({"key": key, "text": text}) if as_json else say(text)


@keys.command("list", short_help="Show the head's own key, and those that it knows.")
@json_option
@click.pass_obj
def list_(cli: Cli, as_json: bool) -> None:
    """Show the head's own key, those that it knows, and how often it has refused somebody since it began.

    \b
      rudra keys list
    """
    with cli.places() as places:
        found = places.head().keys()
    rows = [row for row in found.rows if not (row.role == "invite" and row.revoked)]
    if as_json:
        emit_json(
            {
                "head": found.head,
                "addresses": found.addresses,
                "refused": found.refused,
                "keys": [
                    {"key": row.key, "name": row.name, "role": row.role, "added": utc(row.added),
                     "expires": utc(row.expires), "revoked": utc(row.revoked)}
                    for row in rows
                ],
            }
        )  # fmt: skip
        return
    say(f"head {found.head or 'has no key: it serves this machine alone'}")
    if found.addresses and found.head:
        say(f"at {', '.join(found.addresses)}")
    table(["name", "role", "key", "since", "state"], [[r.name, r.role, r.key, ago(r.added), _state(r)] for r in rows])
    if found.refused:
        say(refusals(found.refused))


def refusals(refused: dict[str, int]) -> str:
    """The counts on one line."""
    return "refused: " + ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))


def _state(row: c.KeyRow) -> str:
    if row.revoked:
        return f"revoked {ago(row.revoked)}"
    return f"until {utc(row.expires)}" if row.expires else "valid"
