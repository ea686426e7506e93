"""What `Engine` may be told, and where it finds a model."""

import pytest

from allspan.protos.api.errors import ConfigError, ModelNotFound
from allspan.worker.engine.settings import find_model, worker_config


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def folder(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_or_file_is_taken_as_it_is(tmp_path, home):
    assert find_model(folder(tmp_path / "tiny")) == ("tiny", tmp_path / "tiny")
    (tmp_path / "small.Q4_1.gguf").write_text("")
    assert find_model(tmp_path / "small.Q4_1.gguf") == ("small.Q4_1", tmp_path / "small.Q4_1.gguf")


def test_a_pulled_model_is_found_by_its_name(home):
    (home / "models").mkdir(parents=True)
    (home / "models/SmolLM2-135M-Instruct.gguf").write_text("")
    assert find_model("smollm2-135m-instruct")[0] == "SmolLM2-135M-Instruct"
    folder(home / "models/ORG/NAME")
    assert find_model("ORG/NAME") == ("ORG/NAME", home / "models/ORG/NAME")


def test_a_pulled_model_drafts_by_its_name(tmp_path, home):
    (home / "models" / "small.gguf").parent.mkdir(parents=True, exist_ok=True)
    (home / "models" / "small.gguf").touch()
    found = worker_config(tmp_path, {"speculative_config": '{"model": "small"}'}).scheduler.speculative_config
    assert str(home / "models" / "small.gguf") in found


@pytest.mark.parametrize("name", ["nobody-s-model", "", "../etc", "/nowhere/at/all"])
def test_a_model_that_is_nowhere_is_refused_with_the_way_out(home, name):
    with pytest.raises(ModelNotFound, match="allspan pull"):
        find_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-here/model"])
def test_a_name_that_no_file_can_have_is_refused_in_few_words(home, name):
    with pytest.raises(ModelNotFound, match=f"{name[:64]}.*{len(name)} characters") as refused:
        find_model(name)
    assert len(str(refused.value)) < 200


def test_settings_reach_their_group(tmp_path, home):
    config = worker_config(
        folder(tmp_path / "tiny"), {"dtype": "bfloat16", "page_size": 64, "max_num_seqs": 3, "threads": 2}
    )
    assert (config.model.dtype, config.cache.page_size, config.scheduler.max_num_seqs, config.parallel.threads) == (
        "bfloat16",
        64,
        3,
        2,
    )
    assert (config.model.name, config.model.path) == ("tiny", str(tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (64, 512)),
        ({"device": "cuda"}, (256, 8192)),
        ({"max_num_seqs": 1000}, (1000, 1000)),
        ({"max_num_batched_tokens": 16}, (16, 16)),
        ({"device": "cuda", "max_num_batched_tokens": 512}, (256, 512)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 9}, (8, 9)),
    ],
)
def test_a_step_s_sizes_are_the_device_s_where_nothing_is_said(tmp_path, home, settings, sizes):
    most = worker_config(folder(tmp_path / "tiny"), settings).scheduler
    assert (most.max_num_seqs, most.max_num_batched_tokens) == sizes


def test_by_default_it_uses_the_processors_it_may_use(tmp_path, home):
    assert worker_config(folder(tmp_path / "tiny"), {}).parallel.threads >= 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_length": 5}, "unknown setting 'max_model_length'; did you mean 'max_model_len'"),
        ({"path": "x"}, "unknown setting 'path'"),
        ({"page_size": 17}, "page_size is 17"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"threads": "two"}, "threads"),
        ({"threads": object()}, "cannot be used"),
        ({"dtype": "float8"}, "dtype"),
    ],
)
def test_a_bad_setting_is_refused_by_name(tmp_path, home, settings, words):
    with pytest.raises(ConfigError, match=words):
        worker_config(folder(tmp_path / "tiny"), settings)
