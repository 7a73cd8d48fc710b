"""Guards of private names of libraries."""

from contextlib import suppress

import pytest

from scalewise.compat import IncompatibleLibraryError, PrivateNames, supported_range


@pytest.fixture
def private() -> PrivateNames:
    return PrivateNames("torch")


MESSAGE = r"torch [\w.+]+ is not supported: .*{}.*; install torch<2.14,>=2.11"


def test_missing_import_raises_when_the_name_is_used(private: PrivateNames) -> None:
    with private:
        from torch.optim._muon import no_such_name  # noqa: F401
    with pytest.raises(IncompatibleLibraryError, match=MESSAGE.format("no_such_name")):
        private.missing_name("no_such_name")


def test_other_errors_of_an_import_propagate(private: PrivateNames) -> None:
    with pytest.raises(ZeroDivisionError), private:
        1 / 0  # noqa: B018


def test_unknown_name_of_a_complete_module_is_an_attribute_error(private: PrivateNames) -> None:
    with pytest.raises(AttributeError, match="typo"):
        private.missing_name("typo")


def test_module_attribute_protocol_is_not_affected_by_missing_names(private: PrivateNames) -> None:
    with private:
        raise ImportError
    with pytest.raises(AttributeError):
        private.missing_name("__path__")


def test_missing_attribute_names_the_version(private: PrivateNames) -> None:
    @private.reads("_gone")
    def read(owner: object) -> object:
        return owner._gone  # type: ignore[attr-defined]

    with pytest.raises(IncompatibleLibraryError, match=MESSAGE.format("_gone")):
        read(object())


def test_other_missing_attribute_stays_an_attribute_error(private: PrivateNames) -> None:
    @private.reads("_gone")
    def read(owner: object) -> object:
        return owner.other  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="other"):
        read(object())


def test_replacement_ends_with_its_context(private: PrivateNames) -> None:
    path = "scalewise.compat:IncompatibleLibraryError.exit_code"
    with suppress(KeyError), private.replaced(path, 7):
        assert private.get(path) == 7
        raise KeyError
    assert private.get(path) == 1


def test_replacement_restores_a_static_method(
    private: PrivateNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owner:
        @staticmethod
        def double(number: int) -> int:
            return 2 * number

    monkeypatch.setattr("scalewise.compat.Owner", Owner, raising=False)
    with private.replaced("scalewise.compat:Owner.double", None):
        pass
    assert Owner().double(2) == 4


@pytest.mark.parametrize(
    "path", ["torch._no_module:x", "torch:no_name", "torch.nn:Module.no_method", "torch.nn:X.y"]
)
def test_missing_path_names_the_version(path: str, private: PrivateNames) -> None:
    with pytest.raises(IncompatibleLibraryError, match=MESSAGE.format(path)):
        private.get(path)
    with pytest.raises(IncompatibleLibraryError, match=MESSAGE.format(path)):
        private.replace(path, None)


@pytest.mark.parametrize(
    ("distribution", "requirement"),
    [("hydra-core", "hydra-core<1.4,>=1.3.8"), ("deepspeed", "deepspeed>=0.18")],
)
def test_supported_range_is_the_requirement_of_the_package(
    distribution: str, requirement: str
) -> None:
    assert supported_range(distribution) == requirement
