"""Completion scripts for bash, zsh and fish.

All three work alike: the words so far lead from command to command to a path such as `gpattention data get`;
then either the word before is an option that takes something, or the path's own words are offered.
"""

from collections.abc import Callable, Iterable, Sequence

from gpattention.cli.command_tree import Argument, Command

BASH = """\
# bash completion of gpattention, made by `gpattention completion bash`
_gpattention() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local at=gpattention kind= words= options= i word
    local -a generate
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${COMP_WORDS[i]}" in
            @PATHS@) at+=" ${COMP_WORDS[i]}" ;;
        esac
    done
    # readline cuts --option=value into three words
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = && COMP_CWORD -ge 2 ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    case "$at $previous" in
@VALUES@
    esac
    if [[ -z $kind ]]; then
        case "$at" in
@COMMANDS@
        esac
        if [[ $current == -* ]]; then kind=words words=$options; fi
    fi
    case $kind in
        words) generate=(-W "$words") ;;
        files) generate=(-f -W "$words"); compopt -o filenames 2>/dev/null ;;
        folders) generate=(-d -W "$words"); compopt -o filenames 2>/dev/null ;;
        *) generate=(-W '') ;;
    esac
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "${generate[@]}" -- "$current")
}
complete -F _gpattention gpattention
"""

ZSH = """\
#compdef gpattention
# zsh completion of gpattention, made by `gpattention completion zsh`
_gpattention() {
    local current=${words[CURRENT]} previous=${words[CURRENT-1]} at=gpattention kind= i
    local -a names options
    for ((i = 2; i < CURRENT; i++)); do
        case "$at ${words[i]}" in
            (@PATHS@) at+=" ${words[i]}" ;;
        esac
    done
    if [[ $current == --*=* ]]; then
        previous=${current%%=*}
        compset -P '*='
    fi
    case "$at $previous" in
@VALUES@
    esac
    if [[ -z $kind ]]; then
        case "$at" in
@COMMANDS@
        esac
        if [[ $current == -* ]]; then kind=words names=("${options[@]}"); fi
    fi
    if (( ${#names} )); then _describe 'gpattention' names; fi
    case $kind in
        (files) _files ;;
        (folders) _files -/ ;;
    esac
}
if [[ $funcstack[1] == _gpattention ]]; then _gpattention "$@"; else compdef _gpattention gpattention; fi
"""

FISH = """\
# fish completion of gpattention, made by `gpattention completion fish`
function __gpattention_at
    set -l at gpattention
    for word in (commandline -opc)[2..-1]
        switch "$at $word"
            case @PATHS@
                set at "$at $word"
        end
    end
    test "$at" = "$argv"
end
complete -c gpattention -f
@LINES@
"""


def bash_script(tree: Sequence[Command]) -> str:
    """For bash 3.2 and later."""

    def value(option: Argument) -> str:
        words = f" words={_quoted(' '.join(option.words))}" if option.words else ""
        return f"kind={option.takes}{words}"

    def command(each: Command) -> str:
        kind, words = _offered(each)
        options = " ".join(flag for option in each.options for flag in option.flags)
        listed = _quoted(" ".join(name for name, _ in words))
        return f"options={_quoted(options)} kind={kind} words={listed}"

    return _filled(BASH, tree, value, command, opening="")


def zsh_script(tree: Sequence[Command]) -> str:
    """With what each command and option does."""

    def value(option: Argument) -> str:
        words = f" names=({_described((word, '') for word in option.words)})" if option.words else ""
        return f"kind={option.takes}{words}"

    def command(each: Command) -> str:
        kind, words = _offered(each)
        options = [(flag, option.about) for option in each.options for flag in option.flags]
        return f"kind={kind} names=({_described(words)}) options=({_described(options)})"

    return _filled(ZSH, tree, value, command, opening="(")


def fish_script(tree: Sequence[Command]) -> str:
    """With what each command and option does."""
    lines = []
    for each in tree:
        start = f"complete -c gpattention -n {_quoted(f'__gpattention_at {each.path}')}"
        kind, words = _offered(each)
        for name, about in words:
            lines.append(f"{start} -a {_quoted(name)}" + (f" -d {_quoted(about)}" if about else ""))
        if kind == "files":
            lines.append(f"{start} -F")
        if kind == "folders":
            lines.append(f"{start} -a '(__fish_complete_directories)'")
        lines += [f"{start} {_fish_option(option)}" for option in each.options]
    paths = " ".join(_quoted(path) for path in _paths(tree))
    return FISH.replace("@PATHS@", paths).replace("@LINES@", "\n".join(lines))


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}


def _filled(
    script: str,
    tree: Sequence[Command],
    value: Callable[[Argument], str],
    command: Callable[[Command], str],
    *,
    opening: str,
) -> str:
    """Paths, a line for each option that takes something, a line for each command."""
    values = []
    for each in tree:
        for option in each.options:
            if option.takes != "nothing":
                patterns = "|".join(_quoted(f"{each.path} {flag}") for flag in option.flags)
                values.append(f"        {opening}{patterns}) {value(option)} ;;")
    commands = [f"            {opening}{_quoted(each.path)}) {command(each)} ;;" for each in tree]
    return (
        script.replace("@PATHS@", "|".join(_quoted(path) for path in _paths(tree)))
        .replace("@VALUES@", "\n".join(values))
        .replace("@COMMANDS@", "\n".join(commands))
    )


def _paths(tree: Sequence[Command]) -> list[str]:
    return [each.path for each in tree[1:]]


def _offered(command: Command) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What comes where no option is begun: the kind of the positionals, and words with what they do."""
    words = [*command.below]
    for argument in command.positionals:
        words += [(word, "") for word in argument.words]
    kinds = {argument.takes for argument in command.positionals}
    kind = next((kind for kind in ("files", "folders") if kind in kinds), "words" if words else "anything")
    return kind, tuple(words)


def _fish_option(option: Argument) -> str:
    names = [f"-s {flag[1:]}" if len(flag) == 2 else f"-l {flag[2:]}" for flag in option.flags]
    takes = {
        "nothing": "",
        "words": f" -x -a {_quoted(' '.join(option.words))}",
        "files": " -r -F",
        "folders": " -x -a '(__fish_complete_directories)'",
        "anything": " -x",
    }[option.takes]
    about = f" -d {_quoted(option.about)}" if option.about else ""
    return " ".join(names) + takes + about


def _described(words: Iterable[tuple[str, str]]) -> str:
    """zsh's name:description."""
    pairs = ((name.replace(":", "\\:"), about) for name, about in words)
    return " ".join(_quoted(f"{name}:{about}" if about else name) for name, about in pairs)


def _quoted(text: str) -> str:
    """In single quotes, as all three shells read them; an apostrophe becomes a typographic one."""
    return "'" + text.replace("'", "\u2019") + "'"
