"""Input files of a run are found by content, from any folder."""

import json
import os
import shutil
from itertools import chain

import numpy as np
import pytest
from tokenizers import Tokenizer

from scalewise import inputs, registry
from scalewise.commands import run_arguments
from scalewise.data import input_files
from scalewise.data.prepare import prepare_splits
from scalewise.data.text import PretokenizedData, TextData
from scalewise.errors import ConfigError, DataError

DATA_OPTIONS = {"vocabulary": 300, "sequence": 8}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / "cache"))


def write_texts(folder, count=12):
    folder.mkdir(parents=True)
    for index in range(count):
        (folder / f"{index}.txt").write_text(f"file number {index}\n" * 40)


def both_splits(data):
    splits = prepare_splits(data, 300, 0)
    return [
        dataset.gather(range(len(dataset))).tolist()
        for dataset in (splits.train, splits.validation)
    ]


def values(**data):
    return {"data": {"_target_": registry.target_name(TextData), **data}, "seed": 1}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Folder with texts and a run that was started there with relative paths."""
    write_texts(tmp_path / "project" / "texts")
    monkeypatch.chdir(tmp_path / "project")
    run = tmp_path / "project" / "runs" / "a"
    run.mkdir(parents=True)
    inputs.write_inputs(values(paths=["texts/*.txt"]), run)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "project"


def paths_found(run, **options):
    relocated = inputs.relocate_inputs(values(paths=["texts/*.txt"]), run, options)
    return relocated["data"]["paths"]


def test_validation_files_depend_on_content_only(tmp_path, monkeypatch):
    write_texts(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for file in (tmp_path / "two").iterdir():
        file.rename(file.with_name(f"renamed-{os.urandom(4).hex()}.txt"))
    shutil.copytree(tmp_path / "one", tmp_path / "a" / "b")
    os.rename(tmp_path / "a" / "b" / "3.txt", tmp_path / "a" / "3.txt")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    path_patterns = (
        ("one/*.txt",),
        (f"{tmp_path}/one/*.txt",),
        ("./one/../one/*",),
        ("link/*.txt",),
        ("two/*.txt",),
        ("a/**/*.txt",),
        tuple(f"one/{index}.txt" for index in range(11, -1, -1)),
    )
    expected = None
    for index, paths in enumerate(path_patterns):
        monkeypatch.setenv("SCALEWISE_CACHE", str(tmp_path / f"cache-{index % 2}"))
        split_texts = both_splits(TextData(paths=paths, validation_fraction=0.3, **DATA_OPTIONS))
        expected = expected or split_texts
        assert split_texts == expected, paths


def test_moved_files_share_a_cache(tmp_path):
    write_texts(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    tokenizers = {
        prepare_splits(
            TextData(paths=(f"{tmp_path}/{name}/*.txt",), **DATA_OPTIONS), 300, 0
        ).tokenizer
        for name in ("one", "two")
    }
    assert len(tokenizers) == 1


def test_copies_of_one_file_are_in_one_split(tmp_path):
    write_texts(tmp_path / "one")
    for index in range(12):
        copy = tmp_path / "one" / f"{index}-copy.txt"
        shutil.copy(tmp_path / "one" / f"{index}.txt", copy)
    data = TextData(paths=(f"{tmp_path}/one/*.txt",), validation_fraction=0.3, **DATA_OPTIONS)
    splits = prepare_splits(data, 300, 0)
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    train, validation_text = (tokenizer.decode([*chain(*dataset)]) for dataset in both_splits(data))
    for index in range(12):
        line = f"number {index}\nfile number {index}\n"
        assert (line in train) != (line in validation_text), index


def test_identical_files_are_split_within(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"line {index}\n" for index in range(300)))
    train, validation_samples = both_splits(
        TextData(paths=(f"{tmp_path}/*.txt",), validation_fraction=0.2, **DATA_OPTIONS)
    )
    assert 0 < len(validation_samples) < len(train) / 3


def test_relative_paths_resolve_from_the_launch_folder(project):
    assert paths_found(project / "runs" / "a") == [f"{project}/texts/*.txt"]


def test_moved_project_is_found_with_its_run(project, tmp_path):
    project.rename(tmp_path / "moved")
    run = tmp_path / "moved" / "runs" / "a"
    assert paths_found(run) == [f"{tmp_path}/moved/texts/*.txt"]


def test_copied_run_finds_its_launch_folder(project, tmp_path):
    shutil.copytree(project / "runs" / "a", tmp_path / "copy")
    assert paths_found(tmp_path / "copy") == [f"{project}/texts/*.txt"]


def test_inputs_are_found_by_content(project, tmp_path, monkeypatch):
    shutil.copytree(project / "texts", tmp_path / "texts")
    (project / "texts" / "3.txt").write_text("other content")
    assert paths_found(project / "runs" / "a") == [f"{tmp_path}/texts/*.txt"]


def test_absolute_paths_move_with_the_project(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    recorded_values = values(paths=[f"{project}/texts/*.txt"])
    inputs.write_inputs(recorded_values, project / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    project.rename(tmp_path / "moved")
    relocated = inputs.relocate_inputs(recorded_values, tmp_path / "moved" / "runs" / "a", {})
    assert relocated["data"]["paths"] == [f"{tmp_path}/moved/texts/*.txt"]


def test_given_paths_are_checked_by_content(project, tmp_path):
    run = project / "runs" / "a"
    shutil.copytree(project / "texts", tmp_path / "same")
    write_texts(tmp_path / "other", count=3)
    assert paths_found(run, **{"data.paths": ["same/*"]}) == ["same/*"]
    for paths, reason in ((["other/*"], "has other content"), (["none/*"], "no such files")):
        with pytest.raises(ConfigError, match=f"data.paths=.*: {reason}"):
            paths_found(run, **{"data.paths": paths})
    with pytest.raises(ConfigError, match=r"model.path=x: is not an input path of the run"):
        paths_found(run, **{"model.path": "x"})


def test_inputs_with_other_content_are_rejected(project, monkeypatch):
    run, data = project / "runs" / "a", TextData(paths=(f"{project}/texts/*.txt",))
    inputs.check_data(data, run)
    (project / "texts" / "3.txt").write_text("other content")
    with pytest.raises(DataError, match=r"data\.paths=.*: has other content than the run"):
        inputs.check_data(data, run)
    (run / inputs.INPUTS_FILE).unlink()
    inputs.check_data(data, run)


def test_inputs_of_earlier_versions_are_searched_in_the_current_folder(
    project, tmp_path, monkeypatch
):
    run = project / "runs" / "a"
    (run / inputs.INPUTS_FILE).unlink()
    assert paths_found(run) == ["texts/*.txt"]
    monkeypatch.chdir(project)
    assert paths_found(run) == [f"{project}/texts/*.txt"]


def test_hub_names_are_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded_values = {"model": {"path": "gpt2"}, "data": {"path": "roneneldan/TinyStories"}}
    inputs.write_inputs(recorded_values, tmp_path)
    assert inputs.recorded_digests(tmp_path) == {}
    assert inputs.relocate_inputs(recorded_values, tmp_path, {}) == recorded_values


def test_shard_order_distinguishes_inputs(tmp_path):
    for name, first in (("a.bin", 0), ("b.bin", 100)):
        np.arange(first, first + 50, dtype="<u2").tofile(tmp_path / name)
    first_digests = inputs.content_digests(
        {"data": {"paths": [f"{tmp_path}/*.bin"], "validation_paths": []}}
    )
    (tmp_path / "a.bin").rename(tmp_path / "c.bin")
    second_digests = inputs.content_digests(
        {"data": {"paths": [f"{tmp_path}/*.bin"], "validation_paths": []}}
    )
    assert first_digests != second_digests
    assert prepare_splits(PretokenizedData(paths=(f"{tmp_path}/*.bin",), sequence=8), 200, 0).train


def test_model_weights_are_identified_by_content(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "SAMPLED_BYTES", 1000)
    monkeypatch.setattr(input_files, "SAMPLE_BYTES", 16)
    weights = np.random.default_rng(0).bytes(5000)
    digests = []
    for name, data in (("a", weights), ("b", weights), ("c", weights[:-1] + b"x"), ("d", b"y" * 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
        (tmp_path / name / "config.json").write_text("{}")
        digests.append(
            inputs.content_digests({"model": {"path": str(tmp_path / name)}})["model.path"]
        )
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
    (tmp_path / "a" / "README.md").write_text("says nothing of the weights")
    assert (
        inputs.content_digests({"model": {"path": str(tmp_path / "a")}})["model.path"] == digests[0]
    )


def test_command_options_are_read_as_overrides():
    options = {"data.paths": "['a b.txt',c.txt]", "data.tokenizer": "x/tokenizer.json", "step": "1"}
    path_options = run_arguments._path_options(options)
    assert path_options == {
        "data.paths": ["a b.txt", "c.txt"],
        "data.tokenizer": "x/tokenizer.json",
    }
    assert run_arguments._path_options({"data.paths": "a.txt"}) == {"data.paths": ["a.txt"]}
    with pytest.raises(ConfigError, match=r"data.paths=\[a: cannot be parsed"):
        run_arguments._path_options({"data.paths": "[a"})


def test_documents_of_earlier_versions_have_no_special_tokens():
    recorded_values = values(paths=["x"], tokenizer="t.json")
    inputs.add_missing(recorded_values)
    assert recorded_values["data"]["special_tokens"] is False
    earlier_values, current_values = (
        values(paths=["x"], tokenizer=None),
        values(special_tokens=True),
    )
    inputs.add_missing(earlier_values, current_values)
    assert earlier_values["data"]["special_tokens"] is True
    tokens = {"data": {"_target_": registry.target_name(PretokenizedData)}}
    inputs.add_missing(tokens)
    assert set(tokens["data"]) == {"_target_"}


def test_inputs_record_names_the_launch_folder(project):
    record = json.loads((project / "runs" / "a" / inputs.INPUTS_FILE).read_text())
    assert record["launch_folder"] == str(project)
    assert list(record["digests"]) == ["data.paths"]
