"""Sorting the command line of `up`: its own flags, and those of services, which travel as variables."""

from collections.abc import Collection, Sequence

from libs.config.fields import flag_of, variable_of


def split_flags(
    argv: Sequence[str], own: Collection[str], services: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Words for `up` itself, and variables for the services, by field names of each.

    A service's flag without a value is a switch: `--eager` becomes "true" and `--no-eager` "false". Words
    that nobody knows stay with `up`, which refuses them with the nearest name it knows.
    """
    own_words: list[str] = []
    variables: dict[str, str] = {}
    foreign = {flag_of(field): field for field in services if field not in own}
    negations = {"--no-" + flag[2:]: field for flag, field in foreign.items()}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in foreign:
            if not has_value:
                value = words.pop(0) if words and not words[0].startswith("--") else "true"
            variables[variable_of(foreign[flag])] = value
        elif flag in negations and not has_value:
            variables[variable_of(negations[flag])] = "false"
        else:
            own_words.append(word)
    return own_words, variables
