"""Command-line flags and config keys made from frozen dataclasses: a field is a flag, the docstring under it its help.

    parser = Parser(prog="allspan serve")
    add_options(parser, CacheConfig)            # --page-size, --kv-cache-dtype, --kv-cache-bytes
    namespace = parser.parse(argv)              # --config FILE is read here; flags win over it
    cache = build(CacheConfig, namespace)

`max_model_len` becomes `--max-model-len`; a bool `x` becomes `--x` and `--no-x`; a tuple takes a comma-separated list.
Whatever is wrong is one line that names the flag or key, and exit code 2.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import sys
import textwrap
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster import logs
from allspan.protos.config.adapters import split_modules
from allspan.protos.config.hf_overrides import parse_overrides
from allspan.protos.config.known_elsewhere import flag_hint
from allspan.protos.config.speculation import parse_speculation

T = TypeVar("T")
Convert = Callable[[str], Any]


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and its bases, on one line; fields without one are missing."""
    docs: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        docs |= _own_field_docs(base)
    return docs


@functools.cache
def _own_field_docs(cls: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


class _Help(argparse.Action):
    """`--help`: an overview where flags come in groups, else everything; also `--help GROUP`, `FLAG` or `all`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.help_on(values), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with one-line errors, nearest names for unknown flags, groups of flags that
    `--help` explains one by one, and `--config FILE`."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.is_intermixed = False
        """Whether words without a flag may stand between flags."""
        self.named_groups: dict[str, argparse._ArgumentGroup] = {}
        help_text = "Explains a group of flags, a single one, or all."
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            const="",
            default=argparse.SUPPRESS,
            metavar="GROUP",
            help=help_text,
        )

    def group(self, name: str, title: str) -> argparse._ArgumentGroup:
        """Takes flags as a parser does; `--help NAME` shows them alone."""
        self.named_groups[name] = self.add_argument_group(title)
        return self.named_groups[name]

    def help_on(self, what: str) -> str:
        """Returns the text that `--help WHAT` prints. Exits with code 2 when there is no such group or flag."""
        if what == "all" or not (what or self.named_groups):
            return self.format_help()
        if not what:
            return self._overview()
        if what in self.named_groups:
            group = self.named_groups[what]
            return self._explained(f"{self.prog}, {what}: {group.title}", group._group_actions)
        flag = f"--{what.lstrip('-')}"
        if flag in self._option_string_actions:
            return self._explained("", [self._option_string_actions[flag]])
        known = [name.lstrip("-") for name in self._option_string_actions] + list(self.named_groups)
        groups = ", ".join(self.named_groups) or "not there"
        return self.error(f"--help: no group or flag {what!r}{nearest(what, known)}; groups are {groups}")

    def _explained(self, heading: str, actions: Sequence[argparse.Action]) -> str:
        formatter = self._get_formatter()
        formatter.start_section(heading or None)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()

    def _overview(self) -> str:
        """Returns one screen: the flags that stand in no group, and each group's flags by name."""
        grouped = {action for group in self.named_groups.values() for action in group._group_actions}
        first = self._explained("", [action for action in self._actions if action not in grouped])
        positionals = " ".join(f"[{action.metavar}]" for action in self._get_positional_actions())
        lines = [f"usage: {self.prog} {positionals} [flags]", "", self.description or "", "", first.rstrip(), ""]
        for name, group in self.named_groups.items():
            flags = " ".join(next(o for o in a.option_strings if o.startswith("--")) for a in group._group_actions)
            lines += textwrap.wrap(f"{name:<10} {flags}", 100, subsequent_indent=" " * 11, break_on_hyphens=False)
        names = "|".join(self.named_groups)
        return "\n".join([*lines, "", f"{self.prog} --help {names} explains these; --help all, everything.", ""])

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def add_config(self) -> None:
        """Adds `--config FILE`, a TOML or JSON table of the other flags' names."""
        help_text = "Reads a TOML, YAML or JSON table of these flags' names; flags win over it."
        self.add_argument("--config", metavar="FILE", help=help_text)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The values of all options: default, then config file, then flag. Exits with code 2 on what is not right."""
        words = sys.argv[1:] if argv is None else argv
        for word in itertools.takewhile(lambda word: word != "--", words):
            if word.startswith("-") and (hint := self._hint(name := word.partition("=")[0])):
                self.error(f"unknown flag {name}: {hint}")
        read = self.parse_known_intermixed_args if self.is_intermixed else self.parse_known_args
        namespace, unknown = read(argv)
        if unknown:
            self._refuse(unknown[0])
        if path := getattr(namespace, "config", None):
            self.set_defaults(**self._read_config(Path(path)))
            namespace, _ = read(argv)
        return namespace

    def _hint(self, name: str) -> str:
        """Returns what to use in place of a flag that other programs have and this one has not, or ""."""
        known = self._option_string_actions
        return "" if name in known else flag_hint(name, known)

    def _refuse(self, argument: str) -> NoReturn:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        known = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown flag {name}{nearest(name, known)}; {self.prog} --help lists all")

    def _read_config(self, path: Path) -> dict[str, Any]:
        actions = {a.dest: a for a in self._actions if a.dest not in ("help", "config")}
        values: dict[str, Any] = {}
        for key, value in self._load_table(path).items():
            action = actions.get(key.replace("-", "_"))
            if action is None:
                if hint := self._hint(f"--{key.replace('_', '-')}"):
                    self.error(f"{path}: unknown key {key!r}: {hint}")
                names = [dest.replace("_", "-") for dest in actions]
                self.error(f"{path}: unknown key {key!r}{nearest(key.replace('_', '-'), names)}")
            values[action.dest] = self._config_value(path, key, value, action)
        return values

    def _load_table(self, path: Path) -> dict[str, Any]:
        try:
            read: Callable[[str], Any] = _READERS.get(path.suffix) or tomllib.loads
            table = read(path.read_text(encoding="utf-8"))
        except ModuleNotFoundError as error:
            self.error(
                f"--config {path}: the Python package {error.name!r} is missing; use TOML or JSON, or install it"
            )
        except (OSError, ValueError) as error:
            self.error(f"--config {path}: {' '.join(str(error).split())}")
        if not isinstance(table, dict):
            self.error(f"--config {path}: must hold a table of flag names, is a {type(table).__name__}")
        return {str(key): value for key, value in table.items()}

    def _config_value(self, path: Path, key: str, value: Any, action: argparse.Action) -> Any:
        if isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                self.error(f"{path}: {key} is {value!r}, must be true or false")
            return value
        if value is None or isinstance(value, (bool, dict)):
            self.error(f"{path}: {key} is {json.dumps(value)}, must be a plain value")
        text = ",".join(map(_item_text, value)) if isinstance(value, list) else str(value)
        try:
            converted = action.type(text) if callable(action.type) else text
        except (argparse.ArgumentTypeError, ValueError) as error:
            self.error(f"{path}: {key} {error}")
        if action.choices is not None and converted not in action.choices:
            self.error(f"{path}: {key} is {value!r}, must be one of {', '.join(map(str, action.choices))}")
        return converted


class _Repeated(argparse.Action):
    """A list's flag given again adds to what it was given first, rather than to the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, self.default)
        if self.nargs == "+":
            values = tuple(itertools.chain(*values))
        setattr(namespace, self.dest, values if before is self.default else (*before, *values))


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_READERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".yaml": _from_yaml, ".yml": _from_yaml}
"""The readers of configuration files by the end of the file's name; any other is TOML."""


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean A or B?`, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


JSON_FIELDS: Mapping[str, Convert] = {"hf_overrides": parse_overrides, "speculative_config": parse_speculation}
"""Fields whose value is the text of a JSON object, and what reads it."""
MODULE_FIELDS = ("lora_modules",)
"""Fields that are lists of NAME=PATH or JSON objects, whose flag takes several words as well."""


def add_options(
    parser: argparse._ActionsContainer,
    cls: type,
    skip: Sequence[str] = (),
    aliases: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
    choices: Mapping[str, Sequence[Any]] = types.MappingProxyType({}),
    limits: Mapping[str, tuple[float, float]] = types.MappingProxyType({}),
    optional: bool = False,
) -> None:
    """Adds one option for each field of the dataclass `cls`; `aliases`, `choices` and (inclusive) `limits` by field
    name.

    `optional`: what is not given is None instead of the field's default.
    """
    docs, hints = field_docs(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        names = [f"--{field.name.replace('_', '-')}", *aliases.get(field.name, ())]
        required = field.default is dataclasses.MISSING
        default = None if required or optional else field.default
        help_text = docs.get(field.name, "").replace("%", "%%")
        if not required and default not in ((), "", None, False):
            help_text += f" (default: {_shown(default)})"
        kind = _plain(hints[field.name])
        if kind is bool:
            parser.add_argument(
                *names, dest=field.name, action=argparse.BooleanOptionalAction, default=default, help=help_text
            )
            continue
        allowed = choices.get(field.name) or (get_args(kind) if get_origin(kind) is Literal else None)
        parser.add_argument(
            *names,
            dest=field.name,
            type=_TEXTS[field.name] if field.name in _TEXTS else _converter(kind, allowed, limits.get(field.name)),
            metavar=_METAVARS.get(field.name) or "|".join(map(str, allowed or ())) or _metavar(kind),
            nargs="+" if field.name in MODULE_FIELDS else None,
            action=_Repeated if get_origin(kind) is tuple else "store",
            required=required,
            default=default,
            help=help_text,
        )


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def build(cls: type[T], namespace: argparse.Namespace, **given: Any) -> T:
    """The dataclass from parsed options; `given` values win, fields without an option keep their default."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {name: value for name, value in vars(namespace).items() if name in names}
    return cls(**(values | given))


def _json_object(read: Convert) -> Convert:
    """Converts what a flag is given by checking it."""

    def convert(text: str) -> str:
        try:
            read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None
        return text

    return convert


def _modules(text: str) -> tuple[str, ...]:
    """The adapters of one word: one, or several with commas between them."""
    try:
        return split_modules(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None


_TEXTS: Mapping[str, Convert] = {
    **{name: _json_object(read) for name, read in JSON_FIELDS.items()},
    **dict.fromkeys(MODULE_FIELDS, _modules),
}
"""The readers of fields whose text has a form of its own."""
_METAVARS = dict.fromkeys(JSON_FIELDS, "JSON") | dict.fromkeys(MODULE_FIELDS, "NAME=PATH")


def _item_text(item: Any) -> str:
    """An entry of a list in a configuration file as a flag has it."""
    return json.dumps(item) if isinstance(item, dict) else str(item)


def _plain(kind: Any) -> Any:
    """`X | None` is X: a missing flag is None."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [part for part in get_args(kind) if part is not type(None)]
    return kind


def _metavar(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])},…"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _converter(kind: Any, allowed: Sequence[Any] | None, limits: tuple[float, float] | None) -> Convert:
    if get_origin(kind) is tuple:
        item = _converter(get_args(kind)[0], allowed, limits)
        return lambda text: tuple(item(part.strip()) for part in text.split(",") if part.strip())
    base: Convert = type(allowed[0]) if get_origin(kind) is Literal and allowed else kind
    words = {int: "an integer", float: "a number"}

    def convert(text: str) -> Any:
        try:
            value = base(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {text!r}, must be {words.get(kind, 'valid')}") from None
        if allowed and value not in allowed:
            raise argparse.ArgumentTypeError(f"is {text!r}, must be one of {', '.join(map(str, allowed))}")
        if limits and not limits[0] <= value <= limits[1]:
            raise argparse.ArgumentTypeError(f"is {text}, must be from {limits[0]:.15g} to {limits[1]:.15g}")
        return value

    return convert


def fail(prog: str, message: str, code: int = 1) -> NoReturn:
    """Ends the program with one line on standard error."""
    text = f"{prog}: {' '.join(message.split())}"
    with contextlib.suppress(OSError):  # standard error is closed, or its disk full
        print(logs.json_line("launcher", text, "error") if logs.is_json() else text, file=sys.stderr, flush=True)
    raise SystemExit(code)
