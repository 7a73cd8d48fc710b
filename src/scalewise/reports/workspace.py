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
from scalewise.reports.wandb_panels import (
    CoordinatesPanel,
    CurvesPanel,
    ImportancePanel,
    RunComparerPanel,
    RunSetting,
    ScatterPanel,
    SummaryNumber,
    TitledPanel,
)
from scalewise.reports.wandb_service import WandbReportService, wandb_errors


def _curve_panels(*rows: tuple[str, str]) -> tuple[TitledPanel, ...]:
    return tuple(
        TitledPanel(title, CurvesPanel((key,), from_zero="loss" not in key)) for key, title in rows
    )


SECTIONS: tuple[tuple[str, tuple[TitledPanel, ...]], ...] = (
    (
        "Learning",
        _curve_panels(
            (LOSS, "Train loss, nats per token"),
            (VALIDATION, "Validation loss, nats per token"),
            ("train/grad_norm", "Gradient norm"),
            ("train/lr", "Learning rate"),
        ),
    ),
    (
        "Preferences",
        _curve_panels(
            (PREFERRED, "Held-out pairs preferred rightly, by chance a half"),
            ("val/reward_margin", "Held-out margin of the rewards, nats"),
            ("train/reward_accuracy", "Pairs of the batch preferred rightly"),
        ),
    ),
    (
        "Rewards",
        _curve_panels(
            (REWARD, "Held-out reward of the likeliest answers"),
            ("train/reward", "Reward of the answers drawn"),
            ("train/kl", "Divergence from the reference, nats per token"),
        ),
    ),
    (
        "Classes",
        _curve_panels(
            (ACCURACY, "Held-out rows whose class is told rightly"),
            ("train/accuracy", "Rows of the batch"),
        ),
    ),
    (
        "Speed",
        _curve_panels(
            (SPEED, "Tokens/s, all ranks"),
            ("throughput/mfu", "Model flops utilization"),
            (STEP, "Step, s"),
            ("time/data_s", "Waiting for data, s"),
        ),
    ),
    (
        "Memory",
        _curve_panels(
            (PEAK, "Peak of the fullest device, bytes"),
            ("memory/activations_bytes", "Activations, bytes"),
            ("memory/host_peak_bytes", "Largest process, bytes"),
        ),
    ),
    (
        "Across runs",
        (
            TitledPanel(
                "Peak memory against step time, loss as colour",
                ScatterPanel(SummaryNumber(STEP), SummaryNumber(PEAK), SummaryNumber(LOSS)),
            ),
            TitledPanel(
                "Loss against price of a billion tokens",
                ScatterPanel(SummaryNumber(PRICE), SummaryNumber(LOSS), SummaryNumber(PEAK)),
            ),
            TitledPanel(
                "Settings and what came of them",
                CoordinatesPanel((
                    (RunSetting("model", True), "model"),
                    (RunSetting("parallelism", True), "layout"),
                    (RunSetting("precision", True), "precision"),
                    (RunSetting("optimizer", True), "optimizer"),
                    (RunSetting("optimizer.lr", False), "learning rate"),
                    (SummaryNumber(SPEED), "tokens/s"),
                    (SummaryNumber(PEAK), "peak, bytes"),
                    (SummaryNumber(LOSS), "train loss"),
                )),
            ),
            TitledPanel("What tells of the loss", ImportancePanel(SummaryNumber(LOSS))),
            TitledPanel("What is set otherwise", RunComparerPanel()),
        ),
    ),
)  # fmt: skip
"""The sections of a dashboard, each with its panels."""


def save_workspace(name: str, *, entity: str | None, project: str) -> str:
    """Makes the dashboard ``name`` of a project, or updates the panels of it; returns its address.

    ``entity`` None: the account's. What people set otherwise about its runs stays. Raises
    :class:`scalewise.errors.ScalewiseError` with what the service said, in one line.
    """
    service = WandbReportService()
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.workspaces import internal

    from scalewise.reports.wandb_blocks import build_panel

    entity = entity or service.entity
    service.project(entity, project)
    slug = hashlib.sha256(name.encode()).hexdigest()[:11]
    own = f"nw-{slug}-v"
    with wandb_errors():
        try:
            view = ws.Workspace._from_model(internal.View.from_name(entity, project, own))
        except ValueError:  # there is none of that name
            view = ws.Workspace(entity=entity, project=project)
            view._internal_name = own
            view.runset_settings.groupby = [ws.Metric("Group")]
        view.name = name
        view.settings.x_axis = "step"
        view.sections = [
            ws.Section(name=title, panels=[build_panel(one) for one in drawn], is_open=True)
            for title, drawn in SECTIONS
        ]
        internal.upsert_view2(view._to_model())
    return f"{service.address}/{entity}/{project}?nw={slug}"
