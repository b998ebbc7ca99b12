"""Help for newcomers, written from the files in `conf/`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare_lightning.cli.arguments import FLAGS, Arguments
from dare_lightning.cli.tree import COMMANDS, ConfTree

if TYPE_CHECKING:
    from omegaconf import DictConfig

USED_MOST = {
    "fit": (
        "model.path data.path ckpt_path seed run_root trainer.max_epochs trainer.max_steps trainer.devices"
        " trainer.precision method.optimizer.lr data.group_size data.prompts_per_rollout"
        " data.inner_epochs data.batch_size data.micro_batch completion.max_new_tokens completion.steps"
        " rollout.backend.temperature eval.every eval.limit"
    ),
    "eval": (
        "ckpt_path model.path data.path seed eval.limit eval.data_dir rerun_path completion.max_new_tokens"
        " completion.steps rollout.backend.temperature"
    ),
    "generate": (
        "prompt prompts_path count ckpt_path model.path json seed completion.max_new_tokens completion.steps"
        " rollout.backend.temperature"
    ),
    "export": "ckpt_path output_folder adapter dtype overwrite",
    "preview": "model.path data.path count seed",
}

EXAMPLES = {
    "fit": """
        {program} fit                                                  # the embedded example, no download
        {program} fit method=sft model=llada model.path=FOLDER data=gsm8k_sft data.path=FILE.parquet
        {program} fit method=d1 peft=lora trainer.max_epochs=20 method.optimizer.lr=3e-6
        {program} fit -m method=d1,coupled_grpo seed=1,2               # four runs
        {program} fit ckpt_path=runs/fit/DATE_TIME/checkpoints/last.ckpt     # go on with a run""",
    "eval": """
        {program} eval ckpt_path=runs/fit/DATE_TIME/checkpoints/last.ckpt
        {program} eval model=llada model.path=FOLDER data=gsm8k data.path=FILE.parquet
        {program} eval eval=[gsm8k,humaneval] model=folder model.path=FOLDER    # benchmarks
        {program} eval experiment=eval/llada_8b_instruct               # as published
        {program} eval --compare FOLDER FOLDER                         # two evaluations, question by question""",
    "generate": """
        {program} generate                                             # held-out puzzles, colours by step
        {program} generate model=llada model.path=FOLDER "prompt='What is 2 + 2?'"
        {program} generate json=true count=20""",
    "export": """
        {program} export ckpt_path=runs/fit/DATE_TIME/checkpoints/last.ckpt output_folder=my_model""",
    "preview": """
        {program} preview
        {program} preview model=llada model.path=FOLDER data=gsm8k_sft data.path=FILE.parquet count=5""",
}


def program() -> str:
    """How this program was called, for lines that can be pasted back."""
    name = Path(sys.argv[0]).name
    return "python -m dare_lightning" if name == "__main__.py" else name


def overview() -> str:
    """Help of the program: commands, options, where to go on."""
    tree = ConfTree()
    commands = "\n".join(f"  {name:<12}{tree.about(name)}" for name in COMMANDS)
    return f"""Post-train diffusion language models.

usage: {program()} COMMAND [group=option ...] [key=value ...] [options]

commands
{commands}
  completion  Print a script for shell completion: bash, zsh or fish.

options
{_flags()}

first steps
  {program()} fit                  # a tiny policy learns Sudoku; no download, no GPU
  {program()} fit --help           # groups, keys and their values
  {program()} fit --cfg job        # the whole configuration"""


def command(arguments: Arguments) -> str:
    """Help of a command, for the choices made on the command line so far."""
    from omegaconf import OmegaConf

    from dare_lightning.cli.compose import compose_lenient

    name = str(arguments.command)
    tree = ConfTree(arguments.config_dirs)
    cfg = compose_lenient(name, arguments.overrides, arguments.config_dirs)
    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert isinstance(choices, dict)
    groups = {group: choices.get(group) for group in tree.defaults(name)}
    sections = [
        tree.about(name),
        f"usage: {program()} {name} [group=option ...] [key=value ...] [options]",
        _section("groups (* = taken now)", _groups(groups, cfg, tree)),
        _section("keys used most, with their values now", _keys(name, cfg, tree)),
        _section("examples", textwrap.dedent(EXAMPLES[name].format(program=program())).strip()),
        _section("options", textwrap.dedent(_flags())),
        f"Everything: {program()} {name} --cfg job. A key that a file leaves out is added as +group.key=value.",
    ]
    return "\n\n".join(section for section in sections if section)


def _section(title: str, body: str) -> str:
    return f"{title}\n{textwrap.indent(body, '  ')}" if body else ""


def _groups(groups: Mapping[str, Any], cfg: DictConfig, tree: ConfTree) -> str:
    lines = []
    for group, choice in groups.items():
        taken = _taken(group, choice, cfg, tree)
        names = [f"{option}*" if option in taken else option for option in tree.options(group)]
        listing = ", ".join(names) or "none yet"
        lines.append(textwrap.fill(listing, 110, initial_indent=f"{group:<12}", subsequent_indent=" " * 12))
    return "\n".join(lines)


def _taken(group: str, choice: Any, cfg: DictConfig, tree: ConfTree) -> list[str]:
    if isinstance(choice, str):
        return [choice]
    node = cfg.get(group) or {}
    named = [*node, *(node.get("benchmarks") or {})]
    return [option for option in tree.options(group) if option in named]


def _keys(name: str, cfg: DictConfig, tree: ConfTree) -> str:
    from omegaconf import OmegaConf

    comments = tree.comments(name)
    lines = []
    for key in USED_MOST[name].split():
        parent, _, last = key.rpartition(".")
        node = OmegaConf.select(cfg, parent) if parent else cfg
        if not OmegaConf.is_dict(node) or last not in list(node.keys()):
            continue
        value = "???" if OmegaConf.is_missing(node, last) else node[last]
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        comment = comments.get(key) or _comment(key, cfg, tree)
        lines.append(f"{key + '=' + shown:<44}" + (f"  {comment}" if comment else ""))
    return "\n".join(line.rstrip() for line in lines)


def _comment(key: str, cfg: DictConfig, tree: ConfTree) -> str:
    group, _, rest = key.partition(".")
    options = [cfg.hydra.runtime.choices.get(group), *tree.options(group), "_base", "_online", "_settings"]
    found = (tree.comments(f"{group}/{option}").get(rest.rsplit(".", 1)[-1]) for option in options if option)
    return next((comment for comment in found if comment), "")


def _flags() -> str:
    return "\n".join(f"  {flag:<18}{text}" for flag, text in FLAGS.items())
