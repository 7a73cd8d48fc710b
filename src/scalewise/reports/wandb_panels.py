"""Which panels W&B draws by itself, told by the keys under which runs log what they draw.

A part of the outline names them beside its own pictures; only the W&B rendering reads them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SummaryNumber:
    """A number that a run ends with, by its key in ``summary.json``."""

    key: str

    @property
    def name(self) -> str:
        """Returns where W&B's summary has it."""
        return f"final/{self.key}"


@dataclass(frozen=True)
class RunSetting:
    """A setting, by the key that a command line has for it; ``option``: it names a part."""

    key: str
    option: bool

    @property
    def name(self) -> str:
        """Returns where a run's config has it, dotted."""
        return f"choices.{self.key}" if self.option else self.key


@dataclass(frozen=True)
class CurvesPanel:
    """Metrics over the steps, one line a run and metric; ``stacked`` on each other of one run."""

    metrics: tuple[str, ...]
    stacked: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class BarsPanel:
    """One number of each run."""

    number: SummaryNumber


@dataclass(frozen=True)
class ScatterPanel:
    """Two numbers of each run against each other, a third as colour."""

    x: SummaryNumber
    y: SummaryNumber
    colour: SummaryNumber | None = None


@dataclass(frozen=True)
class CoordinatesPanel:
    """Settings and numbers of each run side by side."""

    axes: tuple[tuple[RunSetting | SummaryNumber, str], ...]


@dataclass(frozen=True)
class ImportancePanel:
    """How much each setting tells of a number."""

    target: SummaryNumber


@dataclass(frozen=True)
class RunComparerPanel:
    """What is set otherwise from run to run."""


Live = (
    CurvesPanel | BarsPanel | ScatterPanel | CoordinatesPanel | ImportancePanel | RunComparerPanel
)


@dataclass(frozen=True)
class TitledPanel:
    """A panel that W&B draws, under its title."""

    title: str
    panel: Live
