"""Settings of a training script: `key=value` and `--name value`. Runs nothing."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.errors import ConfigError
from dovetail.recipe.yaml import parse_value

ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_]\w*)=(.*)", re.DOTALL)
OVERRIDE = re.compile(r"(?:\+\+|[+~])?([A-Za-z_][\w.\-@/]*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
PROGRAM = re.compile(r"\S+\.py|(?:verl|openrlhf|trl|axolotl)\.[\w.]+")
LAUNCHER = ("num_processes", "nproc_per_node", "num_gpus")  # flags of launchers
NUMBER = re.compile(r"-\.?\d")  # a value, not a flag
SUM = r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)"
INNERMOST = re.compile(
    r"\$\(\(((?:[^()$]|\([^()$]*\))*)\)\)|\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$(\w+)"
)
OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
MAX_ROUNDS = 100
MAX_TEXT = 1 << 16  # replacements and characters of a word


def read_command(text: str) -> tuple[list[str], dict[str, Any]]:
    """Words and settings of the longest command. Unset variables stay `$NAME`; a bare flag is true."""
    variables: dict[str, str | list[str]] = {}
    best: tuple[list[str], dict[str, Any]] = ([], {})
    for words in _commands(text):
        if words[0] in ("export", "declare", "local", "readonly") and len(words) > 1:
            words = words[1:]
        if (array := _array(words)) is not None:
            variables[array[0]] = [part for word in array[1] for part in _expanded(word, variables)]
            continue
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            variables[match[1]] = " ".join(_expanded(match[2], variables))
            words = words[1:]
        words = [part for word in words for part in _expanded(word, variables)]
        settings = _settings(words)
        if len(settings) > len(best[1]):
            best = words, settings
    return best


def _commands(text: str) -> list[list[str]]:
    text = (
        re.sub(r"^[ \t]*#.*\n?", "", text, flags=re.MULTILINE)
        .replace("\\\r\n", " ")
        .replace("\\\n", " ")
    )
    text = re.sub(SUM, lambda sum_: re.sub(r"\s", "", sum_[0]), text)  # one word
    text = re.sub(r"\$\((?!\()[^()]*\)", "$COMMAND", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    depth = 0  # of parentheses: an array may have several lines
    try:
        for word in lexer:
            if depth or re.fullmatch(r"\w+\+?=\(.*", word, re.DOTALL):
                depth += word.count("(") - word.count(")")
            if word.strip(";\n"):
                commands[-1].append(word)
            elif not depth:
                commands.append([])
    except ValueError as error:
        raise ConfigError(
            f"the shell script cannot be read: {error}; give one whose quotes are closed"
        ) from None
    return [words for words in commands if words]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _array(words: Sequence[str]) -> tuple[str, list[str]] | None:
    match = re.fullmatch(r"(\w+)\+?=\((.*)", words[0], re.DOTALL)
    if match is None:
        return None
    parts = [match[2], *words[1:]]
    return match[1], [word for word in [*parts[:-1], parts[-1].removesuffix(")")] if word]


def _expanded(word: str, variables: Mapping[str, str | list[str]]) -> list[str]:
    whole = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
    if whole:
        value = variables.get(whole[1], [])
        return value if isinstance(value, list) else [value]
    if word in ("$@", "$*"):
        return []
    listed = re.fullmatch(r"\$\{?(\w+)\}?", word)  # unquoted, so that the shell would split it
    if (
        listed
        and isinstance(text := variables.get(listed[1]), str)
        and len(parts := _split(text)) > 1
    ):
        if OVERRIDE.fullmatch(parts[0]) or FLAG.fullmatch(parts[0]):
            return parts

    def value_of(match: re.Match[str]) -> str:
        total, braced, default, plain = match.groups()
        if total is not None:
            return _sum(total, variables)
        value = variables.get(braced or plain, default)
        if value is None:
            return f"\0{braced or plain}"
        return value if isinstance(value, str) else " ".join(value)

    for _ in range(MAX_ROUNDS):
        replaced = INNERMOST.sub(value_of, word, count=1)
        if replaced == word or len(replaced) > MAX_TEXT:
            break
        word = replaced
    return [word.replace("\0", "$")]  # what the script does not set


def _sum(text: str, variables: Mapping[str, str | list[str]]) -> str:
    """Integer arithmetic."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return int(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Name):
            return int(str(variables[node.id]))
        return int(ast.literal_eval(node))

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return "\0SUM"


def _settings(words: Sequence[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    flag = ""
    program = False
    for word in words:
        if PROGRAM.fullmatch(word) and not program:  # before it: a launcher's flags
            settings = {name: value for name, value in settings.items() if name in LAUNCHER}
            flag = ""
            program = True
            continue
        override = OVERRIDE.fullmatch(word)
        named = FLAG.fullmatch(word)
        if named:
            flag = named[1].replace("-", "_")
            settings[flag] = True if named[2] is None else parse_value(named[2])
            flag = flag if named[2] is None else ""
        elif flag and not (word.startswith("-") and not NUMBER.match(word)):
            value = parse_value(word)
            before = settings[flag]
            if before is True:
                settings[flag] = value
            elif isinstance(before, list):
                settings[flag] = [*before, value]
            else:
                settings[flag] = [before, value]
        elif override:
            settings[override[1]] = parse_value(override[2])
        else:
            flag = ""
    return settings
