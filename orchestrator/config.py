"""Where settings come from, read once at start.

Precedence, highest first:  FLAG  >  CONFIGURATION FILE  >  ENVIRONMENT  >  DEFAULT

THE FILE BEATS THE ENVIRONMENT. Many programs do it the other way round; here a file is what an operator
decided, and a variable left over in some shell must not overrule it. When a variable seems to be ignored,
`gpuorch check-config` shows where each value came from.

The file (`--config`, or ORCH_CONFIG) is one flat TOML table of field names; the variables are ORCH_ + the
field name in capitals. An unknown name is refused, never ignored: a misspelt time limit must not become a
default in silence. An empty variable is a value, not an absent one: an empty ORCH_DATABASE_URL (a secret that
was not mounted) must not become a fresh local database. A database that nobody names lies in the data directory,
wherever that is: half of a system elsewhere would be another system.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from orchestrator.errors import ConfigError
from orchestrator.settings import (
    FIELDS,
    FIELDS_ONLY,
    SECRET,
    Settings,
    broken_relations,
    database_in,
    safe_url,
    to_text,
    variable,
)
from orchestrator.wording import in_our_words

#: Where a value came from that nobody gave.
DEFAULT = "default"
#: The same of a database that follows a data directory which somebody gave.
IN_DATA_DIR = f"{DEFAULT}, in data_dir"


@dataclass(frozen=True)
class Given:
    value: object
    source: str
    written: object  # as a person wrote it, for messages: 1e400, not inf


@dataclass(frozen=True)
class Loaded:
    settings: Settings
    sources: dict[str, str]

    def nobody_gave(self, *keys: str) -> bool:
        return all(self.sources[key] in {DEFAULT, IN_DATA_DIR} for key in keys)


@dataclass(frozen=True)
class Row:
    field: str
    value: str
    source: str
    description: str


def load(
    cli: Mapping[str, object] = MappingProxyType({}),
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Flags beat the FILE, the FILE BEATS THE ENVIRONMENT, the environment beats the defaults.

    Raises ConfigError that lists every problem found, not only the first.
    """
    problems: list[str] = []
    path = config_file or (Path(environ["ORCH_CONFIG"]) if "ORCH_CONFIG" in environ else None)
    table = _read_table(path, problems) if path else {}
    given = _environment_layer(environ, problems) | _layer(table or {}, f"file {path}", problems)
    given |= _flag_layer(cli, problems)
    given = _local_database(given, problems) | given
    # Without its file no value is really known, so nothing is said about how they relate.
    settings = _validate(given, doubtful=FIELDS if table is None else (), problems=problems)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n- ".join([f"{count} in the configuration:", *problems]))
    return Loaded(settings, {key: given[key].source if key in given else DEFAULT for key in FIELDS})


def describe(loaded: Loaded) -> list[Row]:
    """One row per setting, in the order of definition, without passwords."""
    texts = {key: to_text(getattr(loaded.settings, key)) for key in FIELDS}
    shown = {key: safe_url(text) if key in SECRET else text for key, text in texts.items()}
    return [Row(key, shown[key], loaded.sources[key], f.description or "") for key, f in FIELDS.items()]


def _environment_layer(environ: Mapping[str, str], problems: list[str]) -> dict[str, Given]:
    fields = {variable(key): key for key in FIELDS}
    ours = [name for name in environ if name.startswith("ORCH_") and name != "ORCH_CONFIG"]
    known = [(name, fields[name], environ[name]) for name in _known(ours, fields, "environment", problems)]
    return {key: Given(_from_text(key, text), f"environment {name}", text) for name, key, text in known}


def _flag_layer(cli: Mapping[str, object], problems: list[str]) -> dict[str, Given]:
    given = _layer({key: value for key, value in cli.items() if value is not None}, "flag", problems)
    texts = {key: item.value for key, item in given.items() if isinstance(item.value, str)}
    return given | {key: Given(_from_text(key, text), "flag", text) for key, text in texts.items()}


def _local_database(given: Mapping[str, Given], problems: list[str]) -> dict[str, Given]:
    if not _is_somewhere():
        problems.append("the working directory does not exist any more; change into one that does")
        return {}
    directory = given["data_dir"].value if "data_dir" in given else None
    if not isinstance(directory, str | Path) or not str(directory) or "\0" in str(directory):
        return {}  # the usual one, or none that could be one
    if _leads_to_itself(Path(directory)):
        problems.append(_field_message("data_dir", given, "must not be a link that leads to itself"))
        return {}
    url = local_database(Path(directory))
    return {"database_url": Given(url, IN_DATA_DIR, url)}


def _is_somewhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _leads_to_itself(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def local_database(data_dir: Path) -> str:
    """Relative where possible: the path of the place where a person works may hold what a URL may not."""
    absolute, here = data_dir.resolve(), Path.cwd()
    return database_in(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _layer(values: Mapping[str, object], source: str, problems: list[str]) -> dict[str, Given]:
    return {key: Given(values[key], source, values[key]) for key in _known(values, FIELDS, source, problems)}


def _known(names: Iterable[str], fields: Iterable[str], where: str, problems: list[str]) -> list[str]:
    """Those of `names` that exist; each other one is a problem, with what was probably meant."""
    found, allowed = list(names), list(fields)
    for name in found:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"unknown setting {name} ({where}){hint}")
    return [name for name in found if name in allowed]


def _read_table(path: Path, problems: list[str]) -> dict[str, object] | None:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"cannot read the configuration file {path}: {error.strerror}")
    except (ValueError, RecursionError) as error:  # syntax, not UTF-8, absurd numbers or nesting
        problems.append(f"the configuration file {path} is not valid TOML: {error}")
    return None


def _validate(given: Mapping[str, Given], doubtful: Iterable[str], problems: list[str]) -> Settings:
    """The settings; when this adds to `problems`, bad values were replaced by defaults to find more."""
    values, bad = {key: item.value for key, item in given.items()}, set(doubtful)
    try:
        settings = Settings.model_validate(values, context=FIELDS_ONLY)
    except ValidationError as error:
        details = [(str(d["loc"][0]), _located(d["loc"], in_our_words(d))) for d in error.errors()]
        problems += [_field_message(key, given, message) for key, message in details]
        refused = {key for key, _ in details}
        rest = {key: value for key, value in values.items() if key not in refused}
        settings, bad = Settings.model_validate(rest, context=FIELDS_ONLY), bad | refused
    problems += broken_relations(settings, bad)
    return settings


def _located(path: tuple[int | str, ...], message: str) -> str:
    """With the place inside a table; in a list there is nothing to name."""
    inside = ".".join(part for part in path[1:] if isinstance(part, str))
    return f"{inside}: {message}" if inside else message


def _field_message(key: str, given: Mapping[str, Given], message: str) -> str:
    """About what somebody gave: of a database that follows its directory, the directory."""
    item = given[key]
    if item.source == IN_DATA_DIR:
        advice = "choose another directory, or give database_url"
        return _field_message(
            "data_dir", given, f"the database there, {_shown(key, item.written)}, {message}; {advice}"
        )
    return f"{key} = {_shown(key, item.written)} ({item.source}): {message}"


def _shown(key: str, value: object) -> str:
    if isinstance(value, str):  # whatever the key: a URL may sit in the wrong variable
        value = safe_url(value)
    elif key in SECRET:
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _from_text(key: str, text: str) -> object:
    """What the text means for this field; text that does not fit stays as it is, to be refused."""
    kind = FIELDS[key].annotation
    if kind is int and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if kind is float and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    if key == "worker_handlers":
        return tuple(part.strip() for part in text.split(",")) if text else ()
    return text
