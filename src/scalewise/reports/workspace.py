"""Dashboard: a saved W&B workspace with the panels that every run fills."""

from __future__ import annotations

import hashlib

import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces import internal

from scalewise.compat.wandb import set_view_name, view_model, workspace_of_view
from scalewise.reports.compare import (
    ACCURACY,
    LOSS,
    PEAK,
    PREFERENCE_ACCURACY,
    PRICE,
    REWARD,
    SPEED,
    STEP,
    VALIDATION_LOSS,
)
from scalewise.reports.wandb_blocks import build_panel
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
from scalewise.reports.wandb_report import WandbReportService, wandb_errors


def _curve_panels(*rows: tuple[str, str]) -> tuple[TitledPanel, ...]:
    return tuple(
        TitledPanel(title, CurvesPanel((key,), from_zero="loss" not in key)) for key, title in rows
    )


SECTIONS: tuple[tuple[str, tuple[TitledPanel, ...]], ...] = (
    (
        "Training",
        _curve_panels(
            (LOSS, "Train loss (nats per token)"),
            (VALIDATION_LOSS, "Validation loss (nats per token)"),
            ("train/grad_norm", "Gradient norm"),
            ("train/skipped_steps", "Skipped optimizer steps"),
            ("train/lr", "Learning rate"),
        ),
    ),
    (
        "Experts",
        _curve_panels(
            ("experts/max_load", "Load of the busiest expert, relative to the mean"),
            ("experts/min_load", "Load of the idlest expert, relative to the mean"),
            ("experts/router_entropy", "Router entropy (nats)"),
            ("experts/dropped", "Dropped pairs of a token and an expert"),
        ),
    ),
    (
        "Preference optimization",
        _curve_panels(
            (PREFERENCE_ACCURACY, "Validation preference accuracy (untrained: 0.5)"),
            ("val/reward_margin", "Validation reward margin (nats)"),
            ("train/reward_accuracy", "Train preference accuracy"),
        ),
    ),
    (
        "Reinforcement learning",
        _curve_panels(
            (REWARD, "Validation reward, greedy decoding"),
            ("train/reward", "Train reward"),
            ("train/kl", "KL divergence from the reference model (nats per token)"),
        ),
    ),
    (
        "Classification",
        _curve_panels(
            (ACCURACY, "Validation accuracy"),
            ("train/accuracy", "Train accuracy"),
        ),
    ),
    (
        "Throughput",
        _curve_panels(
            (SPEED, "Tokens per second, all ranks"),
            ("throughput/mfu", "Model FLOPs utilization (MFU), causal attention"),
            ("throughput/mfu_palm", "Model FLOPs utilization (MFU), PaLM's convention"),
            (STEP, "Step time (s)"),
            ("time/data_s", "Time waiting for data (s)"),
        ),
    ),
    (
        "Memory",
        _curve_panels(
            (PEAK, "Peak device memory, worst rank (bytes)"),
            ("memory/activations_bytes", "Activations (bytes)"),
            ("memory/host_peak_bytes", "Peak host memory of a process (bytes)"),
        ),
    ),
    (
        "Run comparison",
        (
            TitledPanel(
                "Peak memory vs. step time, colored by loss",
                ScatterPanel(SummaryNumber(STEP), SummaryNumber(PEAK), SummaryNumber(LOSS)),
            ),
            TitledPanel(
                "Loss vs. price per billion tokens, colored by peak memory",
                ScatterPanel(SummaryNumber(PRICE), SummaryNumber(LOSS), SummaryNumber(PEAK)),
            ),
            TitledPanel(
                "Parallel coordinates: settings and results",
                CoordinatesPanel((
                    (RunSetting("model", True), "model"),
                    (RunSetting("parallelism", True), "parallelism"),
                    (RunSetting("precision", True), "precision"),
                    (RunSetting("optimizer", True), "optimizer"),
                    (RunSetting("optimizer.lr", False), "learning rate"),
                    (SummaryNumber(SPEED), "tokens/s"),
                    (SummaryNumber(PEAK), "peak memory (bytes)"),
                    (SummaryNumber(LOSS), "train loss"),
                )),
            ),
            TitledPanel("Parameter importance for loss", ImportancePanel(SummaryNumber(LOSS))),
            TitledPanel("Config differences", RunComparerPanel()),
        ),
    ),
)  # fmt: skip
"""Title and panels of each section of the dashboard."""


def save_workspace(name: str, *, entity: str | None, project: str) -> str:
    """Create the dashboard ``name`` in a project, or update its panels, and return its URL.

    With ``entity=None``, the default entity of the account is used. Run settings that users changed
    in the dashboard are kept. Raises :class:`scalewise.errors.ScalewiseError` with the error of the
    service in one line.
    """
    service = WandbReportService()
    entity = entity or service.entity
    service.project(entity, project)
    slug = hashlib.sha256(name.encode()).hexdigest()[:11]
    view_name = f"nw-{slug}-v"
    with wandb_errors():
        try:
            view = workspace_of_view(internal.View.from_name(entity, project, view_name))
        except ValueError:  # no workspace has this name
            view = ws.Workspace(entity=entity, project=project)
            set_view_name(view, view_name)
            view.runset_settings.groupby = [ws.Metric("Group")]
        view.name = name
        view.settings.x_axis = "step"
        view.sections = [
            ws.Section(name=title, panels=[build_panel(panel) for panel in panels], is_open=True)
            for title, panels in SECTIONS
        ]
        internal.upsert_view2(view_model(view))
    return f"{service.address}/{entity}/{project}?nw={slug}"
