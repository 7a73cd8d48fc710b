"""Help texts of the command line: the general help and the help of each subcommand."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

WIDTH = 80
"""Columns of every help text."""
MAX_NAME_WIDTH = 28
"""Maximum width of a name column; the text of a longer name starts on the next line."""

COMMANDS = {
    "train": "train a model and write its report; -m or sweep=NAME for several runs",
    "plan": "predict memory, step time and cost of a run before it starts",
    "verify": "prove that a parallelism strategy trains like one device, or name the fault",
    "lab": "list experiments with expected outcomes, show one, or grade their runs",
    "explain": "print the documentation of a config key, group or option",
    "status": "print the progress of runs and sweeps; live on a terminal",
    "report": "write the reports of runs and sweeps again",
    "evaluate": "evaluate a trained model on held-out data, or generate text with it",
    "export": "write a trained model in Hugging Face format, or a config for Accelerate",
    "import": "print the command line for a config of Accelerate or DeepSpeed",
    "publish": "send runs, sweeps and their reports to Weights & Biases",
    "dashboard": "create or update a saved W&B workspace of a project",
    "bench": "measure this machine's links, or compare scalewise with baselines",
    "calibrate": "measure this machine into a hardware profile for the planner",
    "wandb-sweep": "write the axes of a sweep for W&B Sweeps, or create the sweep there",
    "doctor": "print what this machine has and which features work on it",
}
"""Description of each subcommand; the names are a stable interface."""

EXAMPLES = (
    ("a small model on this machine, in seconds", "scalewise train experiment=smoke"),
    (
        "two parallelism strategies by two precisions, one report",
        "scalewise train -m experiment=demo parallelism=single,ddp precision=fp32,bf16_mixed",
    ),
    (
        "predict memory and step time",
        "scalewise plan model=llama3_8b parallelism=fsdp hardware=h100",
    ),
    (
        "train on text files",
        "scalewise train data=text 'data.paths=[books/*.txt]' model=decoder_10m",
    ),
    ("the documentation of one key", "scalewise explain optimizer.lr"),
)

Rows = tuple[tuple[str, str], ...]

FORMS: dict[str, Rows] = {
    "train": (
        ("scalewise train [overrides]", "one run"),
        ("scalewise train -m [a=1,2 ...]", "every combination of the values"),
        ("scalewise train sweep=NAME", "the combinations of sweeps/NAME.yaml"),
        ("scalewise train ... hydra/sweeper=optuna", "hyperparameter search over the axes"),
        (
            "scalewise train ... hydra/launcher=packed",
            "several jobs at once, each on its own devices",
        ),
        ("scalewise train -m hydra/launcher=slurm ...", "every combination as a Slurm job"),
        ("... resume_sweep=last|DIR", "run the missing jobs of that sweep in its folder"),
        ("... resume_sweep=... retry=failed,timeout", "also rerun the jobs with these outcomes"),
        ("scalewise train ... resume=last", "resume from the newest run of this name"),
        (
            "scalewise train ... plan.fit=auto",
            "apply the changes that plan suggests if a run does not fit",
        ),
        ("scalewise train ... --cfg job", "print the composed config; nothing runs"),
    ),
    "plan": (
        ("scalewise plan [overrides]", "memory breakdown, fit status, suggested fix, step time"),
        ("scalewise plan -m [a=1,2 ...]", "one table for all combinations"),
        ("... resume_sweep=last|DIR", "only the jobs that train would still run"),
        ("scalewise plan plan.search=WHAT", "search for a better run: layout, memory, all"),
        ("... plan.rank_by=WHAT", "what the search minimizes: time, price, memory"),
        ("scalewise plan ... --json", "the plan, or the result of the search, as JSON on stdout"),
        ("scalewise plan plan.method=trace", "trace the real module with FakeTensor"),
        ("... plan.full_depth=true", "trace every layer"),
        ("scalewise plan explain RUN OTHER", "compare two runs, predicted and measured"),
    ),
    "verify": (
        ("scalewise verify [overrides]", "a few small SGD steps next to one device; exit code 5"),
        ("... verify.layers=N verify.steps=N", "number of layers and steps of these runs"),
        ("... --json", "losses, differing tensors and the likely cause as JSON on stdout"),
    ),
    "lab": (
        ("scalewise lab", "every lab: question, hypothesis, and status below runs/"),
        ("scalewise lab NAME", "expected outcome of each case, and its last result"),
        ("scalewise lab grade FOLDER ...", "grades runs; exit code 0 if all are as expected"),
        ("scalewise lab record NAME", "writes the last result of a lab to experiments/records"),
    ),
    "explain": (
        ("scalewise explain KEY ...", "documentation, type, unit, defaults, allowed values"),
        ("scalewise explain GROUP", "options and keys of a config group"),
        ("scalewise explain GROUP=OPTION", "keys and defaults of an option"),
    ),
    "status": (("scalewise status FOLDER ...", "folders of sweeps or runs"),),
    "report": (
        ("scalewise report FOLDER ...", "writes report.html, and report_spec.json for W&B"),
    ),
    "evaluate": (
        ("scalewise evaluate RUN", "loss, perplexity and accuracy on its validation data"),
        ("... rows=all|NUMBER", "number of held-out samples"),
        ("... step=best|NUMBER", "another checkpoint; step=0: the initial model"),
        ("... 'prompt=TEXT'", "generate text; options: tokens=64 temperature=0 seed=1"),
    ),
    "export": (
        ("scalewise export RUN", "writes the last checkpoint to RUN/export, for transformers"),
        ("... to=FOLDER", "to another folder"),
        ("... step=best|NUMBER", "another checkpoint"),
        ("... adapter=alone", "the adapter without its base model, for PEFT"),
        ("scalewise export accelerate [overrides]", "prints Accelerate's config of a run, as YAML"),
        ("scalewise export deepspeed [overrides]", "prints DeepSpeed's config of a run, as JSON"),
    ),
    "import": (
        ("scalewise import accelerate FILE", "from the YAML file of `accelerate config`"),
        ("scalewise import deepspeed FILE", "from a JSON file; stderr: what has no counterpart"),
    ),
    "publish": (("scalewise publish FOLDER ...", "runs or sweeps that were tracked offline"),),
    "dashboard": (
        ("scalewise dashboard NAME", "in the project scalewise, or WANDB_PROJECT"),
        ("... tracking.project=NAME", "in another project; tracking.entity=NAME: of a team"),
    ),
    "bench": (
        ("scalewise bench all", "overhead, steps, start-up, components and scaling; 25 minutes"),
        ("scalewise bench collectives", "latency and bandwidth of each collective"),
        ("scalewise bench gpu", "MFU, memory and time next to the plan on one CUDA device"),
        ("... cases=mfu_1b/*,memory/* minutes=9", "some cases of a suite, within a time limit"),
        ("... rerun=true", "measure recorded cases again; changed=false: keep those of other code"),
        ("scalewise bench ledger", "predicted memory, compared with small runs and large traces"),
        ("scalewise bench parallel", "ddp and fsdp compared with hand-written torch loops"),
        ("scalewise bench planner data=FILE", "predictions next to published measurements"),
        ("scalewise bench slow_link mbit=100", "a slow link between two ranks; Linux, root"),
        ("scalewise bench sweep", "a job of a sweep next to a process per run"),
        ("... record=true", "write the figures to experiments/records"),
    ),
    "calibrate": (
        ("scalewise calibrate", "takes less than two minutes; then use -cd conf hardware=measured"),
        ("... name=NAME ranks=N seconds=S", "profile name, ranks of the link, time per figure"),
        ("scalewise calibrate learn=runs", "learn step_scale from measured runs"),
    ),
    "wandb-sweep": (
        ("scalewise wandb-sweep sweep=NAME", "offline: prints YAML for `wandb sweep FILE`"),
        ("... tracking.mode=online", "creates the sweep and prints its `wandb agent` command"),
    ),
    "doctor": (("scalewise doctor", "devices, extras, disk and tracking"),),
}
"""Syntax of each subcommand."""

FLAGS = (
    ("-m, --multirun", "run every combination of comma-separated values"),
    ("--cfg job", "print the composed config; nothing runs"),
    ("--info", "print Hydra's search path and defaults tree; nothing runs"),
    ("-cd DIR", "add a folder with config groups, experiments and sweeps of your own"),
    ("--hydra-help", "list every flag of Hydra"),
)
"""Flags of Hydra that ``COMPOSING`` subcommands accept."""

COMPOSING = ("train", "plan", "verify", "wandb-sweep")
"""Subcommands that compose a run from overrides."""


def general_help() -> list[str]:
    """Text of ``scalewise --help``."""
    lines = ["usage: scalewise COMMAND [overrides] [flags]", "", "commands"]
    lines += [*table_lines(COMMANDS.items()), "", *_group_lines(), "", *_flag_lines(), ""]
    lines += [
        *_example_lines(EXAMPLES),
        "",
        "scalewise COMMAND --help prints the help of one command.",
    ]
    return [*lines, 'Completion: eval "$(scalewise -sc install=bash)"']


def command_help(command: str) -> list[str]:
    """Text of ``scalewise COMMAND --help``."""
    lines = [
        *wrap_text(f"scalewise {command}: {COMMANDS[command]}"),
        "",
        *table_lines(FORMS[command]),
    ]
    if command in COMPOSING:
        lines += ["", *_group_lines(), "", *_flag_lines()]
    examples = [row for row in EXAMPLES if row[1].startswith(f"scalewise {command} ")]
    return [*lines, *(["", *_example_lines(examples)] if examples else [])]


def wrap_text(text: str, indent: int = 0) -> list[str]:
    """Wrap a paragraph to ``WIDTH`` columns, without backticks."""
    margin = " " * indent
    return textwrap.wrap(
        text.replace("`", ""),
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table_lines(rows: Iterable[tuple[str, str]], name_width: int = 12) -> Iterator[str]:
    """Yield a table of names and texts as lines of ``WIDTH`` columns."""
    rows = list(rows)
    width = max([name_width, *(len(name) for name, _ in rows if len(name) <= MAX_NAME_WIDTH)])
    margin = width + 4
    for name, text in rows:
        first, *continuation = wrap_text(text, margin) or [""]
        if len(name) > width:
            yield f"  {name}"
            yield first
        else:
            yield f"  {name:<{width}}  {first[margin:]}".rstrip()
        yield from continuation


def _group_lines() -> Iterator[str]:
    """Yield the config groups with their summaries and options."""
    from scalewise.config import option_docs, paths

    yield "groups: choose an option by GROUP=OPTION, set a key by GROUP.KEY=VALUE"
    for group, summary in option_docs.group_summaries().items():
        options = option_docs.HYDRA_OPTIONS.get(group) or paths.option_names(group)
        yield from table_lines([(group, summary), ("", ", ".join(options))], 14)


def _flag_lines() -> Iterator[str]:
    yield "flags"
    yield from table_lines(FLAGS)


def _example_lines(examples: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield examples; a long command continues after a backslash, so that it can be pasted."""
    yield "examples"
    for title, line in examples:
        yield f"  # {title}"
        first, *continuation = textwrap.wrap(
            line, WIDTH - 4, break_long_words=False, break_on_hyphens=False
        )
        for part in continuation:
            yield f"  {first} \\"
            first = f"  {part}"
        yield f"  {first}"
