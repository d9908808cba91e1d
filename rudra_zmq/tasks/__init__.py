"""What a job trains, for those who write no script: a task is `module:name` in the job file.

Owns: the protocol of a task and its loader. Must not know: servers, learners, where data lies. Importing this
package imports no torch; loading a task imports the module that the user named.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from rudra_zmq.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

METHODS = ("model", "dataset", "loss", "metrics")


class Task(Protocol):
    """A model, its data and how to judge it. A batch is what the dataset's samples collate to."""

    def model(self) -> torch.nn.Module:
        """A new model with fresh weights, drawn from torch's global generator (the job seeds it)."""

    def dataset(self, split: str) -> Dataset[Any]:
        """The samples of split "train" or "test". Where it has an attribute `tensors`, that is a tuple of
        tensors of one first dimension, from which a batch can be indexed without a call per sample."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The mean loss over the batch, a scalar with a graph."""

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, float]:
        """At least correct, count (samples) and loss_sum (loss times count): sums, for batches to add up."""


def load_task(spec: str, args: Mapping[str, Any]) -> Task:
    """The task that `spec` names, made with `args` as keyword arguments.

    `spec` is "module:name"; the name is a class or a function to call, or an object to use as it is. Raises
    ConfigError for a module, name or argument that is not there and for an object that is no task. What the
    user's own code raises passes through, so that its traceback is seen.
    """
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        fix = 'write "module:name", as in my_package.my_module:my_task'
        raise ConfigError(f'"{spec}" names no task', where="job.task", fix=fix)
    found = _find(_import(module_name, spec), name, spec)
    task = _make(found, args, spec) if callable(found) else found
    if not callable(found) and args:
        raise ConfigError(
            f"{spec} is an object that takes no arguments, task_args gives {', '.join(sorted(args))}",
            where="job.task_args",
            fix="remove task_args, or name a class or a function",
        )
    missing = [method for method in METHODS if not callable(getattr(task, method, None))]
    if missing:
        raise ConfigError(
            f"{spec} is no task: it has no {', '.join(f'{method}()' for method in missing)}",
            where="job.task",
            fix="give it model(), dataset(split), loss(model, batch) and metrics(model, batch)",
        )
    return cast(Task, task)


def _import(module_name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            fix = f"install the package that has {missing}, or correct job.task"
            raise ConfigError(f"task {spec}: no module named {missing}", where="job.task", fix=fix) from None
        fix = f"install {missing.partition('.')[0]} on the hosts of the learners"
        raise ConfigError(
            f"task {spec} needs the module {missing}, which is not installed", where="job.task", fix=fix
        ) from error


def _find(module: ModuleType, name: str, spec: str) -> Any:
    found = getattr(module, name, None)
    if found is not None:
        return found
    public = [key for key in vars(module) if not key.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1)
    guess = f", did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"task {spec}: {module.__name__} has no {name}{guess}",
        where="job.task",
        fix=f"write {module.__name__}:{near[0]}" if near else f"name one of the tasks in {module.__file__}",
    )


def _make(factory: Any, args: Mapping[str, Any], spec: str) -> Any:
    signature = inspect.signature(factory)
    try:
        signature.bind(**args)
    except TypeError as error:
        raise _bad_arguments(signature, args, spec, error) from None
    return factory(**args)


def _bad_arguments(signature: inspect.Signature, args: Mapping[str, Any], spec: str, error: TypeError) -> ConfigError:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [name for name, parameter in signature.parameters.items() if parameter.kind in by_name]
    fix = f"it takes {', '.join(known)}" if known else "remove task_args"
    for name in args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            guess = f", did you mean {near[0]}?" if near else ""
            message = f"task {spec} takes no argument {name}{guess}"
            return ConfigError(message, where="job.task_args", fix=f"rename it to {near[0]}" if near else fix)
    return ConfigError(f"task {spec}: {error}", where="job.task_args", fix=fix)
