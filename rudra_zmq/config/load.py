"""The door for both kinds of file: layers in, a checked struct with the origin of every key out.

Owns: the order of the layers, defaults that depend on other keys, paths made absolute, the public functions
of `rudra_zmq.config`. Must not know: what is done with a configuration.

Precedence: -s, then RUDRA_* (keys of rudra.toml), the job file, ~/.config/rudra/rudra.toml,
/etc/rudra/conf.d/*.toml (the last name first), /etc/rudra/rudra.toml.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rudra_zmq.config.checks import conflicts, notices_of, problems_of, unsaid
from rudra_zmq.config.host import PathsSection, RudraToml, misnamed_entry
from rudra_zmq.config.job import JobFile
from rudra_zmq.config.layers import (
    LEVEL_FILE,
    Setting,
    collect,
    from_environment,
    from_sets,
    leaf_of,
    owner_of,
    parse_toml,
    places_in,
    read_text,
)
from rudra_zmq.config.schema import build, convert, flat, leaves
from rudra_zmq.config.write import toml_tables, toml_value
from rudra_zmq.errors import ConfigError
from rudra_zmq.paths import check_ipc_path

T = TypeVar("T", bound=msgspec.Struct)
Row = tuple[str, str, str]
ETC = Path("/etc/rudra")


@dataclass(frozen=True)
class LoadedJob:
    """`origins`: key -> where from ("default", "job.toml:7", "-s sync.n=2"). `notes`: lines to say once."""

    job: JobFile
    origins: dict[str, str]
    notes: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """(key, value as TOML, origin) of every key."""
        return _rows(self.job, self.origins)


@dataclass(frozen=True)
class LoadedRudra:
    """`files`: those that were there, weakest first."""

    config: RudraToml
    origins: dict[str, str]
    files: tuple[Path, ...] = ()

    def rows(self) -> list[Row]:
        """(key, value as TOML, origin) of every key."""
        return _rows(self.config, self.origins)


Loaded = TypeVar("Loaded", LoadedJob, LoadedRudra)


# ---- job files


def load_job(path: Path, sets: Sequence[str] = ()) -> LoadedJob:
    """A job file with `-s` settings over it. ConfigError: one line, and how many more there are."""
    loaded, problems = _job_of_file(path, sets)
    return _or_raise(loaded, problems, f"rudra config check {path}")


def check_job(path: Path, sets: Sequence[str] = ()) -> list[str]:
    """Every problem of a job file, one line each; empty where it is good."""
    try:
        return [str(problem) for problem in _job_of_file(path, sets)[1]]
    except ConfigError as error:
        return [str(error)]


def job_from_toml(
    text: str, *, name: str, sets: Sequence[str] = (), folder: Path | None = None, packed: bool = False
) -> LoadedJob:
    """A job from text; `name` is its name where the text has none.

    Without a `folder` paths stay as they are and no file is looked for: they may be another host's. With `packed` those
    of [run] do, they are inside a bundle that is made already.
    """
    loaded, problems = _job_of_text(text, "job.toml", name, sets, folder, packed)
    return _or_raise(loaded, problems, "")


def job_for_script(
    script: str = "",
    *,
    module: str = "",
    args: Sequence[str] = (),
    sets: Sequence[str] = (),
    cwd: Path | None = None,
) -> LoadedJob:
    """The job of `rudra run train.py ARGS` or of `rudra run -m MODULE ARGS`; `cwd` defaults to the caller's."""
    table = {"run": {"script": script} if script else {"module": module}}
    settings: dict[str, Setting] = {}
    problems: list[ConfigError] = []
    if args:
        table["run"]["args"] = list(args)  # type: ignore[assignment]
    settings |= collect(JobFile, table, lambda _: "command line", LEVEL_FILE, problems)
    settings |= from_sets(JobFile, sets, problems)
    name = Path(script).stem if script else module.rpartition(".")[2]
    loaded, problems = _finish_job(settings, problems, name, cwd or Path.cwd(), "command line")
    return _or_raise(loaded, problems, "")


