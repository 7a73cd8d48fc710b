"""Environment variables that are set before torch is imported."""

import pytest

from scalewise.torch_environment import set_torch_variables


def test_cuda_allocator_uses_expandable_segments() -> None:
    environment: dict[str, str] = {}
    set_torch_variables(environment)
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    "name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "GOMP_SPINCOUNT"]
)
def test_variables_of_the_user_are_kept(name: str) -> None:
    environment = {name: "of the user"}
    set_torch_variables(environment)
    assert environment[name] == "of the user"
    assert ("PYTORCH_ALLOC_CONF" in environment) == (name != "PYTORCH_CUDA_ALLOC_CONF")
