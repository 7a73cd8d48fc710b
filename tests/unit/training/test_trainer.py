"""Settings of Lightning's trainer."""

import warnings

import pytest
from lightning.fabric.utilities.warnings import PossibleUserWarning

from scalewise.training.trainer import silence_lightning


@pytest.mark.parametrize(
    "message",
    [
        "GPU available but not used. You can set it by doing `Trainer(accelerator='gpu')`.",
        "The `srun` command is available on your system but is not used.",
    ],
)
def test_warnings_about_chosen_settings_are_silenced(message: str) -> None:
    with silence_lightning():
        warnings.warn(message, PossibleUserWarning, stacklevel=1)
    with pytest.raises(PossibleUserWarning):
        warnings.warn(message, PossibleUserWarning, stacklevel=1)
