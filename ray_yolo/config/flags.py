"""Command-line flags derived from a configuration model, with YOLOv5's spellings.

A flag's help is the field's docstring; its value remains text until the model parses it.
"""

from __future__ import annotations

import argparse
import functools
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from reprlib import repr as short
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, get_args

from pydantic import BaseModel

from ray_yolo import __version__
from ray_yolo.config.model_facts import MODELS, facts_of
from ray_yolo.config.named_recipes import RECIPES, YOLOV5_FILES, named_recipe
from ray_yolo.config.recipe import Recipe, family_defaults
from ray_yolo.config.sections import LossConfig
from ray_yolo.config.settings import (
    DEFAULT,
    TRANSPARENT,
    ConfigField,
    SourcedValue,
    canonical,
    config_fields,
    read_config_file,
    resolve_config,
)
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.core.errors import ConfigError, InputError

_log = logging.getLogger(__name__)
_OTHER_SCALE = 10.0  # a box gain that differs from the default by this factor is that of another loss
Config = TypeVar("Config", bound=BaseModel)

ALIASES = {
    "imgsz": ("--img", "--img-size"),
    "batch_size": ("--batch",),
    "model": ("--cfg",),
    "registered_name": ("--register",),
    "max_hours": ("--hours",),
    "noval": ("--notest",),
    "cache": ("--cache-images",),
    "split": ("--task",),
    "optimizer.name": ("--optimizer",),
    "schedule.cos_lr": ("--cos-lr",),
    "loss.label_smoothing": ("--label-smoothing",),
    "evaluate.confidence": ("--conf", "--conf-thres"),
    "evaluate.iou": ("--iou-thres", "--iou"),
    "evaluate.max_detections": ("--max-det",),
    "evaluate.batch_size": ("--batch-size", "--batch"),
    "confidence": ("--conf", "--conf-thres"),
    "iou": ("--iou-thres",),
    "max_detections": ("--max-det",),
    "format": ("--include",),
}
"""YOLOv5's spellings of fields, in addition to the field's own name."""

ALONE = {"cache": "ram", "resume": "auto"}
"""Flags with an optional value, and their value without one."""

SEVERAL = ("imgsz", "freeze", "changes", "classes", "set_a", "set_b")
"""Flags that take one or more values."""

COLLECTED = ("changes", "classes", "set_a", "set_b")
"""Those of them that may be given again, with more values; all other flags override their earlier value."""

FILES = {
    "--config": "YAML file of settings by path",
    "--hyp": "the same for the recipe only, overrides --config; YOLOv5's hyp files work unchanged",
}
"""Flags that name a file of settings; later ones override earlier ones."""

CODE = ("callbacks",)
"""Settings that run user code: allowed on the command line, never in a file."""

METAVARS = {
    "data": "YAML|DIR", "model": "NAME|YAML", "weights": "FILE", "source": "PATH", "callbacks": "FUNCTION",
    "changes": "EPOCH:PATH=VALUE",
    "num_workers": "N|LOW-HIGH|auto", "address": "HOST:PORT", "project": "DIR", "storage_path": "DIR|ADDRESS",
    "resume": "RUN", "mlflow_uri": "URI", "imgsz": "PIXELS", "freeze": "N", "classes": "N", "space": "NAME|YAML",
    "warm_start": "PATH", "set_a": "PATH=VALUE", "set_b": "PATH=VALUE",
}
"""Placeholders of flag values in the help text, where the type is not enough."""

_METAVARS_BY_TYPE = {int: "N", float: "X", str: "NAME"}

JSON_HELP = "print the result as one JSON document on stdout, and all else on stderr (docs/json.md)"

OPTIONS = (*FILES, "--set", "--dry-run", "--device", "--version", "--help")
"""Flags of every command that are no fields."""


