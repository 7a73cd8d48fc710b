"""A dashboard: a saved W&B workspace of a project, with the panels that every run fills."""

from __future__ import annotations

import hashlib

from scalewise.reports.compare import (
    ACCURACY,
    LOSS,
    PEAK,
    PREFERRED,
    PRICE,
    REWARD,
    SPEED,
    STEP,
    VALIDATION,
)
from scalewise.reports.live import (
    Comparer,
    Coordinates,
    Curves,
    Drawn,
    Importance,
    Scatter,
    Setting,
    Summary,
)
from scalewise.reports.service import Service, told


def _curves(*rows: tuple[str, str]) -> tuple[Drawn, ...]:
    return tuple(Drawn(title, Curves((key,), from_zero="loss" not in key)) for key, title in rows)


SECTIONS: tuple[tuple[str, tuple[Drawn, ...]], ...] = (
    (
        "Learning",
        _curves(
            (LOSS, "Train loss, nats per token"),
            (VALIDATION, "Validation loss, nats per token"),
            ("train/grad_norm", "Gradient norm"),
            ("train/lr", "Learning rate"),
        ),
    ),
    (
        "Preferences",
        _curves(
            (PREFERRED, "Held-out pairs preferred rightly, by chance a half"),
            ("val/reward_margin", "Held-out margin of the rewards, nats"),
            ("train/reward_accuracy", "Pairs of the batch preferred rightly"),
        ),
    ),
    (
        "Rewards",
        _curves(
            (REWARD, "Held-out reward of the likeliest answers"),
            ("train/reward", "Reward of the answers drawn"),
            ("train/kl", "Divergence from the reference, nats per token"),
        ),
    ),
    (
        "Classes",
        _curves(
            (ACCURACY, "Held-out rows whose class is told rightly"),
            ("train/accuracy", "Rows of the batch"),
        ),
    ),
    (
        "Speed",
        _curves(
            (SPEED, "Tokens/s, all ranks"),
            ("throughput/mfu", "Model flops utilization"),
            (STEP, "Step, s"),
            ("time/data_s", "Waiting for data, s"),
        ),
    ),
    (
        "Memory",
        _curves(
            (PEAK, "Peak of the fullest device, bytes"),
            ("memory/activations_bytes", "Activations, bytes"),
            ("memory/host_peak_bytes", "Largest process, bytes"),
        ),
    ),
    (
        "Across runs",
        (
            Drawn(
                "Peak memory against step time, loss as colour",
                Scatter(Summary(STEP), Summary(PEAK), Summary(LOSS)),
            ),
            Drawn(
                "Loss against price of a billion tokens",
                Scatter(Summary(PRICE), Summary(LOSS), Summary(PEAK)),
            ),
            Drawn(
                "Settings and what came of them",
                Coordinates((
                    (Setting("model", True), "model"),
                    (Setting("parallelism", True), "layout"),
                    (Setting("precision", True), "precision"),
                    (Setting("optimizer", True), "optimizer"),
                    (Setting("optimizer.lr", False), "learning rate"),
                    (Summary(SPEED), "tokens/s"),
                    (Summary(PEAK), "peak, bytes"),
                    (Summary(LOSS), "train loss"),
                )),
            ),
            Drawn("What tells of the loss", Importance(Summary(LOSS))),
            Drawn("What is set otherwise", Comparer()),
        ),
    ),
)  # fmt: skip
"""The sections of a dashboard, each with its panels."""


def save(name: str, *, entity: str | None, project: str) -> str:
    """Makes the dashboard ``name`` of a project, or updates the panels of it; returns its address.

    ``entity`` None: the account's. What people set otherwise about its runs stays. Raises
    :class:`scalewise.errors.ScalewiseError` with what the service said, in one line.
    """
    service = Service()
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.workspaces import internal

    from scalewise.reports.wandb_blocks import panel

    entity = entity or service.entity
    service.project(entity, project)
    slug = hashlib.sha256(name.encode()).hexdigest()[:11]
    own = f"nw-{slug}-v"
    with told():
        try:
            view = ws.Workspace._from_model(internal.View.from_name(entity, project, own))
        except ValueError:  # there is none of that name
            view = ws.Workspace(entity=entity, project=project)
            view._internal_name = own
            view.runset_settings.groupby = [ws.Metric("Group")]
        view.name = name
        view.settings.x_axis = "step"
        view.sections = [
            ws.Section(name=title, panels=[panel(one) for one in drawn], is_open=True)
            for title, drawn in SECTIONS
        ]
        internal.upsert_view2(view._to_model())
    return f"{service.address}/{entity}/{project}?nw={slug}"
