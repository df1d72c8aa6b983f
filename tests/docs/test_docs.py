"""The documentation is true: generated pages are current, links lead somewhere, and every block of code runs.

Python and curl run against a tiny model and a server of it; commands that would take long (serving, benchmarks, installing)
are parsed by the very parsers that would read them.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from octavo.cli import COMMANDS, bench
from octavo.cli.chat import ChatArgs
from octavo.cli.client import ClientArgs
from octavo.cli.serve import parse as parse_serve
from octavo.config.parser import OptionParser
from tests.server.test_real_engine import Server, start, stop

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "compat" / "vllm" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
DEMO = "smollm2"  # the name in the pages that stands for any model
ADDRESS = "http://localhost:8000"
PATIENCE = 120.0


class Parsed(Exception):
    """Options were read without complaint."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands(page: Path) -> list[str]:
    """The commands of a page's bash and console blocks, one line each; in console blocks those behind `$`."""
    found: list[str] = []
    for text in blocks(page, "bash"):
        found += text.replace("\\\n", " ").splitlines()
    for text in blocks(page, "console"):
        found += [line[2:] for line in text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    return [line for line in found if line.strip() and not line.startswith("#")]


def with_code(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, *languages)]


def page_id(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--served-model-name", DEMO, "--enable-admin-routes", "--responses-store-bytes", "1M")
    profiler = f"--profiler-config.torch_profiler_dir={tmp_path_factory.mktemp('traces')}"
    # Tools take more words than the model's own context holds.
    longer = ("--hf-overrides.max_position_embeddings", "2048")
    running = start(tiny_llama_dir, *options, *longer, "--enable-sleep-mode", profiler)
    yield running
    stop(running)


def test_every_block_has_a_language_that_is_checked():
    known = {"python", "bash", "console", "json", "yaml"}
    for page in PAGES:
        if page.name in ("performance-log.md", "architecture.md"):
            continue
        fences = re.findall(r"^```(.*)$", page.read_text(), flags=re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert set(fences[::2]) <= known, (page, set(fences[::2]) - known)


@pytest.mark.parametrize("name", load(ROOT / "docs" / "generate.py").PAGES)
def test_generated_pages_are_current(name):
    page = load(ROOT / "docs" / "generate.py").PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == page, f"docs/{name} is old; run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", with_code("python"), ids=page_id)
def test_python_runs(page, server, tiny_llama_dir):
    """A page's blocks share their names, as in one session."""
    session: dict[str, object] = {"__name__": "page"}
    for text in blocks(page, "python"):
        # A served name stays as it is: it is the server's.
        code = re.sub(rf'(?<!\bmodel=)"{DEMO}"', repr(str(tiny_llama_dir)), text).replace(ADDRESS, server.url)
        code = re.sub(rf'\b(LLM|EngineArgs)\(model="{DEMO}"', rf"\1(model={str(tiny_llama_dir)!r}", code)
        exec(compile(code, f"{page.name}", "exec"), session)
    for value in session.values():
        if type(value).__name__ in ("OpenAI", "Anthropic"):  # pages do not close their clients, and need not
            value.close()


@pytest.mark.parametrize("page", with_code("json", "yaml"), ids=page_id)
def test_data_can_be_read(page, tmp_path):
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
        file = tmp_path / "server.yaml"
        file.write_text(text)
        parse_serve(["--config", str(file)])


@pytest.mark.parametrize("page", with_code("bash", "console"), ids=page_id)
def test_commands_are_right(page, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text("port: 8001\n")
    for command in commands(page):
        words = shlex.split(command, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        check_command(words, server)


def check_command(words: list[str], server: Server) -> None:
    match words[0].removeprefix(".venv/bin/"), *words[1:]:
        case "octavo", "serve", *rest:
            if not any(word.startswith("--help") for word in rest):
                parse_serve(rest)
        case "octavo", ("chat" | "complete") as name, *rest:
            args = ChatArgs if name == "chat" else ClientArgs
            args(**OptionParser("octavo", "", (args,)).parse_options(rest))
        case "octavo", "bench", name, *rest:
            assert name in bench.BENCHMARKS
            check_bench(name, rest)
        case "octavo", name, *_:
            assert name in COMMANDS
        case "curl", *rest:
            rest = [word.replace(ADDRESS, server.url) for word in rest]
            done = subprocess.run(["curl", "-sS", "--fail-with-body", *rest], capture_output=True, timeout=PATIENCE)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
        case "pip", "install", *rest:
            check_pip(rest)
        case "make", *targets:
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
        case ("vllm", "serve", *rest) | ("python", "-m", "vllm.entrypoints.openai.api_server", *rest):
            check_vllm(rest)
        case (("python" | "nice"), *rest):
            assert any((ROOT / word).is_file() for word in rest if word.endswith(".py")), words
        case _:
            raise AssertionError(f"nobody checks {shlex.join(words)}")


def check_bench(name: str, arguments: list[str]) -> None:
    """Let the benchmark's own parser read its options, and nothing more."""
    parse = OptionParser.parse_options

    def parse_and_end(self, words):
        raise Parsed(parse(self, words))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(OptionParser, "parse_options", parse_and_end)
        bench.run([name, *arguments])


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if found := re.fullmatch(r"(?:\.|octavo)\[(.*)\]", word):
            assert set(found[1].split(",")) <= set(extras), word
        elif word.startswith("./"):
            assert (ROOT / word / "pyproject.toml").is_file()


def check_vllm(words: list[str]) -> None:
    code = "import sys; from vllm._options import translate_words; print('\\n'.join(translate_words(sys.argv[1:])))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={"PYTHONPATH": f"{ROOT / 'compat' / 'vllm'}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    parse_serve(done.stdout.split("\n")[:-1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, server, tiny_llama_dir, capsys):
    example = load(ROOT / "examples" / name)
    if name == "chat_client.py":
        example.main(f"{server.url}/v1")
    elif name == "streaming.py":
        import asyncio

        asyncio.run(example.main(str(tiny_llama_dir)))
    else:
        example.main(str(tiny_llama_dir))
    said = capsys.readouterr().out
    assert len(said.splitlines()) >= 3
    if name == "streaming.py":
        assert "second: enough" in said
    if name == "logits_processor.py":
        vowels = [line for line in said.splitlines() if line.startswith("without 'aeiou'")]
        assert vowels and not set("aeiou") & set(vowels[0].partition(": ")[2].lower())
