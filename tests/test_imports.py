"""The walls between the folders: who may import what, by the syntax trees of the package."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "octavo"

LEVELS: dict[str, int] = {
    **dict.fromkeys(("utils", "errors", "envs", "logger"), 0),
    **dict.fromkeys(("types",), 1),
    **dict.fromkeys(("config", "platforms", "plugins"), 2),
    **dict.fromkeys(("ops", "distributed", "context"), 3),
    **dict.fromkeys(("layers",), 4),
    **dict.fromkeys(("models", "lora", "loader", "multimodal", "tokenizer", "structured_output", "kv_transfer"), 5),
    **dict.fromkeys(("scheduler", "worker"), 6),
    **dict.fromkeys(("engine",), 7),
    **dict.fromkeys(("llm", "llm_pooling", "server", "metrics", "tracing", "profiler", "bench"), 8),
    **dict.fromkeys(("cli", "__main__"), 9),
}
# `import octavo` names every level, lazily.
LAZY_ROOT = "__init__"
# The version and nothing else may be taken from the root by everyone.
ROOT_NAMES = {"__version__"}

WITHOUT_TORCH = {"types", "config", "scheduler", "tokenizer", "server", "structured_output", "errors", "envs", "logger"}
LAZY_TORCH = {"platforms", "plugins"}  # inside functions only
VENDOR = {"torch", "triton", "flash_attn", "flashinfer", "xformers", "bitsandbytes", "deep_gemm", "vllm", "sgl_kernel"}
SAME_LEVEL = {  # part -> parts of its own level it may import; level 5 is filled by the rules below
    "logger": {"envs"},
    "envs": set(),
    "config": {"platforms"},
    "platforms": {"plugins", "config"},
    "loader": set(),
    "models": set(),
    "scheduler": {"structured_output", "kv_transfer"},
}
ONLY = {  # part -> all it may import of the package
    "scheduler": {
        "scheduler",
        "utils",
        "errors",
        "envs",
        "logger",
        "types",
        "config",
        "structured_output",
        "kv_transfer",
    },
    "models": {"models", "layers", "config.hf", "errors"},
    "loader": {
        "loader",
        "utils",
        "errors",
        "envs",
        "logger",
        "types",
        "config",
        "platforms",
        "ops",
        "context",
        "layers",
    },
    "tokenizer": {
        "tokenizer",
        "utils",
        "errors",
        "envs",
        "logger",
        "types",
        "config",
        "plugins",
        "loader.gguf_metadata",
    },
}
# What runs transformers' own modules is glue, not a model: it swaps layers in and reads the step context.
MODEL_FILES_EXEMPT = {
    "models/registry.py",
    "models/transformers_backend.py",
    "models/transformers_pooling.py",
    "models/__init__.py",
}
THROUGH_ENGINE = {"server", "llm", "llm_pooling", "bench"}  # reach the core through engine/ alone
NOT_FOR_FRONT = {"scheduler", "worker", "models", "layers", "ops", "loader", "context"}


@dataclass(frozen=True)
class Import:
    file: str  # relative to the package
    line: int
    module: str  # absolute dotted name
    names: tuple[str, ...]
    top_level: bool  # runs when the file is imported
    type_checking: bool

    @property
    def part(self) -> str:
        """The folder or module directly below the package that the importing file belongs to."""
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def target(self) -> str | None:
        """The same of what is imported; None for other packages."""
        pieces = self.module.split(".")
        if pieces[0] != "octavo":
            return None
        return pieces[1] if len(pieces) > 1 else LAZY_ROOT

    def __str__(self) -> str:
        return f"octavo/{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    relative = path.relative_to(ROOT).as_posix()
    package = ["octavo", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text(), str(path))
    yield from _walk(tree, relative, package, top_level=True, type_checking=False)


def _walk(node: ast.AST, file: str, package: list[str], *, top_level: bool, type_checking: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, child.lineno, alias.name, (), top_level, type_checking)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            names = tuple(alias.name for alias in child.names)
            if module == "octavo":  # `from octavo import envs` imports octavo.envs
                for name in names:
                    target = module if name in ROOT_NAMES else f"octavo.{name}"
                    yield Import(file, child.lineno, target, names, top_level, type_checking)
            else:
                yield Import(file, child.lineno, module, names, top_level, type_checking)
        in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(
            child,
            file,
            package,
            top_level=top_level and not in_function,
            type_checking=type_checking or guarded,
        )


IMPORTS = [found for path in sorted(ROOT.rglob("*.py")) for found in imports_of(path)]
INTERNAL = [found for found in IMPORTS if found.target not in (None, LAZY_ROOT) and found.part != LAZY_ROOT]


def refuse(offenders: list[Import], rule: str) -> None:
    assert not offenders, rule + ":\n  " + "\n  ".join(map(str, offenders))


def test_every_part_has_a_level():
    parts = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")} - {LAZY_ROOT}
    assert parts <= set(LEVELS), f"give these a level: {sorted(parts - set(LEVELS))}"


def test_nothing_imports_upwards():
    offenders = [found for found in INTERNAL if LEVELS[found.target or ""] > LEVELS[found.part]]
    refuse(offenders, "a lower level imports a higher one (inside functions counts)")


def test_parts_of_one_level_keep_apart():
    offenders = [
        found
        for found in INTERNAL
        if found.target != found.part
        and LEVELS[found.target or ""] == LEVELS[found.part]
        and found.target not in SAME_LEVEL.get(found.part, {found.target})
    ]
    refuse(offenders, "parts of one level that must not know each other")


def test_scheduler_and_worker_never_meet():
    offenders = [found for found in INTERNAL if {found.part, found.target} == {"scheduler", "worker"}]
    refuse(offenders, "scheduler and worker speak through types/step.py alone")


@pytest.mark.parametrize("part", sorted(ONLY))
def test_parts_with_a_short_list_keep_to_it(part: str):
    def allowed(found: Import) -> bool:
        return found.target in ONLY[part] or any(
            found.module == f"octavo.{name}" or found.module.startswith(f"octavo.{name}.") for name in ONLY[part]
        )

    offenders = [
        found
        for found in INTERNAL
        if found.part == part and found.file not in MODEL_FILES_EXEMPT and not allowed(found)
    ]
    refuse(offenders, f"{part}/ may import {sorted(ONLY[part])} only")


def test_front_reaches_the_core_through_engine_alone():
    offenders = [found for found in INTERNAL if found.part in THROUGH_ENGINE and found.target in NOT_FOR_FRONT]
    refuse(offenders, "server, llm and bench reach the engine through engine/ alone")


def test_engine_reaches_workers_through_an_executor_alone():
    offenders = [
        found
        for found in INTERNAL
        if found.part == "engine" and found.target == "worker" and "executor" not in found.file
    ]
    refuse(offenders, "engine/ reaches workers through Executor alone")


def test_torch_stays_out_of_the_light_levels():
    offenders = [
        found
        for found in IMPORTS
        if found.module.split(".")[0] == "torch"
        and (
            found.part in WITHOUT_TORCH
            or (found.part in LAZY_TORCH and found.top_level)
            or (found.part == "utils" and "torch" not in Path(found.file).stem)
        )
    ]
    refuse(offenders, "no torch here")


def test_vendor_libraries_stay_in_ops_and_platforms():
    offenders = [
        found
        for found in IMPORTS
        if found.module.split(".")[0] in VENDOR - {"torch"} and found.part not in ("ops", "platforms", "cli")
    ]
    refuse(offenders, "vendor libraries are reached through ops/ and platforms/ alone")


def test_no_import_cycles():
    modules = {_module_name(path): path for path in ROOT.rglob("*.py")}
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for found in imports_of(path):
            if not found.top_level or found.type_checking:
                continue
            for target in (found.module, *(f"{found.module}.{n}" for n in found.names)):
                if target in modules and target != name and target != "octavo":
                    edges[name].add(target)
    assert (cycle := _find_cycle(edges)) is None, " -> ".join(cycle or [])


def _module_name(path: Path) -> str:
    pieces = ["octavo", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)


def _find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for target in sorted(edges[name]):
            if cycle := visit(target, [*trail, name]):
                return cycle
        done.add(name)
        return None

    for name in sorted(edges):
        if cycle := visit(name, []):
            return cycle
    return None


def test_the_checks_see_what_they_should():
    source = "import torch\ndef f():\n    from octavo.server import app\nfrom . import b\nfrom octavo import envs\n"
    found = list(_walk(ast.parse(source), "config/a.py", ["octavo", "config"], top_level=True, type_checking=False))
    assert [(i.module, i.top_level) for i in found] == [
        ("torch", True),
        ("octavo.server", False),
        ("octavo.config", True),
        ("octavo.envs", True),
    ]
    assert _find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    "statement",
    [
        "import octavo",
        "import octavo.config.args, octavo.config.resolve, octavo.config.server_args",
        "import octavo.cli, octavo.cli.serve, octavo.cli.chat",
        "from octavo import SamplingParams, EngineArgs, TextPrompt, RequestOutput",
        "import octavo.platforms; octavo.platforms.get_platform('cpu')",
    ],
)
def test_light_imports_load_no_heavy_library(statement: str):
    code = f"{statement}\nimport sys\nprint([m for m in ('torch', 'transformers', 'fastapi', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_octavo_is_quick():
    code = "import time; t = time.perf_counter(); import octavo; print(time.perf_counter() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)
        for _ in range(3)
    ]
    assert min(seconds) < 0.3


def test_every_public_name_resolves():
    import octavo

    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = octavo.Nothing
