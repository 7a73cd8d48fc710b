"""Mixtures: options of sources, the shared tokenizer, and issues that name the source."""

import dataclasses
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from scalewise import ConfigError
from scalewise.config.parse import parse_group
from scalewise.data.chat import ChatData
from scalewise.data.mixture import MixtureData, MixtureSource, MixtureStage
from scalewise.data.prepare import prepare_splits
from scalewise.data.stdlib_corpus import StdlibCorpus
from scalewise.data.synthetic import RandomTokens
from scalewise.data.text import TextData
from scalewise.errors import DataError

RANDOM = RandomTokens(rows=20)
SOURCE = "+data@data.sources.a.data=synthetic"


def mixture(sources=None, **fields):
    sources = sources or {"a": MixtureSource(RANDOM, 1.0), "b": MixtureSource(RANDOM, 2.0)}
    return MixtureData(sources=sources, **fields)


def issues_of(config):
    return {issue.key: str(issue) for issue in config.validate()}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "data.sources={}: is empty; add +data@data.sources.NAME.data=text for each source"),
        ((SOURCE + "s",), "data@data.sources.a.data=synthetics: no such option; did you mean syn"),
        ((SOURCE, "data.sources.a.weigt=1"), "no such key; did you mean data.sources.a.weight?"),
        ((SOURCE, "data.sources.a.weight=x"), "data.sources.a.weight=x: is not a number"),
        ((SOURCE, "data.sources.a.data.row=1"), "did you mean data.sources.a.data.rows?"),
        ((SOURCE, "data.sources.a.data.rows=-1"), "set data.sources.a.data.rows=100000"),
        ((SOURCE, "data.sources.a.data=text"), "choose one of data@data.sources.a.data="),
        (("+data.sources.b.data=text",), "write +data@data.sources.b.data=text"),
        ((SOURCE, "+data.stages.end.strt=0.5"), "data.stages.end.strt"),
        ((SOURCE, "+data.stages.end.start=x"), "data.stages.end.start"),
        ((SOURCE, "+data.stages.end=1"), "data.stages.end=1"),
    ],
)
def test_invalid_override_is_rejected_with_its_key(compose, overrides, message):
    with pytest.raises(ConfigError) as error:
        compose("data=mixture", *overrides)
    assert message in str(error.value)


def test_mixture_is_composed_from_overrides(compose):
    run = compose(
        *("data=mixture", "data.sequence=8", SOURCE, "+data@data.sources.b.data=corpus"),
        *("data.sources.a.weight=3", "data.sources.b.weight=1", "data.sources.b.data.folder=email"),
        *("data.vocabulary=300", "+data.stages.end.start=0.5", "+data.stages.end.weights.a=0"),
    )
    assert run.data == MixtureData(
        sequence=8,
        vocabulary=300,
        sources={
            "a": MixtureSource(RandomTokens(), 3.0),
            "b": MixtureSource(StdlibCorpus(folder="email"), 1.0),
        },
        stages={"end": MixtureStage(0.5, {"a": 0.0})},
    )
    configs = run.data.source_configs()
    assert configs["a"] == RandomTokens(sequence=8)
    assert configs["b"] == StdlibCorpus(sequence=8, vocabulary=300, folder="email")
    assert run.data.required_vocabulary == 300
    assert parse_group("data", run.as_dict()["data"]) == run.data


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": -1.0}, "data.sources.a.weight=-1.0: must be a finite number of 0 or more; set"),
        ({"a": float("nan")}, "data.sources.a.weight=nan: must be a finite number of 0 or more"),
        ({"a": 0.0}, "data.sources.a.weight=0: is 0 in all stages: it is never read; set"),
        ({"a": None}, "data.sources.a.weight=null: is null, but other sources have weights; set"),
    ],
)
def test_invalid_weight_is_rejected(fields, message):
    weights = {"a": 1.0, "b": 1.0, **fields}
    sources = {name: MixtureSource(RANDOM, weight) for name, weight in weights.items()}
    assert [text.startswith(message) for text in issues_of(mixture(sources)).values()] == [True]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (MixtureStage(1.0), "data.stages.end.start=1.0: must be a fraction of the steps"),
        (MixtureStage(0.5, {"c": 1.0}), "data.stages.end.weights=c: is not a source of the mix"),
        (MixtureStage(0.5, {"a": -2.0}), "data.stages.end.weights.a=-2.0: must be a finite"),
        (MixtureStage(0.5, {"a": 0.0, "b": 0.0}), "data.stages.end.weights={a:0.0,b:0.0}: have"),
    ],
)
def test_invalid_stage_is_rejected(stage, message):
    texts = issues_of(mixture(stages={"end": stage})).values()
    assert [text.startswith(message) for text in texts] == [True]


