"""What ``--help`` prints: of the whole, and of each verb."""

from __future__ import annotations

VERBS = {
    "train": "train a model and write its report; -m or sweep=NAME for many",
    "plan": "say, before a run and without its device, whether it fits, how fast, at what cost",
    "status": "say how far the jobs of a sweep are, wherever they run; live on a terminal",
    "report": "write the reports again of a run's or a sweep's folder",
    "evaluate": "say how well a trained model foretells held-out text, and what it writes",
    "export": "write a trained model, or its adapter, as Hugging Face keeps them",
    "publish": "send runs and sweeps to Weights & Biases, with their report; nothing twice",
    "dashboard": "make or update a saved W&B workspace of a project",
    "bench": "measure this machine's links, or the suite beside a hand-written loop",
    "calibrate": "measure this machine into conf/hardware/NAME.yaml, for plans that are near",
    "wandb-sweep": "write the axes of a sweep for W&B Sweeps, or create it there",
    "doctor": "say what this machine has, and what that means for a run",
}
"""Every verb and what it does; a part of the frozen surface."""

EXAMPLES = (
    ("a small model on this machine, in seconds", "scalewise train experiment=smoke"),
    (
        "two layouts by two precisions, one report",
        "scalewise train -m experiment=demo parallelism=single,ddp precision=fp32,bf16_mixed",
    ),
    ("does it fit, and how fast", "scalewise plan model=llama3_8b parallelism=fsdp hardware=h100"),
    ("your own text", "scalewise train data=text 'data.paths=[books/*.txt]' model=decoder_10m"),
)

Rows = tuple[tuple[str, str], ...]

FORMS: dict[str, Rows] = {
    "train": (
        ("scalewise train [overrides]", "one run"),
        ("scalewise train -m [a=1,2 ...]", "every combination of the values"),
        ("scalewise train sweep=NAME", "the combinations of sweeps/NAME.yaml"),
        ("scalewise train ... hydra/sweeper=optuna", "search the axes; prints the best"),
        ("... hydra/launcher=packed", "several jobs at once, each on devices of its own"),
        ("... resume_sweep=last|DIR", "what is missing of that sweep, in its folder"),
        ("    retry=failed,timeout", "and the jobs that ended so"),
        ("scalewise train ... resume=last", "go on from the newest run of this name"),
        ("scalewise train -m hydra/launcher=slurm ...", "every combination as a job of Slurm's"),
        ("scalewise train ... plan.fit=auto", "change what does not fit as plan would"),
        ("scalewise train ... --cfg job", "show what would run; nothing runs"),
    ),
    "plan": (
        ("scalewise plan [overrides]", "memory line by line, verdict, cure, time"),
        ("scalewise plan -m [a=1,2 ...]", "one table for the combinations"),
        ("... resume_sweep=last|DIR", "the jobs that train would still run"),
        ("scalewise plan plan.search=WHAT", "look for better: layout, memory, all"),
        ("                plan.rank_by=WHAT", "what the best has least of: time, price, memory"),
        ("scalewise plan plan.method=trace", "ask the code itself; imports torch"),
        ("                plan.full_depth=true", "every layer, and no shallow copies"),
        ("scalewise plan explain RUN OTHER", "what differs in two runs, foreseen and measured"),
    ),
    "status": (("scalewise status FOLDER ...", "of sweeps or runs"),),
    "report": (("scalewise report FOLDER ...", "report.html, and report_spec.json for W&B"),),
    "evaluate": (
        ("scalewise evaluate RUN", "loss, perplexity and accuracy on the rows it was validated on"),
        ("... rows=all|NUMBER", "on more of the held-out rows, or fewer"),
        ("... step=best|NUMBER", "another checkpoint; step=0: the model before it was trained"),
        ("... 'prompt=TEXT'", "and go on writing: tokens=64 temperature=0 seed=1"),
    ),
    "export": (
        ("scalewise export RUN", "its last checkpoint to RUN/export, for transformers"),
        ("... to=FOLDER", "to another folder"),
        ("... step=best|NUMBER", "another checkpoint"),
        ("... adapter=alone", "what was trained alone, for PEFT; else it is merged"),
    ),
    "publish": (("scalewise publish FOLDER ...", "of runs or sweeps, tracked offline or cut off"),),
    "dashboard": (
        ("scalewise dashboard NAME", "of the project scalewise, or of WANDB_PROJECT"),
        ("... tracking.project=NAME", "of another; tracking.entity=NAME, of a team"),
    ),
    "bench": (
        ("scalewise bench collectives", "latency and bandwidth of each collective here"),
        ("scalewise bench ledger", "memory as planned beside small runs, and traces of large"),
        ("scalewise bench parallel", "ddp and fsdp beside hand-written torch loops"),
        ("scalewise bench planner data=FILE", "plans beside rows that others measured"),
        ("scalewise bench slow_link mbit=100", "a slow cable between two ranks; Linux, root"),
        ("scalewise bench sweep", "a job of a sweep beside a process for the same line"),
        ("... record=true", "keep the figures in experiments/records"),
    ),
    "calibrate": (
        ("scalewise calibrate", "in under two minutes; then hardware=measured"),
        ("... name=NAME ranks=N seconds=S", "the profile's name, ranks of the link, time a figure"),
        ("scalewise calibrate learn=runs", "how much longer steps took than was foreseen"),
    ),
    "wandb-sweep": (
        ("scalewise wandb-sweep sweep=NAME", "offline: print its YAML, for `wandb sweep FILE`"),
        ("... tracking.mode=online", "create it, and print what `wandb agent` takes"),
    ),
    "doctor": (("scalewise doctor", "devices, extras, disk, tracking"),),
}
"""How each verb is typed."""

COMPOSING = ("train", "plan", "wandb-sweep")
"""The verbs that take every group."""


def general_help() -> list[str]:
    """Returns what ``scalewise --help`` prints: verbs, groups, grammar, examples."""
    lines = ["usage: scalewise VERB [overrides] [Hydra's flags]", "", "verbs", *_help_table(VERBS)]
    lines += ["", *_group_lines(), "", "examples"]
    for what, line in EXAMPLES:
        lines += [f"  # {what}", f"  {line}"]
    lines += [
        "",
        "scalewise VERB --help says more of one. Hydra's flags pass through: -m (every combination",
        "of a,b,c), --cfg job (show, do not run), --info, -cd DIR (your own groups).",
        'Completion: eval "$(scalewise -sc install=bash)"',
    ]
    return lines


def command_help(verb: str) -> list[str]:
    """Returns what ``scalewise VERB --help`` prints."""
    lines = [f"scalewise {verb}: {VERBS[verb]}", "", *_help_table(dict(FORMS[verb]))]
    return [*lines, *(["", *_group_lines()] if verb in COMPOSING else [])]


def _help_table(rows: dict[str, str]) -> list[str]:
    wide = max(map(len, rows))
    return [f"  {name:<{max(wide, 12)}} {does}" for name, does in rows.items()]


def _group_lines() -> list[str]:
    from scalewise.config import paths

    groups = (*paths.GROUPS, "experiment", "sweep")
    names = {group: ", ".join(paths.option_names(group)) for group in groups}
    return [
        "groups: pick one by GROUP=OPTION, change a field by GROUP.FIELD=VALUE",
        *_help_table(names),
    ]
