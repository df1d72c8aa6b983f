"""Options: declared once, checked when made, parsed from words and files, explained when they are wrong."""

import dataclasses
import json
import re

import pytest

from octavo.cli.serve import parse
from octavo.config.args import EngineArgs
from octavo.config.options import option_fields, parse_size
from octavo.config.parser import OptionParser
from octavo.config.server_args import ServerArgs
from octavo.config.unsupported import UNSUPPORTED, explain_unknown
from octavo.errors import ConfigError


def parse_engine(*words: str) -> dict:
    return OptionParser("octavo serve", "Serve.", (EngineArgs,), positional="model").parse_options(words)


def refused(capsys, *words: str) -> str:
    """The one line on standard error of a command line that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        parse_engine(*words)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_defaults_are_valid_and_nothing_is_parsed_from_nothing():
    assert EngineArgs() == EngineArgs(**parse_engine())
    assert parse_engine() == {}


@pytest.mark.parametrize("cls", [EngineArgs, ServerArgs])
def test_every_option_has_one_sentence_of_help_and_its_own_flag(cls):
    fields = option_fields(cls)
    assert len(fields) == len(dataclasses.fields(cls))
    for field in fields:
        assert field.option.help.endswith("."), field.name
        assert field.option.help.count("%") == 0, field.name
    shorts = [field.option.short for field in fields if field.option.short]
    assert len(shorts) == len(set(shorts))


def test_engine_and_server_options_do_not_overlap_each_other_or_the_unsupported():
    engine = {field.name for field in option_fields(EngineArgs)}
    server = {field.name for field in option_fields(ServerArgs)}
    assert not engine & server
    assert not (engine | server) & set(UNSUPPORTED)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("1G", 1 << 30),
        ("-1", -1),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "4kk", "1.5", "0.0001k", "four", "1e3", "-4k", "0x10"])
def test_what_is_not_a_size(text: str):
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("m",), {"model": "m"}),
        (("--model", "m"), {"model": "m"}),
        (("m", "--max_model_len", "4k"), {"model": "m", "max_model_len": 4000}),
        (("--max-model-len=auto",), {"max_model_len": "auto"}),
        (("--max-model-len", "-1"), {"max_model_len": -1}),
        (("-tp", "2", "-O0"), {"tensor_parallel_size": 2, "optimization_level": 0}),
        (("--enforce-eager",), {"enforce_eager": True}),
        (("--no-enforce_eager",), {"enforce_eager": False}),
        (("--served-model-name", "a", "b"), {"served_model_name": ["a", "b"]}),
        (("--hf-token",), {"hf_token": True}),
        (("--hf-token", "t"), {"hf_token": "t"}),
        (("--hf-overrides", '{"a": {"b": 1}}'), {"hf_overrides": {"a": {"b": 1}}}),
        (("--hf_overrides.a_b.c", "1", "--hf-overrides.d=x"), {"hf_overrides": {"a_b": {"c": 1}, "d": "x"}}),
        (("-cc.mode=0", "-cc", '{"x": 1}'), {"compilation_config": {"x": 1, "mode": 0}}),
        (("--op-providers", "rms_norm=torch,*=triton"), {"op_providers": {"rms_norm": "torch", "*": "triton"}}),
        (("--no-enable-lora",), {}),  # off is what happens anyway
    ],
)
def test_command_lines(words, expected):
    assert parse_engine(*words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--enable-lora",), "enable_lora is not supported yet: LoRA adapters are not served; merge the adapter"),
        (("--speculative-config", "{}"), "speculative_config is not supported yet"),
        (("--max-model-length", "3"), "there is no option max_model_length; did you mean max_model_len"),
        (("--zzzz",), "there is no option zzzz; see --help"),
        (("--max-num-seqs", "x"), "'x' is not a size"),
        (("--seed", "1.5"), "'1.5' is not an integer"),
        (("--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("--hf-overrides", "[1]"), "is a JSON list; an object is needed"),
        (("--hf-overrides", "{"), "is not JSON"),
        (("--hf-overrides.a",), "--hf-overrides.a needs a value"),
        (("--hf-overrides.a=1", "--hf-overrides.a.b=2"), "is set to a plain value"),
        (("one", "--model", "two"), "model is given twice: one and two"),
        (("one", "two"), "unexpected argument 'two'"),
        (("--config", "/nonexistent.yaml"), "cannot be read"),
    ],
)
def test_wrong_command_lines_say_what_to_do(capsys, words, message):
    assert message in refused(capsys, *words)


def test_a_file_of_options_is_checked_like_flags_and_the_command_line_wins(tmp_path, capsys):
    file = tmp_path / "octavo.yaml"
    file.write_text(
        "model: from-file\nseed: 3\nmax-model-len: 4K\nenable_prefix_caching: false\nhf_overrides: {a: {b: 1}}\n"
        "served-model-name: [x, y]\ndownload_dir: null\nenable_lora: false\n"
    )
    assert parse_engine("--config", str(file), "from-words", "--seed=4") == {
        "model": "from-words",
        "seed": 4,
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": {"b": 1}},
        "served_model_name": ["x", "y"],
    }
    for content, message in [
        ("sed: 3", "there is no option sed; did you mean seed"),
        ("enable_lora: true", "enable_lora is not supported yet"),
        ("seed: soon", "'soon' is not an integer"),
        ("- a\n- b", "must hold a mapping"),
        ("a: [", "cannot be read"),
        ("config: other.yaml", "cannot stand in a file"),
    ]:
        file.write_text(content)
        assert message in refused(capsys, "--config", str(file))
    file.write_text("")
    assert parse_engine("--config", str(file)) == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a finite number, above 0 and at most 1"),
        ({"gpu_memory_utilization": 0}, "above 0"),
        ({"gpu_memory_utilization": float("nan")}, "finite"),
        ({"tensor_parallel_size": 0}, "an integer, at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True is not allowed"),
        ({"max_num_seqs": "many"}, "'many' is not a size"),
        ({"seed": None}, "seed=None is not allowed"),
        ({"seed": "7"}, "seed='7' is not allowed"),
        ({"dtype": "int8"}, "dtype must be one of auto, half"),
        ({"enforce_eager": "no"}, "True or False"),
        ({"served_model_name": [1]}, "a list of strings"),
        ({"hf_overrides": "x"}, "a dictionary"),
        ({"max_model_len": "long"}, "'long' is not a size"),
    ],
)
def test_values_from_python_are_checked(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        EngineArgs(**values)
    assert caught.value.param == next(iter(values))


def test_values_from_python_are_brought_into_shape():
    args = EngineArgs(max_model_len="4k", gpu_memory_utilization=1, served_model_name="x")
    assert (args.max_model_len, args.gpu_memory_utilization, args.served_model_name) == (4000, 1.0, ["x"])
    assert EngineArgs(hf_overrides={}).hf_overrides is not EngineArgs().hf_overrides


def test_unknown_keywords_are_explained():
    assert EngineArgs.from_kwargs(model="m", enable_lora=False, speculative_config=None, cpu_offload_gb=0).model == "m"
    with pytest.raises(ConfigError, match="enable_lora is not supported yet"):
        EngineArgs.from_kwargs(enable_lora=True)
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        EngineArgs.from_kwargs(tensor_parallel=2)
    assert explain_unknown("block_sizes", ["block_size"]) == "there is no option block_sizes; did you mean block_size?"


def help_of(capsys, word: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(["--help" if not word else f"--help={word}"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_is_grouped_complete_and_searchable(capsys):
    whole = help_of(capsys, "")
    for cls in (EngineArgs, ServerArgs):
        for field in option_fields(cls):
            assert field.flag in whole
            assert f"{field.option.group}:" in whole
    assert "(default: raw_logprobs)" in whole
    cache = help_of(capsys, "cache")
    assert "--block-size" in cache and "--host" not in cache
    assert "--max-model-len" in help_of(capsys, "max_model")
    assert "No option mentions 'qqq'" in help_of(capsys, "qqq")


def test_serve_splits_engine_and_server_options():
    engine_args, server_args = parse(
        [
            "m",
            "--port",
            "0",
            "--api-key",
            "a",
            "b",
            "--allowed-origins",
            "*",
            "--seed",
            "5",
            "--chat-template",
            "{{ x }}",
        ]
    )
    assert (engine_args.model, engine_args.seed, engine_args.chat_template) == ("m", 5, "{{ x }}")
    assert (server_args.port, server_args.api_key, server_args.allowed_origins) == (0, ["a", "b"], ["*"])
    assert server_args.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 65536}, "at most 65535"),
        ({"ssl_certfile": "c"}, "ssl_certfile needs ssl_keyfile"),
        ({"ssl_ca_certs": "c"}, "no effect without ssl_certfile"),
        ({"ssl_keyfile": "k", "ssl_certfile": "c", "ssl_cert_reqs": 2}, "needs ssl_ca_certs"),
        ({"allow_credentials": True}, "no effect without allowed_origins"),
        ({"root_path": "x"}, "must start with a slash"),
        ({"shutdown_timeout": -1}, "at least 0"),
    ],
)
def test_server_options_are_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        ServerArgs(**values)


def test_json_flags_survive_the_way_through_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    overrides = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "x": [1, "a b", None]}
    file.write_text(json.dumps({"hf_overrides": overrides}))
    assert parse_engine("--config", str(file))["hf_overrides"] == overrides
