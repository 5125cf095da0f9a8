"""The command line of the scripts: a field of a dataclass is an option, a bad one ends the program in a
sentence.

Left out: subcommands, lists, configuration files. To copy into another project: this file alone.
"""

import argparse
import difflib
import inspect
import math
import re
import sys
import typing
from pathlib import Path


def parse_args(
    config_class,
    argv: list[str] | None = None,
    presets: dict[str, dict] | None = None,
    about: str | None = None,
):
    """An instance of the dataclass from the command line; an option outranks the preset, that the default.
    Presets joined by + are laid over each other, the last on top.

    A field is one line, `name: type = default  # unit, meaning`, and an option of its own name, with `_` or
    `-`; a bool is --tool / --no-tool; `none` is None where the type allows it. Bad input: see fail. about:
    the text above the options, by default the docstring of the dataclass's file.
    """
    kinds, presets = typing.get_type_hints(config_class), presets or {}
    source = "".join(inspect.getsource(c) for c in config_class.__mro__[:-1])
    comment = dict(re.findall(r"^    (\w+)\s*:[^#\n]*#\s*(.*)$", source, re.M))
    about = about or inspect.getmodule(config_class).__doc__
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.formatter_class, parser.error = argparse.RawDescriptionHelpFormatter, fail
    parser.argument_default = argparse.SUPPRESS  # only what was typed comes back
    for name, kind in kinds.items():
        default = f"default {getattr(config_class, name)}" if hasattr(config_class, name) else "required"
        text = f"{comment.get(name, '')} [{default}]".replace("%", "%%")
        how = {"type": lambda text, kind=kind: _read(text, kind)}
        how = {"action": argparse.BooleanOptionalAction} if bool in (kind, *typing.get_args(kind)) else how
        parser.add_argument(*sorted({f"--{name}", f"--{name.replace('_', '-')}"}), help=text, **how)
    if presets and "preset" not in kinds:
        parser.add_argument("--preset", help=f"settings by name: {', '.join(presets)}")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], parser._option_string_actions, n=1)
        fail(f"unknown option {unknown[0]!r}; " + (f"did you mean {near[0]}?" if near else "see --help"))
    values, named = {}, getattr(given, "preset", getattr(config_class, "preset", "")) or ""
    for preset in filter(None, named.split("+")):
        if preset not in presets:
            fail(f"there is no preset {preset!r}; choose from {', '.join(presets)}, or join two by +")
        values |= presets[preset]
    values = {k: v for k, v in {**values, **vars(given)}.items() if k in kinds}
    for name in (k for k in kinds if k not in values and not hasattr(config_class, k)):
        fail(f"--{name} is required: {comment.get(name, 'it has no default')}")
    return config_class(**values)


def _read(text: str, kind):
    first, *none = typing.get_args(kind) or [kind]  # int | None
    try:
        return None if none and text.lower() == "none" else first(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {inspect.formatannotation(kind)}") from None


def check_values(config, positive="", not_negative="", choices: dict | None = None, bounds="") -> None:
    """Ends the program (see fail) for a field, of those named, that is not above 0, is below 0, or is no
    choice. Infinity is for bounds only, where it stands for none."""
    for name in f"{positive} {not_negative}".split():
        value, above = getattr(config, name), name in positive.split()
        if not (value > 0 if above else value >= 0):
            fail(f"--{name} {value}: take {'more than 0' if above else '0 or more'}")
        if value == math.inf and name not in bounds.split():
            fail(f"--{name} {value}: take a finite number")
    for name, legal in (choices or {}).items():
        if getattr(config, name) not in legal:
            fail(f"--{name} {getattr(config, name)}: take {' or '.join(filter(None, legal))}")


def fail(sentence: str) -> typing.NoReturn:
    """End the program for a bad input: one sentence, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(2)