def job_to_toml(job: JobFile, notes: Mapping[str, str] | None = None) -> str:
    """The whole effective file, which loads as an equal job. `notes` (origins, say) become comments."""
    given = flat(job)
    unset = {
        "job.task_args",
        "run.script",
        "run.module",
        "run.args",
        "run.env",
        "run.code",
        "learners.minibatch",
        "learners.global_batch",
        "update.rule",
    }
    left_out = unsaid(given, job.update.rule, job.update.schedule.kind)
    left_out |= {key for key in unset if not given.get(key, True)}
    values = {key: value for key, value in given.items() if key not in left_out}
    return toml_tables(values, notes)


def _job_of_file(path: Path, sets: Sequence[str]) -> tuple[LoadedJob | None, list[ConfigError]]:
    return _job_of_text(read_text(path), str(path), path.stem, sets, path.absolute().parent)


def _job_of_text(
    text: str, label: str, name: str, sets: Sequence[str], folder: Path | None, packed: bool = False
) -> tuple[LoadedJob | None, list[ConfigError]]:
    problems: list[ConfigError] = []
    settings = collect(JobFile, parse_toml(text, label), places_in(text, label), LEVEL_FILE, problems)
    settings |= from_sets(JobFile, sets, problems)
    return _finish_job(settings, problems, name, folder, label, packed)


def _finish_job(
    settings: dict[str, Setting],
    problems: list[ConfigError],
    name: str,
    folder: Path | None,
    label: str,
    packed: bool = False,
) -> tuple[LoadedJob | None, list[ConfigError]]:
    values = _converted(JobFile, settings, problems)
    if problems:
        return None, problems
    if folder is None:  # a file that was checked where it was written, perhaps by an earlier version
        _drop_defaults(values, settings)
    notes, contested = _settle(values, settings, problems)
    _fill(values, name)
    if folder is not None:
        _make_absolute(values, settings, folder, problems, packed)
    job: JobFile = _assembled(JobFile, values)
    for key, message, fix in problems_of(job):
        if key not in contested:
            problems.append(ConfigError(message, where=_place(settings, key) or label, fix=fix))
    return LoadedJob(job, _origins(job, settings), (*notes, *notices_of(job))), problems


def _rule_and_kind(values: Mapping[str, Any]) -> tuple[str, str]:
    """A script without a rule leaves the update to its optimizer, at a constant rate; a task has defaults."""
    rule = values.get("update.rule") or ("momentum" if values.get("job.task") else "")
    return rule, values.get("update.schedule.kind") or ("cosine" if rule else "constant")


def _settle(
    values: dict[str, Any], settings: dict[str, Setting], problems: list[ConfigError]
) -> tuple[list[str], set[str]]:
    """Drop keys whose meaning a stronger layer took away; other conflicts are problems, or notes.

    Returns the notes, and the keys that there is a problem with.
    """
    notes: list[str] = []
    found = list(conflicts(dict(values), *_rule_and_kind(values)))
    dropped: set[str] = set()
    for conflict in found:
        key, loser, winner = conflict.key, settings[conflict.key], settings.get(conflict.because)
        if conflict.grave and winner is not None and winner.level > loser.level:
            notes.append(f"{key} = {toml_value(loser.value)} ({loser.place}) is left out: {winner.place}")
            dropped.add(key)
            del values[key]
    contested: dict[str, str] = {}
    for key, because, message, fix, grave in found:
        if {key, because} & dropped or message in contested.values():
            continue
        if not grave:
            notes.append(f"{message} ({settings[key].place})")
        else:
            contested[key] = message
            problems.append(ConfigError(message, where=settings[key].place, fix=fix))
    for key in dropped:
        del settings[key]
    return notes, set(contested)


def _drop_defaults(values: dict[str, Any], settings: dict[str, Setting]) -> None:
    """Leave out keys without a meaning that say the default: a file written in full has them."""
    for key in unsaid(values, *_rule_and_kind(values)) & values.keys():
        if settings[key].level == LEVEL_FILE and values[key] == leaves(JobFile)[key].default:
            del values[key], settings[key]


