"""rudra doctor as a person calls it: without a cluster, with one that is well, with another psd and a stopped one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from .harness import Rudra


def findings(rudra: Rudra, status: int, *args: str) -> list[tuple[str, str]]:
    value = rudra(*args, "doctor", "--json", status=status, timeout=20).json
    assert value["schema_version"] == 1 and "head" in value["checks"] and value["ok"] == (status == 0)
    assert all(row["fix"] and set(row) == {"id", "level", "where", "text", "fix"} for row in value["findings"])
    # Notes and warnings are about the machine that the tests run on.
    return [(row["id"], row["text"]) for row in value["findings"] if row["level"] == "error"]


def test_a_cluster_from_nothing_to_a_stopped_psd(rudra: Rudra) -> None:
    ((id, text),) = findings(rudra, 4)
    assert id == "head-unreachable" and text.startswith("no psd is running")
    rudra("up")
    try:
        assert findings(rudra, 0) == []
        shown = rudra("doctor")
        assert "error" not in shown.out and "things were looked at in" in shown.err
        (endpoint,) = rudra.home.glob("state/rudra/*/endpoint.json")
        psd = json.loads(endpoint.read_text())["pid"]
        other = Rudra(rudra.home, {**rudra.env, "RUDRA_PATHS_STATE": str(rudra.home / "other")})
        found = dict(findings(other, 4))
        assert f"another psd (PID {psd}) holds the socket" in found["another-psd"]
        os.kill(psd, signal.SIGSTOP)
        try:
            ((id, text),) = findings(rudra, 4)
            assert id == "head-stopped" and f"(PID {psd}) is stopped" in text
            said = rudra("keys", "list", status=4).err
            assert f"PID {psd} is stopped" in said and f"Fix: kill -CONT {psd}" in said
        finally:
            os.kill(psd, signal.SIGCONT)
    finally:
        rudra("down")


def test_a_mistake_in_the_settings(rudra: Rudra) -> None:
    config = Path(rudra.env.get("XDG_CONFIG_HOME", rudra.home / ".config")) / "rudra"
    config.mkdir(parents=True)
    (config / "rudra.toml").write_text("[host]\nslot = 3\n")
    done = rudra("doctor", status=1)
    assert done.out.startswith("error: this host: unknown key host.slot, did you mean host.slots?")
    assert ". Fix: write host.slots\n" in done.out
