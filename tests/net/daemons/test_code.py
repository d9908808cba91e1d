"""Code that a job brings reaches a host that shares nothing with the head: once, checked, and gone with the job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rudra_zmq.cli.places import Head
from rudra_zmq.wire import bundle
from rudra_zmq.wire.messages import control as c
from tests.net.daemons.conftest import Place, until
from tests.net.daemons.test_cluster import PROGRAM, SLEEP

SAYS = "import pkg\nprint(pkg.word, os.getcwd(), flush=True)\n"


def far(place: Place) -> Path:
    """A learnerd with a state folder of its own, as on another host."""
    state = place.home / "far"
    state.mkdir(mode=0o700)
    address, token = place.endpoint()["address"], place.endpoint()["token_file"]
    more = ["--state", str(state), "--head", address, "--token-file", token, "--name", "far", "--slots", "4"]
    child = place.spawn("learnerd", *more)
    until(lambda: any(h.pid == child.pid for h in place.hosts()), "learnerd")
    return state


def submit(place: Place, head: Head, code: bundle.Bundle) -> str:
    program = place.home / "learner"
    program.write_text(PROGRAM.format(python=sys.executable) + SAYS + SLEEP)
    program.chmod(0o700)
    toml = f'[run]\nmodule = "x"\npython = "{program}"\ncode = "/home/me/src"\n[learners]\ncount = 2\n'
    message = c.Submit(request=os.urandom(4).hex(), name="demo", toml=toml, cwd="/", code_hash=code.name)
    return head.submit(message, code)


def printed(head: Head, job: str, text: str) -> None:
    """Both learners say ``text``."""

    def done() -> bool:
        there = dict(head.files(job))
        paths = [f"logs/learner-{rank}.out" for rank in (0, 1)]
        return all(p in there and text in head.read(job, p, 0, 4096).data.decode() for p in paths)

    until(done, text)


def remove(head: Head, job: str, folders: list[Path], left: int) -> None:
    """Remove it; each state folder keeps so many bundles."""
    head.remove(job)
    for folder in folders:
        until(lambda folder=folder: not (folder / "jobs" / job).exists(), f"removal of {job}")
        until(lambda folder=folder: len(os.listdir(folder / "bundles")) == left, f"{left} bundles in {folder}")


def test_code_reaches_a_host_that_shares_nothing(place: Place) -> None:
    place.psd()
    state = far(place)
    head = Head(place.endpoint()["address"], Path(place.endpoint()["token_file"]))
    filler = bundle.Entry("pkg/table.bin", os.urandom(3 << 20), False)  # in a dozen pieces
    jobs = []
    try:
        for word in ("one", "two", "two"):
            code = bundle.make([bundle.Entry("pkg/__init__.py", f"word = {word!r}\n".encode(), False), filler])
            job = submit(place, head, code)
            printed(head, job, f"{word} {state}/jobs/{job}/code")
            assert not any(path.startswith("code/") for path, _ in head.files(job))
            head.stop(job, now=True)
            until(lambda job=job: head.get(job).row.state == "STOPPED", "the stop")
            jobs.append(job)
        assert place.log("learnerd").count("code is fetched") == 2
        for job, left in zip(jobs, (1, 1, 0), strict=True):
            remove(head, job, [state, place.state], left)
    finally:
        head.close()
