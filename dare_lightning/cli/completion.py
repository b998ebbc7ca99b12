"""Shell completion: a script for each shell, and the candidates it asks this program for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dare_lightning.cli.arguments import FLAGS
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.quoting import is_path_key
from dare_lightning.cli.suggest import hint
from dare_lightning.cli.tree import COMMANDS, ConfTree

_BASH = r"""
# dare-lightning completion for bash: eval "$(python -m dare_lightning completion bash)"
_dare_lightning_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" current cut
    local program=("$1")
    if [[ "$1" == *python* ]]; then
        if [[ "${COMP_WORDS[1]}" != -m || "${COMP_WORDS[2]}" != dare_lightning ]]; then
            if declare -F _dare_lightning_before > /dev/null; then _dare_lightning_before "$@"; fi
            return
        fi
        program=("$1" -m dare_lightning)
    fi
    current="${line##* }"
    # bash takes = and : for word breaks and completes what lies behind the last one.
    cut="${current%"${current##*[=:]}"}"
    COMPREPLY=()
    local candidate
    while IFS= read -r candidate; do
        [[ -n "$candidate" ]] && COMPREPLY+=("${candidate#"$cut"}")
    done < <("${program[@]}" __complete "$line" 2> /dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -o default -F _dare_lightning_complete dare-lightning
for _dare_lightning_python in python python3; do
    _dare_lightning_was="$(complete -p "$_dare_lightning_python" 2> /dev/null)"
    if [[ "$_dare_lightning_was" =~ -F\ ([^ ]+) && "${BASH_REMATCH[1]}" != _dare_lightning* ]]; then
        eval "_dare_lightning_before() { ${BASH_REMATCH[1]} \"\$@\"; }"
    fi
    complete -o default -F _dare_lightning_complete "$_dare_lightning_python"
done
unset _dare_lightning_python _dare_lightning_was
"""

_ZSH = r"""
# dare-lightning completion for zsh: eval "$(python -m dare_lightning completion zsh)"
_dare_lightning_complete() {
    local -a program candidates
    program=("${words[1]}")
    if [[ "${words[1]}" == *python* ]]; then
        if [[ "${words[2]}" != -m || "${words[3]}" != dare_lightning ]]; then
            if (( $+functions[_python] )); then _python; else _default; fi
            return
        fi
        program=("${words[1]}" -m dare_lightning)
    fi
    candidates=("${(@f)$("${program[@]}" __complete "$LBUFFER" 2> /dev/null)}")
    candidates=("${(@)candidates:#}")
    if (( ${#candidates} )); then
        compadd -Q -S '' -- "${candidates[@]}"
    elif [[ "$PREFIX" == *=* ]]; then
        compset -P '*='
        _files
    fi
}
if (( ! $+functions[compdef] )); then autoload -Uz compinit && compinit; fi
compdef _dare_lightning_complete dare-lightning python python3
"""

_FISH = r"""
# dare-lightning completion for fish: python -m dare_lightning completion fish | source
function __dare_lightning_ours
    set -l words (commandline -opc)
    string match -q '*dare-lightning' -- $words[1]; and return 0
    test (count $words) -ge 3; and test "$words[2]" = -m; and test "$words[3]" = dare_lightning
end
function __dare_lightning_complete
    set -l words (commandline -opc)
    set -l program $words[1]
    string match -q '*python*' -- $words[1]; and set program $words[1] -m dare_lightning
    $program __complete (commandline -cp) 2> /dev/null
end
for program in dare-lightning python python3
    complete -c $program -n __dare_lightning_ours -a '(__dare_lightning_complete)'
end
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str = "bash") -> str:
    """The script to evaluate in a shell's start-up file.

    Raises:
        UserError: a shell there is no script for.
    """
    if shell not in _SCRIPTS:
        raise UserError(f"completion {shell}: no such shell; {hint(shell, _SCRIPTS)}")
    return _SCRIPTS[shell].strip()


def complete(argv: Sequence[str]) -> list[str]:
    """Candidates for the last word of a command line given up to the cursor, program included.

    Commands, flags, groups (`method=`), options (`method=d1`) and keys (`method.optimizer.lr=`) of the options chosen
    so far. Nothing for a path, so that the shell offers files.
    """
    line = argv[0] if argv else ""
    words = _split(line)
    current = "" if line.endswith(" ") or not words else words.pop()
    words = words[3:] if words[1:3] == ["-m", "dare_lightning"] else words[1:]
    if current.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(current)]
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None:
        return [name for name in (*COMMANDS, "completion") if name.startswith(current)]
    if command == "completion":
        return [shell for shell in _SCRIPTS if shell.startswith(current)]
    if command not in COMMANDS:
        return []
    tree = ConfTree(_config_dirs(words))
    return _values(tree, command, current) if "=" in current else _names(tree, command, words, current)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote is still open
        return line.split()


def _config_dirs(words: Sequence[str]) -> list[Path]:
    named = [word.split("=", 1)[1] for word in words if word.startswith("--config-dir=")]
    named += [after for word, after in zip(words, words[1:], strict=False) if word in ("--config-dir", "-cd")]
    return [folder for name in named if (folder := Path(name).expanduser()).is_dir()]


def _values(tree: ConfTree, command: str, current: str) -> list[str]:
    key, _, value = current.partition("=")
    if key in tree.defaults(command):
        # Behind the last comma or bracket a list or a sweep goes on.
        start = max(value.rfind(","), value.rfind("[")) + 1
        options = [option for option in tree.options(key) if option.startswith(value[start:])]
        return [f"{key}={value[:start]}{option}" for option in options]
    if is_path_key(key):
        return []
    default = tree.keys(command, tree.defaults(command)).get(key)
    choices = ["true", "false"] if isinstance(default, bool) else []
    return [f"{key}={choice}" for choice in choices if choice.startswith(value)]


def _names(tree: ConfTree, command: str, words: Sequence[str], current: str) -> list[str]:
    chosen = dict(tree.defaults(command))
    for word in words:
        group, _, option = word.partition("=")
        if group in chosen and option:
            chosen[group] = [name for name in option.strip("[]").split(",") if name]
    sign = current[: len(current) - len(current.lstrip("+~"))]
    start = current[len(sign) :]
    groups = [f"{group}=" for group in chosen]
    keys = list(tree.keys(command, chosen))
    if "." not in start:
        # One level at a time, as a shell does with folders.
        keys = [key for key in keys if "." not in key] + [f"{key.split('.')[0]}." for key in keys if "." in key]
    found = [*groups, *(key if key.endswith(".") else f"{key}=" for key in keys)]
    public = (name for name in dict.fromkeys(found) if not any(part.startswith("_") for part in name.split(".")))
    return [sign + name for name in public if name.startswith(start)]