def test_weight_of_zero_is_valid_in_a_part_of_the_stages():
    sources = {"a": MixtureSource(RANDOM, 0.0), "b": MixtureSource(RANDOM, 1.0)}
    assert not issues_of(mixture(sources, stages={"end": MixtureStage(0.5, {"a": 1.0})}))
    at_start = {"end": MixtureStage(0.0, {"a": 1.0, "b": 0.0})}
    assert list(issues_of(mixture(sources, stages=at_start))) == ["data.sources.b.weight"]


def test_stage_of_unweighted_sources_names_all():
    sources = {name: MixtureSource(RANDOM) for name in "ab"}
    stages = {"end": MixtureStage(0.5, {"a": 1.0})}
    assert list(issues_of(mixture(sources, stages=stages))) == ["data.stages.end.weights"]


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (RandomTokens(pairs=True), "data"),
        (RandomTokens(sequence=64), "data.sequence"),
        (StdlibCorpus(vocabulary=999), "data.vocabulary"),
        (mixture(), "data"),
        (TextData(), "data.paths"),
    ],
)
def test_unsuitable_source_is_rejected(data, key):
    sources = {"a": MixtureSource(data, 1.0), "b": MixtureSource(StdlibCorpus(), 1.0)}
    assert list(issues_of(mixture(sources))) == [f"data.sources.a.{key}"]


def test_tokenizer_requires_text_to_train_on(tmp_path):
    (tmp_path / "chat.jsonl").write_text("{}")
    data = ChatData(paths=(f"{tmp_path}/chat.jsonl",))
    config = mixture({"a": MixtureSource(data, 1.0)})
    assert "data.tokenizer" in issues_of(config)


def test_empty_source_is_rejected_with_its_key(tmp_path):
    (tmp_path / "a.txt").write_text("")
    text = TextData(paths=(f"{tmp_path}/a.txt",), validation_fraction=0.0)
    sources = {"wiki": MixtureSource(text, 1.0), "code": MixtureSource(StdlibCorpus(), 1.0)}
    with pytest.raises(DataError, match=r"data\.sources\.wiki\.data\.paths=.*has no text"):
        prepare_splits(mixture(sources, vocabulary=300, sequence=8), 300, 0)


def test_sources_share_a_tokenizer_trained_on_all(tmp_path):
    for name, text in (("a", "alpha beta " * 400), ("b", "gamma delta " * 400)):
        (tmp_path / f"{name}.txt").write_text(text)
    sources = {
        name: MixtureSource(TextData(paths=(f"{tmp_path}/{name}.txt",)), 1.0) for name in "ab"
    }
    splits = prepare_splits(mixture(sources, vocabulary=280, sequence=8), 280, 0)
    tokenizer = Tokenizer.from_file(str(splits.tokenizer))
    assert {"alpha", "gamma"} <= {token.strip("Ġ") for token in tokenizer.get_vocab()}
    for name, dataset in (*splits.train.sources.items(), *splits.validation_sources.items()):
        text = tokenizer.decode(dataset.gather([0])[0])
        assert ("alpha" in text) == (name == "a"), (name, text)
    sizes = {name: len(dataset) for name, dataset in splits.train.sources.items()}
    assert len(splits.train) == sum(sizes.values())
    np.testing.assert_array_equal(
        splits.train.gather([sizes["a"], 0]),
        [splits.train.sources["b"].gather([0])[0], splits.train.sources["a"].gather([0])[0]],
    )


def test_hash_covers_the_content_of_sources(compose, tmp_path):
    from scalewise.launch.config_hash import config_hash

    file, moved = tmp_path / "a.txt", tmp_path / "moved.txt"

    def hash_of(path):
        return config_hash(
            compose(
                *("data=mixture", "+data@data.sources.a.data=text"),
                f"data.sources.a.data.paths=[{path}]",
            )
        )

    file.write_text("some text")
    moved.write_text("some text")
    first = hash_of(file)
    assert hash_of(moved) == first
    file.write_text("other text")
    assert hash_of(file) != first


def test_resolved_mixture_is_json(compose):
    run = compose("data=mixture", SOURCE)
    values = json.loads(json.dumps(run.as_dict()["data"]))
    assert values["sources"]["a"]["data"]["rows"] == RandomTokens().rows
    assert dataclasses.asdict(run.data)["sources"]["a"]["weight"] is None