def _place(settings: Mapping[str, Setting], key: str) -> str:
    """Where a key is written, or the first name in it where it is a table."""
    inside = (name for name in settings if name.startswith(key + "."))
    name = key.partition("[")[0]
    setting = settings.get(name) or settings.get(next(inside, ""))
    return setting.place if setting else ""


def _fill(values: dict[str, Any], name: str) -> None:
    """The defaults that depend on other keys."""
    values["update.rule"], values["update.schedule.kind"] = _rule_and_kind(values)
    if values.get("learners.global_batch"):
        values["learners.minibatch"] = 0
    if not values.get("job.name"):
        task = (values.get("job.task") or "").rpartition(".")[2].replace(":", "-")
        values["job.name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", name or task).strip("._-")[:64] or "job"


_PATHS: Mapping[str, Callable[[str], bool]] = {
    "run.code": os.path.isdir,
    "run.script": os.path.isfile,
    "job.init": os.path.isfile,
    "run.cwd": os.path.isdir,
}


def _make_absolute(
    values: dict[str, Any], settings: Mapping[str, Setting], folder: Path, problems: list[ConfigError], packed: bool
) -> None:
    """Paths of a file are taken from its folder, those of a flag from where the caller is."""
    if not packed:
        values.setdefault("run.cwd", "")
    for key, exists in _PATHS.items():
        if packed and key.startswith("run."):
            continue
        text = values.get(key)
        if key != "run.cwd" and not text:
            continue
        setting = settings.get(key)
        base = folder if setting is None or setting.level == LEVEL_FILE else Path.cwd()
        path = values[key] = os.path.abspath(base / os.path.expanduser(text or ""))
        if not exists(path):
            what = "folder" if exists is os.path.isdir else "file"
            where = setting.place if setting else str(folder)
            text = f"{path} is no {what}" if os.path.exists(path) else f"there is no {what} {path}"
            problems.append(ConfigError(f"{key}: {text}", where=where, fix="check the path"))
    if values.get("run.code") and not packed and os.path.isdir(values["run.code"]):
        _enter_code(values, settings, problems)


def _enter_code(values: dict[str, Any], settings: Mapping[str, Setting], problems: list[ConfigError]) -> None:
    """What a job's own code says of paths holds inside it: it lies elsewhere on each host."""
    code = values["run.code"]
    for key in ("run.script", "run.cwd"):
        if not values.get(key):
            continue
        inside = os.path.relpath(values[key], code)
        if inside == ".." or inside.startswith("../"):
            if key not in settings:
                inside = "."
            else:
                message = f"{key}: {values[key]} lies outside run.code = {toml_value(code)}"
                problems.append(ConfigError(message, where=settings[key].place, fix="name a folder that holds both"))
        values[key] = "" if inside == "." else inside


# ---- rudra.toml


def load_rudra(
    sets: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    etc: Path = ETC,
    home: Path | None = None,
) -> LoadedRudra:
    """The settings of this host and person. For tests: `etc`, and `home`, the folder of one's own file."""
    loaded, problems = _rudra_layers(sets, os.environ if environ is None else environ, etc, home)
    return _or_raise(loaded, problems, "rudra config check")


def check_rudra(path: Path | None = None) -> list[str]:
    """Every problem of one rudra.toml, or (without a path) of all layers that hold here; one line each."""
    try:
        if path is None:
            return [str(problem) for problem in _rudra_layers((), os.environ, ETC, None)[1]]
        problems: list[ConfigError] = []
        settings = _rudra_file(path, problems)
        _converted(RudraToml, settings, problems)
        _rudra_problems(settings, problems)
        return [str(problem) for problem in problems]
    except ConfigError as error:
        return [str(error)]


def own_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_CONFIG_HOME/rudra, or ~/.config/rudra."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path(os.path.expanduser("~/.config"))) / "rudra"


def _rudra_files(environ: Mapping[str, str], etc: Path, home: Path | None) -> tuple[Path, ...]:
    wanted = [
        etc / "rudra.toml",
        *sorted(etc.glob("conf.d/*.toml")),
        (home or own_folder(environ)) / "rudra.toml",
    ]
    return tuple(path for path in wanted if os.path.exists(path))