class Command(NamedTuple, Generic[Config]):
    """The flags of one command."""

    prog: str
    description: str
    model: type[Config]
    paths: Sequence[str]  # config paths with a flag of their own; --set reaches the others
    switches: Mapping[str, tuple[str, str]] = {}  # flag without a value -> (path, value) that it sets
    unsupported: Mapping[str, str] = {}  # flag of YOLOv5 that is refused -> what to do instead
    arguments: Sequence[str] = ()  # config paths of the values that are given without a flag
    # Settings of `--from RUN[@EPOCH]`, which all others override; called with its value and the other settings
    inherit: Callable[[str, Mapping[str, SourcedValue]], dict[str, SourcedValue]] | None = None
    has_json: bool = False  # its answer may be a document, with --json

    @property
    def flags(self) -> dict[str, str]:
        """Flag -> the config path that it sets, or the flag itself if it sets none."""
        meanings: dict[str, str] = {}
        for path in self.paths:
            for flag in flag_name(path):
                meanings[flag] = path
        for flag, (path, _) in self.switches.items():
            meanings[flag] = path
        options = (*OPTIONS, "--recipe") if has_recipe(self.model) else OPTIONS
        if self.inherit:
            options = (*options, "--from")
        if self.has_json:
            options = (*options, "--json")
        for flag in (*self.unsupported, *options):
            meanings[flag] = flag
        return meanings


class Parsed(NamedTuple, Generic[Config]):
    """A parsed command line; `origins` holds the source of each value by config path."""

    config: Config
    origins: dict[str, str]
    dry_run: bool
    given: Mapping[str, SourcedValue]  # all values that are no defaults, by config path
    json: bool  # answer with a document


def has_recipe(model: type[BaseModel]) -> bool:
    """Whether a configuration contains a recipe."""
    return "epochs" in config_fields(model)


def flag_name(path: str) -> tuple[str, ...]:
    """Flags of a field: its own name with hyphens (top-level fields only), then YOLOv5's spellings."""
    own = () if "." in path else (f"--{path.replace('_', '-')}",)
    return own + ALIASES.get(path, ())


def parse(command: Command[Config], argv: Sequence[str] | None = None) -> Parsed[Config]:
    """Configuration of a command line: defaults <- --from <- --recipe <- --config <- --hyp <- flags <- --set, validated
    once.

    Raises:
        InputError: for a flag or a file that cannot be used; ConfigError for values, with the origin of each.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    for word in words:
        if word.startswith("-") and word.endswith("=--"):  # argparse drops this value and crashes
            raise InputError(f"{word.removesuffix('=--')}: a value cannot be '--'; see {command.prog} --help")
    options, unknown = build_parser(command).parse_known_args(words, argparse.Namespace(given={}))
    if unknown:
        raise InputError(_explain_unknown(unknown, command))
    is_json = command.has_json and options.json
    if is_json and options.dry_run:
        raise InputError("--json: a dry run has no result; leave out one of them")
    assignments: dict[str, SourcedValue] = {}
    for text in options.set:
        _give(assignments, *_read_assignment(text))
    given: dict[str, SourcedValue] = {}  # a later source overrides an earlier one
    for flag in FILES:
        path = getattr(options, flag.strip("-"))
        if path:
            file = PurePath(path).name
            if file in YOLOV5_FILES and not Path(path).exists():
                raise InputError(f"{flag} {path}: no such file; --recipe {YOLOV5_FILES[file]} has its settings")
            settings = read_config_file(path)
            _check_allowed(settings, flag, config_fields(command.model))
            given |= settings
    given |= options.given
    given |= assignments
    inherited = command.inherit(options.source, given) if command.inherit and options.source else {}
    if has_recipe(command.model):
        given |= _model_of_weights(inherited | given)
        if options.recipe:  # its settings come first, but depend on the model
            given = _named_settings(options.recipe, inherited | given) | given
    given = inherited | given
    config, origins = resolve_config(command.model, given)
    if has_recipe(command.model):
        _warn_of_gain(vars(config)["recipe"], given)
        _warn_of_freeze(given)
    return Parsed(config, origins, options.dry_run, given, is_json)


def _warn_of_gain(recipe: Recipe, given: Mapping[str, SourcedValue]) -> None:
    """Warn of a box gain of another loss: files of settings for models with anchors have 0.05, for others 7.5."""
    if "loss.box" not in given:
        return
    default = family_defaults(recipe.model).get("loss.box", LossConfig().box)
    if default / _OTHER_SCALE < recipe.loss.box < default * _OTHER_SCALE:
        return
    origin = given["loss.box"].origin
    _log.warning("%s: loss.box %g is a gain for the loss of other models; the default of %s is %g. Leave the loss "
                 "gains out of the file, or take --recipe", origin, recipe.loss.box, recipe.model, default)


def _warn_of_freeze(given: Mapping[str, SourcedValue]) -> None:
    """Warn of a list with one layer: YOLOv5's opt.yaml has [10] for the first ten layers, and [0] for none."""
    freeze = given.get("freeze")
    if freeze is None or not isinstance(freeze.value, list) or len(freeze.value) != 1:
        return
    [layer] = freeze.value
    _log.warning("%s: freeze: [%s] freezes layer %s alone. In YOLOv5's opt.yaml it means the first %s layers: for "
                 "these, write freeze: %s", freeze.origin, layer, layer, layer, layer)


