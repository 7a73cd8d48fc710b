"""Config hash: settings and input files that identify a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from scalewise import inputs
from scalewise.launch.config_hash import config_hash, hash_of_folder
from scalewise.run_config import RunConfig

Compose = Callable[..., RunConfig]


class TestHash:
    @pytest.mark.parametrize(
        "override",
        [
            "seed=2",
            "optimizer.lr=1e-4",
            "optimizer=sgd",
            "model.layers=3",
            "trainer.max_steps=7",
            "parallelism=ddp",
            "precision=bf16_mixed",
            "memory=checkpoint_full",
            "callbacks.guard.factor=3",
            "data.sequence=64",
            "resume=.",
            "hardware=h100",
        ],
    )
    def test_config_hash_includes_result_settings(self, override: str, compose: Compose) -> None:
        assert config_hash(compose(override, check_machine=False)) != config_hash(
            compose(check_machine=False)
        )

    @pytest.mark.parametrize(
        "override",
        [
            "name=other",
            "question=Why?",
            "launch.timeout=60",
            "tracking=none",
            "plan.fit=auto",
            "checkpoint.every=5",
            "resume=auto",
            "hardware.memory_gib=3",
            "trusted_packages=[fixtures]",
            "optimizer.lr=0.0003",
            "model=decoder_nano",
        ],
    )
    def test_config_hash_ignores_launch_settings(self, override: str, compose: Compose) -> None:
        assert config_hash(compose(override)) == config_hash(compose())


class TestInputs:
    """Input files are compared by content, as in the resumption of a single run."""

    @pytest.fixture
    def texts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        Path("a").mkdir()
        Path("a/one.txt").write_text("a text")
        return Path("a")

    @staticmethod
    def hash_of(compose: Compose, paths: str) -> str:
        return config_hash(compose("data=text", f"data.paths=[{paths}]", check_machine=False))

    def test_config_hash_ignores_file_locations(
        self, texts: Path, compose: Compose, tmp_path: Path
    ) -> None:
        before = self.hash_of(compose, "a/one.txt")
        texts.rename("b")
        assert self.hash_of(compose, "b/one.txt") == before
        assert self.hash_of(compose, str(tmp_path / "b/*.txt")) == before

    def test_config_hash_includes_file_contents(self, texts: Path, compose: Compose) -> None:
        before = self.hash_of(compose, "a/one.txt")
        (texts / "one.txt").write_text("another text")
        assert self.hash_of(compose, "a/one.txt") != before

    def test_config_hash_includes_added_files(self, texts: Path, compose: Compose) -> None:
        before = self.hash_of(compose, "a/*.txt")
        (texts / "two.txt").write_text("a second text")
        assert self.hash_of(compose, "a/*.txt") != before

    def test_config_hash_is_recomputed_from_read_files(
        self, texts: Path, compose: Compose, tmp_path: Path
    ) -> None:
        run, folder = (
            compose("data=text", "data.paths=[a/one.txt]", check_machine=False),
            tmp_path / "run",
        )
        folder.mkdir()
        (folder / "resolved.yaml").write_text(yaml.safe_dump(run.as_dict()))
        inputs.write_inputs(run.as_dict(), folder)
        before = config_hash(run)
        (texts / "one.txt").write_text("another text")
        assert hash_of_folder(folder) == before != config_hash(run)
