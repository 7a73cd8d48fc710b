"""Private names of Optuna and submitit: presence and relied-on behaviour."""

from inspect import getsource, signature

import optuna
import pytest
from submitit import SlurmExecutor
from submitit.core.core import PicklingExecutor

from scalewise.compat import IncompatibleLibraryError, optuna_submitit


def test_ids_are_those_of_the_storage() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="first", storage=storage)
    study = optuna.create_study(study_name="second", storage=storage)
    study.ask()
    study.ask()
    (_, frozen) = study.get_trials()
    assert optuna_submitit.study_id(study) == storage.get_study_id_from_name("second")
    trial_id = storage.get_trial_id_from_study_id_trial_number(optuna_submitit.study_id(study), 1)
    assert optuna_submitit.trial_id(frozen) == trial_id
    assert optuna.trial.Trial(study, trial_id).number == 1


def test_submit_command_is_called_by_a_submission() -> None:
    assert [*signature(SlurmExecutor._submit_command).parameters] == ["self", "command"]
    assert "self._submit_command(" in getsource(PicklingExecutor)
    with pytest.raises(IncompatibleLibraryError, match=r"submitit .* is not supported"):
        optuna_submitit.submit_command(object(), "true")