def _model_of_weights(given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """The model whose name the file of `weights` has, as yolov5m.pt, unless a model is given."""
    if "model" in given or "weights" not in given:
        return {}
    weights = given["weights"]
    name = PurePath(str(weights.value)).stem
    return {"model": SourcedValue(name, weights.origin)} if name in MODELS else {}


def _named_settings(name: str, given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """The settings of `--recipe`, which differ between models with and without anchors."""
    default = SourcedValue(Recipe.model_fields["model"].default, DEFAULT)
    facts = facts_of(str(given.get("model", default).value))
    has_anchors = facts is None or facts.has_anchors  # None: a YAML file, which is not read here
    return named_recipe(name, has_anchors=has_anchors)


def _check_allowed(given: Mapping[str, SourcedValue], flag: str, fields: Mapping[str, ConfigField]) -> None:
    """Check the settings of a file. Files are shared, so none may run code, and --hyp may set the recipe only.

    Raises:
        ConfigError: naming the line of a setting that this kind of file must not have.
    """
    for path, item in given.items():
        flags = flag_name(path)
        spelled = flags[0] if flags else f"--set {path}"
        runs_code = path in CODE and item.value not in (None, "")  # '' is what a dry run prints
        if runs_code:
            raise ConfigError(f"{item.origin}: {path} runs code, which a file must not do; give it as {spelled}")
        section = fields[path].keys[0] if path in fields else ""  # an unknown path is refused later
        if flag == "--hyp" and section in ("placement", "sweep", "comparison"):
            raise ConfigError(f"{item.origin}: {path} is not a setting of the recipe, which is all that --hyp takes; "
                              f"give it as {spelled}, or in a --config file")


def build_parser(command: Command[Any]) -> argparse.ArgumentParser:
    """The argparse parser of a command; it collects values as text in `given` of its namespace."""
    shown = "".join(f"{path.upper()} " for path in command.arguments)
    parser = _Parser(prog=command.prog, description=command.description, allow_abbrev=False,
                     usage=f"%(prog)s {shown}[--flag VALUE ...] [--set PATH=VALUE ...]", add_help=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    fields = config_fields(command.model)
    for path in command.arguments:
        parser.add_argument(path, action=_Note, metavar=path.upper(), help=_help(fields[path]))
    required = [path for path in command.paths if fields[path].info.is_required()]
    optional = [path for path in command.paths if path not in required]
    groups: dict[str, argparse._ArgumentGroup] = {}
    for path in (*required, *optional):
        field = fields[path]
        title = field.keys[0] if field.keys[0] in TRANSPARENT else "settings"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_field(groups[title], path, field)
    _add_other_flags(parser.add_argument_group("other flags of YOLOv5"), command)
    nested = []
    for path, field in fields.items():
        if "." in path and path not in command.paths:
            nested.append(f"{path:<30}{_help(field)}")
    if nested:
        parser.add_argument_group("settings without a flag, for --set and files", "\n".join(nested))
    group = parser.add_argument_group("options of every command")
    _add_options(group, trains=has_recipe(command.model))
    if command.has_json:
        group.add_argument("--json", action="store_true", help=JSON_HELP)
    if command.inherit:
        group.add_argument("--from", dest="source", metavar="RUN[@EPOCH]", help=(
            "fork a run: its recipe, which all other settings override, and its weights (of its best epoch, or at the "
            "end of EPOCH, counted from 0 as in epochN.pt) as initial weights of a new schedule"))
    return parser


def _add_options(group: argparse._ArgumentGroup, *, trains: bool) -> None:
    """The flags that are no fields. Those about recipes are hidden where there is no recipe."""
    for flag, text in FILES.items():
        is_usable = trains or flag != "--hyp"
        example = ", e.g. optimizer: {lr0: 0.02}" if trains and flag == "--config" else ""
        group.add_argument(flag, action=_Once, metavar="FILE",
                           help=f"{text}{example}" if is_usable else argparse.SUPPRESS)
    if trains:
        group.add_argument("--recipe", action=_Once, metavar="NAME", help=(
            f"a named recipe of YOLOv5, which files and flags override: {', '.join(RECIPES)}"))
    group.add_argument("--set", metavar="PATH=VALUE", action="append", default=[],
                       help="one setting, overrides all others")
    group.add_argument("--dry-run", action="store_true",
                       help="run all checks that need no cluster, print every setting with its origin, and stop")
    group.add_argument("--version", action="version", version=f"ray_yolo {__version__}")
    group.add_argument("-h", "--help", action="help", help="show this help message and exit")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


class _Note(argparse.Action):
    """Stores the value as text, with the flag as the user spelled it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        value = self.const if self.nargs == 0 else values
        if self.dest == "imgsz":  # YOLOv5 accepts a train size and a test size
            value = list(dict.fromkeys(value))
            if len(value) > 1:
                raise InputError(f"{option_string} {' '.join(values)}: training and validation use the same size; "
                                 "give one number")
        if self.dest in COLLECTED and self.dest in namespace.given:
            earlier = namespace.given[self.dest].value
            value = [*(earlier if isinstance(earlier, list) else [earlier]), *value]
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        _give(namespace.given, self.dest, SourcedValue(value, option_string or self.dest.upper(), alone=True))


def _give(given: dict[str, SourcedValue], path: str, new: SourcedValue) -> None:
    """Add a setting. The same flag again overrides the first one, as where a script appends its arguments.

    Raises:
        InputError: if another flag has given it another value.
    """
    earlier = given.get(path)
    if earlier is not None and earlier.value != new.value and earlier.origin != new.origin:
        raise InputError(f"{new.origin}: is the same setting as {earlier.origin}, with another value; give one of them")
    given[path] = new


class _Once(argparse.Action):
    """Stores the value of a flag whose settings come from elsewhere; another value is refused, not merged."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        if earlier not in (None, values):
            raise InputError(f"{option_string} {values}: {option_string} {earlier} is given already, and one is read; "
                             "leave one of them out")
        setattr(namespace, self.dest, values)


class _DeviceRule(NamedTuple):
    """What --device does in a command."""

    settings: Mapping[str, Mapping[str, str]]  # value -> the settings that it stands for, by path
    advice: str  # what a user of another value reads
    help: str


def _device_rule(command: Command[Any]) -> _DeviceRule:
    fields = config_fields(command.model)
    if "num_workers" in command.paths:
        return _DeviceRule({"cpu": {"gpus_per_worker": "0"}, "0": {"num_workers": "0", "gpus_per_worker": "1"}},
                           "Ray assigns the devices; set their number with --num-workers and --gpus-per-worker",
                           "cpu: same as --gpus-per-worker 0; 0: in this process, on its first GPU, same as "
                           "--num-workers 0 --gpus-per-worker 1; for several, Ray chooses the GPUs")
    if "gpus_per_worker" in fields:
        return _DeviceRule({"cpu": {"gpus_per_worker": "0"}},
                           "Ray assigns the devices; set their number with --gpus-per-worker",
                           "cpu: same as --gpus-per-worker 0; Ray chooses GPUs itself")
    if "gpus_per_replica" in fields:
        return _DeviceRule({"cpu": {"gpus_per_replica": "0"}},
                           "Ray assigns the devices; set their number with --gpus-per-replica",
                           "cpu: same as --gpus-per-replica 0, the default")
    return _DeviceRule({"cpu": {}}, "this command runs on the CPU; omit it", "cpu only: this command uses no GPU")


class _Device(argparse.Action):
    """YOLOv5's --device, as far as it names what Ray does not assign: the CPU, or the first GPU of this machine.

    `const`: its `_DeviceRule`.
    """

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        rule: _DeviceRule = self.const
        if values not in rule.settings and values != "":
            several = values.count(",") + 1
            advice = f"Ray assigns the devices; use --num-workers {several}" if (
                several > 1 and "--num-workers" in rule.advice) else rule.advice
            raise InputError(f"--device {values}: {advice}")
        for path, value in rule.settings.get(values, {}).items():
            _give(namespace.given, path, SourcedValue(value, f"--device {values}"))


class _UnsupportedFlag(argparse.Action):
    """Refuses a flag; its help states the alternative."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        raise InputError(f"{option_string}: {self.help}")


def _add_field(group: argparse._ArgumentGroup, path: str, field: ConfigField) -> None:
    add = functools.partial(group.add_argument, *flag_name(path), dest=path, action=_Note, help=_help(field))
    if field.types == (bool,):
        add(nargs=0, const="true")
        return
    metavar = METAVARS.get(path) or _metavar(field)
    if path in ALONE:
        add(metavar=metavar, nargs="?", const=ALONE[path])
    elif path in SEVERAL:
        add(metavar=metavar, nargs="+")
    else:
        add(metavar=metavar)


def _metavar(field: ConfigField) -> str:
    """The placeholder of a value by the field's type: 'N', 'X|auto', 'none|ram|disk'."""
    kinds = [_METAVARS_BY_TYPE[kind] for kind in field.types if kind in _METAVARS_BY_TYPE]
    return "|".join([*kinds, *field.choices]) or "VALUE"


def _help(field: ConfigField) -> str:
    """A field's docstring, and its default unless that is empty or false."""
    text = (field.info.description or "").replace("%", "%%")  # argparse formats it
    if field.info.is_required():
        return text
    default = str(field.info.default)
    if default in ("", "None", "()", "False"):
        return text
    return f"{text} [{default}]"


def _add_other_flags(group: argparse._ArgumentGroup, command: Command[Any]) -> None:
    for flag, (path, value) in command.switches.items():
        group.add_argument(flag, dest=path, action=_Note, nargs=0, const=value, help=f"same as --set {path}={value}")
    rule = _device_rule(command)
    group.add_argument("--device", action=_Device, const=rule, help=rule.help)
    for flag, answer in command.unsupported.items():
        group.add_argument(flag, action=_UnsupportedFlag, nargs="?", metavar="X", help=answer)


def _read_assignment(text: str) -> tuple[str, SourcedValue]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: write --set PATH=VALUE, e.g. --set optimizer.lr0=0.02")
    path = canonical(key)
    return path, SourcedValue(None if value == "null" else value, f"--set {key}", alone=True)


def _explain_unknown(words: Sequence[str], command: Command[Any]) -> str:
    """The message for unknown words: about the first flag among them, else about the first word."""
    flags = [word for word in words if word.startswith("-")]
    if not flags:
        word = words[0]
        if "format" in command.paths and word in get_args(command.model.model_fields["format"].annotation):
            return f"unexpected {word}: a command writes one format; run it again with --format {word}"
        if "=" in word:
            return f"unexpected {short(word)}; write --set {shlex.quote(word)}"
        return f"unexpected {short(word)}; values follow their flags, see {command.prog} --help"
    flag = flags[0].partition("=")[0]
    path = canonical(flag.strip("-").replace("-", "_"))
    fields = config_fields(command.model)
    if path in fields and path not in command.paths:
        return f"{flag} is not a flag; write --set {path}=VALUE"
    spellings: dict[str, str] = {}
    for setting in fields:
        section, _, name = setting.rpartition(".")
        if section:  # a setting of a section has no flag, but users try its name as one
            spellings[f"--{name.replace('_', '-')}"] = f"--set {setting}=VALUE"
    for name in command.flags:  # last: a flag is nearer than a setting of its name
        spellings[name] = name
    return f"unknown flag {flag}{did_you_mean(flag, spellings)}"
