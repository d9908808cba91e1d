"""What nvidia-smi lists, and which declared GPUs are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rudra_zmq import __version__
from rudra_zmq.daemons import hardware

LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-1dc8a7f2-aaaa-bbbb-cccc-000000000001)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1dc8a7f2-aaaa-bbbb-cccc-000000000002)
  MIG 3g.20gb     Device  0: (UUID: MIG-5f2c1a00-1111-2222-3333-444444444444)
"""


def test_indices_and_uuids_are_read_and_a_mig_device_has_no_index() -> None:
    assert hardware.parse_list(LISTED) == {
        "0",
        "1",
        "GPU-1dc8a7f2-aaaa-bbbb-cccc-000000000001",
        "GPU-1dc8a7f2-aaaa-bbbb-cccc-000000000002",
        "MIG-5f2c1a00-1111-2222-3333-444444444444",
    }


def test_nvidia_smi_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = -L ] || exit 3\ncat <<'X'\n{LISTED}X\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert hardware.absent(("0", "2", "MIG-5f2c1a00-1111-2222-3333-444444444444", "GPU-none")) == ("2", "GPU-none")


def test_without_declared_devices_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "present", lambda: pytest.fail("it was looked for"))
    assert hardware.absent(()) == ()


def test_versions_without_loading_anything() -> None:
    found = hardware.versions()
    assert found["rudra"] == __version__
    assert {"python", "torch"} <= found.keys()
    assert hardware.memory() > 1 << 20
