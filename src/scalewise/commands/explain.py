"""``scalewise explain KEY``: documentation of config keys, groups and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalewise.commands.usage import table_lines, wrap_text
from scalewise.config import option_docs
from scalewise.config.option_docs import GROUP_NAMES, FieldDoc, GroupDoc, OptionDoc
from scalewise.console import print_lines
from scalewise.errors import ConfigError, ConfigIssue, did_you_mean, suggested_option
from scalewise.typed_override import override, shell_word

PLACEHOLDERS: Mapping[str, object] = {
    "int": "NUMBER",
    "float": "NUMBER",
    "list": ["TEXT"],
    "mapping": {"NAME": 1},
    "entries": {},
}
"""Value of an example by the first word of the type, if the default is no example."""
REQUIRED_OVERRIDES = {
    "trainer.max_tokens": ["trainer.max_steps=null"],
    "trainer.max_epochs": ["trainer.max_steps=null"],
}
"""Further overrides that the example of a key requires."""


def main(arguments: Sequence[str]) -> int:
    """Print the documentation of each key, group or option; exit code 0.

    Raises ``ConfigError`` with one issue per unknown argument.
    """
    if not arguments:
        fix = "scalewise explain optimizer.lr, scalewise explain optimizer=muon"
        raise ConfigError.for_key("", "", "no key given", fix)
    if issues := [issue for argument in arguments for issue in _argument_issues(argument)]:
        raise ConfigError(issues)
    for number, argument in enumerate(arguments):
        print_lines(*[""] * bool(number), *explain_lines(argument))
    return 0


def explain_lines(argument: str) -> list[str]:
    """Documentation of a known key, group or option, in lines of 80 columns."""
    group, is_option, option = argument.partition("=")
    if is_option:
        return list(_option_lines(_options_by_name(group)[option]))
    if group in GROUP_NAMES:
        return list(_group_lines(option_docs.group_doc(group)))
    return list(_key_lines(argument))


def completions(word: str) -> list[str]:
    """Shell completions: arguments of ``scalewise explain`` that start with ``word``."""
    names = [*GROUP_NAMES, *_keys()]
    names += [f"{group}={name}" for group in GROUP_NAMES for name in _options_by_name(group)]
    return [name for name in names if name.startswith(word)]


def _keys() -> list[str]:
    """All documented keys."""
    keys = [entry.key for entry in option_docs.run_fields()]
    for group in GROUP_NAMES:
        options = option_docs.group_doc(group).options
        keys += dict.fromkeys(entry.key for option in options for entry in option.fields)
    return keys


def _options_by_name(group: str) -> Mapping[str, OptionDoc]:
    return {option.name: option for option in option_docs.group_doc(group).options}


def _argument_issues(argument: str) -> Iterator[ConfigIssue]:
    name, is_option, option = argument.partition("=")
    if name in GROUP_NAMES:
        options = _options_by_name(name)
        if is_option and option not in options:
            fix = suggested_option(name, option, options)
            yield ConfigIssue(name, option, "no such option", fix)
        return
    keys = _keys()
    if name in keys:
        if is_option:
            fix = f"scalewise explain {shell_word(name)}"
            yield ConfigIssue(name, option, "a key must be given without a value", fix)
        return
    group, _, leaf = name.rpartition(".")
    if same_leaf := [key for key in keys if key.rpartition(".")[2] == leaf]:
        fix = f"did you mean {' or '.join(same_leaf)}?"
    else:
        within = [key for key in keys if key.startswith(f"{group}.")]
        fix = did_you_mean(name, within or [*GROUP_NAMES, *keys])
    yield ConfigIssue("", "", f"unknown key, group or option {argument!r}", fix)


def _key_lines(key: str) -> Iterator[str]:
    group = option_docs.group_of_key(key)
    options = option_docs.group_doc(group).options if group else ()
    by_option = {
        option.name: entry for option in options for entry in option.fields if entry.key == key
    }
    default_option = option_docs.default_options().get(group, "")
    chosen = default_option
    if by_option and default_option not in by_option:
        setting = [it.name for it in options if key[len(group) + 1 :] in it.sets]
        chosen = [*setting, *by_option][0]
    entry = by_option.get(chosen) or next(it for it in option_docs.run_fields() if it.key == key)
    yield key
    yield ""
    yield from wrap_text(entry.text, 2)
    for text, names in _by_value({it: doc.text for it, doc in by_option.items()}).items():
        if text != entry.text:
            yield from wrap_text(f"With {group}={', '.join(names)}: {text}", 2)
    yield ""
    rows = [("type", entry.type)]
    rows += [("unit", entry.unit)] if entry.unit else []
    rows += _labeled("values", _choice_texts(entry))
    defaults = _by_value({it: doc.default_text for it, doc in by_option.items()})
    if len(defaults) < 2 and len(by_option) == len(options):
        rows.append(("default", entry.default_text))
    else:
        texts = [f"{value} with {group}={', '.join(it)}" for value, it in defaults.items()]
        rows += _labeled("default", texts)
    choice = [] if chosen == default_option else [override(group, chosen)]
    words = ["-m"] * (group in option_docs.HYDRA_SUMMARIES)
    example = override(key, example_value(entry))
    if entry.type.startswith("option of "):  # chosen by an entry of the defaults list
        example = f"+{entry.type.removeprefix('option of ')}@{key}=OPTION"
    words += [*choice, *REQUIRED_OVERRIDES.get(key, []), example]
    rows.append(("example", f"scalewise train {' '.join(map(shell_word, words))}"))
    yield from table_lines(rows, 8)


def example_value(entry: FieldDoc) -> object:
    """Example value of a field: another choice, the default or a placeholder."""
    default = entry.default_text
    if other_choices := [name for name in entry.choices if name != default]:
        return {"true": True, "false": False}.get(other_choices[0], other_choices[0])
    if default == "auto":
        return 2
    if isinstance(entry.default, int | float | str) and entry.default != "" and "$" not in default:
        return entry.default
    return PLACEHOLDERS.get(entry.type.split()[0], "TEXT")


def _choice_texts(entry: FieldDoc) -> list[str]:
    """Allowed values: one text each if they are documented, else one text for all."""
    if any(entry.choices.values()):
        return [f"{name}: {text}" for name, text in entry.choices.items()]
    return [", ".join(entry.choices)] if entry.choices else []


def _labeled(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Table rows with the label in the first row only."""
    return [("" if number else label, text) for number, text in enumerate(texts)]


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Names grouped by their value."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names


def _group_lines(group: GroupDoc) -> Iterator[str]:
    yield from wrap_text(f"{group.name}: {group.summary}")
    yield ""
    yield f"options of {group.name}=NAME"
    default_option = option_docs.default_options().get(group.name)
    yield from table_lines(
        (option.name, option.summary + " (default)" * (option.name == default_option))
        for option in group.options
    )
    options = sorted(group.options, key=lambda it: it.name == default_option)
    entries = {entry.key: entry for option in options for entry in option.fields}
    if entries:
        yield ""
        yield "keys"
        yield from table_lines((key, entry.text) for key, entry in sorted(entries.items()))


def _option_lines(option: OptionDoc) -> Iterator[str]:
    yield from wrap_text(f"{option.group}={option.name}: {option.summary}")
    for paragraph in option.details.split("\n\n") if option.details else ():
        yield ""
        yield from wrap_text(" ".join(paragraph.split()), 2)
    if option.fields:
        yield ""
        yield "keys and defaults"
        yield from table_lines(
            (override(entry.key, entry.default), entry.text) for entry in option.fields
        )