def paths_alone(environ: Mapping[str, str] | None = None, etc: Path = ETC, home: Path | None = None) -> PathsSection:
    """The folders as far as the settings can be read: for what has to go on although a file is wrong."""
    environ = os.environ if environ is None else environ
    settings: dict[str, Setting] = {}
    for path in _rudra_files(environ, etc, home):
        with contextlib.suppress(ConfigError):
            settings |= _rudra_file(path, [])
    settings |= from_environment(RudraToml, environ, [])
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        problems: list[ConfigError] = []
        value = _converted(RudraToml, {key: setting}, problems)
        if key.startswith("paths.") and not problems:
            values |= value
    config: RudraToml = _assembled(RudraToml, values)
    return config.paths


def _rudra_layers(
    sets: Sequence[str], environ: Mapping[str, str], etc: Path, home: Path | None
) -> tuple[LoadedRudra | None, list[ConfigError]]:
    problems: list[ConfigError] = []
    settings: dict[str, Setting] = {}
    files = _rudra_files(environ, etc, home)
    for path in files:
        settings |= _rudra_file(path, problems)
    settings |= from_environment(RudraToml, environ, problems)
    settings |= from_sets(RudraToml, sets, problems)
    values = _converted(RudraToml, settings, problems)
    _rudra_problems(settings, problems)
    if problems:
        return None, problems
    config: RudraToml = _assembled(RudraToml, values)
    return LoadedRudra(config, _origins(config, settings), files), problems


def _rudra_file(path: Path, problems: list[ConfigError]) -> dict[str, Setting]:
    text = read_text(path)
    return collect(RudraToml, parse_toml(text, str(path)), places_in(text, str(path)), LEVEL_FILE, problems)


def _rudra_problems(settings: Mapping[str, Setting], problems: list[ConfigError]) -> None:
    for key, named in settings.items():
        owner = owner_of(RudraToml, key)
        if owner and (bad := misnamed_entry(owner, key[len(owner) + 1 :])):
            problems.append(ConfigError(bad[0], where=named.place, fix=bad[1]))
    for key in ("head.address", "psd.listen"):
        setting = settings.get(key)
        if setting is not None and str(setting.value).startswith("ipc://"):
            try:
                check_ipc_path(str(setting.value)[len("ipc://") :])
            except ConfigError as error:
                problems.append(ConfigError(error.message, where=setting.place, fix=f"give {key} a shorter path"))


# ---- both


def _converted(
    struct: type[msgspec.Struct], settings: Mapping[str, Setting], problems: list[ConfigError]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        leaf = leaf_of(struct, key)
        assert leaf is not None
        values[key] = convert(key, leaf, setting.value, setting.place, problems)
    return values


def _assembled(struct: type[T], values: Mapping[str, Any]) -> Any:
    """The struct from values whose free tables are still one entry per name."""
    whole: dict[str, Any] = {}
    for key, value in values.items():
        if owner := owner_of(struct, key):
            whole.setdefault(owner, {})[key[len(owner) + 1 :]] = value
        else:
            whole[key] = value
    return build(struct, whole)


def _origins(struct: msgspec.Struct, settings: Mapping[str, Setting]) -> dict[str, str]:
    return {key: settings[key].place[-200:] if key in settings else "default" for key in flat(struct)}


def _rows(struct: msgspec.Struct, origins: Mapping[str, str]) -> list[Row]:
    return [(key, toml_value("" if value is None else value), origins[key]) for key, value in flat(struct).items()]


def _or_raise(loaded: Loaded | None, problems: list[ConfigError], how: str) -> Loaded:
    if loaded is not None and not problems:
        return loaded
    first, more = problems[0], len(problems) - 1
    if not more:
        raise first
    rest = f"; {more} more" + (f": {how}" if how else "")
    raise ConfigError(first.message, where=first.where, fix=(first.fix or "see the line") + rest)
