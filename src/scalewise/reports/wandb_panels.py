"""Panels of a W&B report or dashboard, which W&B draws from the logged metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SummaryNumber:
    """A value of the run summary."""

    key: str
    """Key in ``summary.json``."""

    @property
    def name(self) -> str:
        """Key in the summary of the W&B run."""
        return f"final/{self.key}"


@dataclass(frozen=True)
class RunSetting:
    """A setting of a run."""

    key: str
    """Key on the command line."""
    option: bool
    """Whether the setting is the chosen option of a config group."""

    @property
    def name(self) -> str:
        """Dotted key in the config of the W&B run."""
        return f"choices.{self.key}" if self.option else self.key


@dataclass(frozen=True)
class CurvesPanel:
    """Line plot of metrics over the steps."""

    metrics: tuple[str, ...]
    """Metric keys."""
    stacked: bool = False
    """Whether the metrics are stacked areas."""
    from_zero: bool = False
    """Whether the vertical axis starts at 0."""


@dataclass(frozen=True)
class BarsPanel:
    """Bar chart with one bar per run."""

    number: SummaryNumber
    """Length of the bar."""


@dataclass(frozen=True)
class ScatterPanel:
    """Scatter plot with one point per run."""

    x: SummaryNumber
    """Horizontal axis."""
    y: SummaryNumber
    """Vertical axis."""
    color: SummaryNumber | None = None
    """Color of the point."""


@dataclass(frozen=True)
class CoordinatesPanel:
    """Parallel coordinates with one line per run."""

    axes: tuple[tuple[RunSetting | SummaryNumber, str], ...]
    """Axes with their titles."""


@dataclass(frozen=True)
class ImportancePanel:
    """Parameter importance."""

    target: SummaryNumber
    """Result to explain."""


@dataclass(frozen=True)
class RunComparerPanel:
    """Config differences between runs."""


WandbPanel = (
    CurvesPanel | BarsPanel | ScatterPanel | CoordinatesPanel | ImportancePanel | RunComparerPanel
)


@dataclass(frozen=True)
class TitledPanel:
    """A panel with its title."""

    title: str
    """Title of the panel."""
    panel: WandbPanel
    """The panel."""
