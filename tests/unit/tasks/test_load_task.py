"""load_task: what it accepts, and one line with a fix for what it refuses."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.errors import ConfigError
from rudra_zmq.tasks import load_task

MODULE = """
class Task:
    def __init__(self, limit=None, *, width=1):
        self.limit, self.width = limit, width
    def model(self): return "model"
    def dataset(self, split): return split
    def loss(self, model, batch): return 0
    def metrics(self, model, batch): return {}

def factory(limit): return Task(limit)
ready = Task(7)
class Half:
    def model(self): pass
    def loss(self, model, batch): pass
def raises(): raise ZeroDivisionError("the user's own")
def anything(**names): return Task(len(names))
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_tasks.py").write_text(MODULE)
    (tmp_path / "mine_needs.py").write_text("import no_such_thing.at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine_tasks", "mine_needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_class_with_keyword_arguments() -> None:
    task: Any = load_task("mine_tasks:Task", {"limit": 3, "width": 2})
    assert (task.limit, task.width) == (3, 2)


def test_function_object_and_free_names() -> None:
    assert load_task("mine_tasks:factory", {"limit": 5}).limit == 5  # type: ignore[attr-defined]
    assert load_task("mine_tasks:ready", {}).limit == 7  # type: ignore[attr-defined]
    assert load_task("mine_tasks:anything", {"a": 1, "b": 2}).limit == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "args", "says"),
    [
        ("mine_tasks", {}, ["names no task", "module:name"]),
        (":Task", {}, ["names no task"]),
        ("mine_tasks:", {}, ["names no task"]),
        ("mine_taks:Task", {}, ["no module named mine_taks", "install"]),
        ("mine_tasks.deeper:Task", {}, ["no module named mine_tasks"]),
        ("mine_needs:Task", {}, ["needs the module no_such_thing", "install no_such_thing"]),
        ("mine_tasks:Tsak", {}, ["has no Tsak", "did you mean Task?", "mine_tasks:Task"]),
        ("mine_tasks:zzz", {}, ["has no zzz", "mine_tasks.py"]),
        ("mine_tasks:Task", {"limits": 3}, ["no argument limits", "did you mean limit?"]),
        ("mine_tasks:Task", {"colour": 3}, ["no argument colour", "it takes limit, width"]),
        ("mine_tasks:factory", {}, ["limit"]),
        ("mine_tasks:raises", {"limit": 1}, ["no argument limit", "remove task_args"]),
        ("mine_tasks:ready", {"limit": 3}, ["takes no arguments", "limit"]),
        ("mine_tasks:Half", {}, ["no dataset(), metrics()", "dataset(split)"]),
        ("mine_tasks:sys", {}, ["has no sys"]),
    ],
)
def test_refused_in_one_line_with_a_fix(spec: str, args: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(spec, args)
    line = str(caught.value)
    assert "\n" not in line
    assert "Fix: " in line
    for text in says:
        assert text in line


def test_what_the_users_code_raises_passes_through() -> None:
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        load_task("mine_tasks:raises", {})


def test_importing_the_loader_imports_no_torch() -> None:
    code = """
        import sys
        import rudra_zmq.tasks, rudra_zmq.tasks.data
        print([name for name in ("torch", "zmq", "rich", "click") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
