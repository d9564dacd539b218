"""Rules of the whole repository, checked on its files: direction of imports, packages, words, links, presets."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("launcher", "recipes", "fsdp_core")
# launcher -> recipes -> fsdp_core -> torch: each may import the ones it lists here, and no other of ours.
MAY_IMPORT = {
    "launcher": {"launcher", "recipes", "configs"},
    "recipes": {"recipes", "fsdp_core"},
    "fsdp_core": {"fsdp_core"},
}
HEAVY = {"torch", "transformers", "datasets", "numpy", "pyarrow", "wandb", "matplotlib", "tokenizers"}
# The launcher's side of a rank; everything else in it answers without torch.
RANK_SIDE = {"rank_run.py", "rendezvous.py", "join.py", "store.py"}
# Written in two halves, so that this file does not hold them.
FORBIDDEN = [
    "/wo" + "rk/",
    "/tm" + "p/w",
    "../sha" + "red",
    "/.lib" + "rary",
    "lent G" + "PU",
    "py" + "pi.org",
    "pythonho" + "sted",
]
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|raise NotImplemented" + r"Error)\b")


def tracked(pattern: str = "*") -> list[Path]:
    """Files of the checkout that git knows and that are there; every file where there is no git (an archive)."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [
            ROOT / name for name in listed.stdout.splitlines() if Path(name).match(pattern) and (ROOT / name).is_file()
        ]
    skip = {".venv", ".git", "runs", "build", "dist", "__pycache__"}
    return [path for path in ROOT.rglob(pattern) if path.is_file() and not skip & set(path.relative_to(ROOT).parts)]


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def running_nodes(path: Path) -> Iterator[ast.AST]:
    """All nodes of a module but those under ``if TYPE_CHECKING``."""
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left.extend(node.orelse)
        else:
            left.extend(ast.iter_child_nodes(node))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import, wherever it stands, but for those that only types need."""
    for node in running_nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0], node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    ours = {*PACKAGES, "configs", "tests", "benchmarks"}
    wrong = [
        f"{name_of(path)}:{line} imports {target}"
        for path in modules(package)
        for target, line in imports(path)
        if target in ours and target not in MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_needs_torch_and_the_standard_library_alone() -> None:
    allowed = {"torch", "fsdp_core", "__future__", *sys.stdlib_module_names}
    wrong = [
        f"{name_of(path)}:{line} imports {target}"
        for path in modules("fsdp_core")
        for target, line in imports(path)
        if target not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_only_a_ranks_side_of_the_launcher_loads_anything_heavy() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {target}"
        for path in modules("launcher")
        if path.name not in RANK_SIDE
        for target, line in imports(path)
        if target in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_ring_of_imports() -> None:
    """Not even one that an import inside a function would hide."""
    graph = {dotted: targets for path in modules(*PACKAGES) for dotted, targets in [_module_imports(path)]}
    visiting: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        if module in visiting:
            ring = " -> ".join([*visiting[visiting.index(module) :], module])
            pytest.fail(f"modules import each other: {ring}")
        if module in done:
            return
        visiting.append(module)
        for target in graph[module]:
            visit(target)
        visiting.pop()
        done.add(module)

    for module in graph:
        visit(module)


def _module_imports(path: Path) -> tuple[str, list[str]]:
    """(dotted name, modules of ours that it imports, wherever it does), a package standing for its ``__init__``."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    targets = set()
    for node in running_nodes(path):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            candidates = [name if _file_of(name) else base for name in inner]
        else:
            continue
        targets |= {name for name in candidates if _file_of(name) and name != dotted}
    return dotted, sorted(targets)


def _file_of(dotted: str) -> Path | None:
    if dotted.partition(".")[0] not in PACKAGES:
        return None
    base = ROOT.joinpath(*dotted.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {_plain(re.split(r"[<>=!~\[; ]", line)[0]) for line in [*project["dependencies"], *extras]}
    declared |= {"omegaconf"}  # comes with hydra-core, which pins it
    provided_by = importlib.metadata.packages_distributions()
    ours = {*PACKAGES, "configs", "tests", "benchmarks", *(path.stem for path in (ROOT / "benchmarks").iterdir())}
    wrong = []
    for path in [*modules(*PACKAGES), *modules("tests")]:  # benchmarks may compare with engines nobody has to install
        for target, line in imports(path):
            if target in ours or target in sys.stdlib_module_names or target == "__future__":
                continue
            distributions = {_plain(name) for name in provided_by.get(target, [target])}
            if not distributions & declared:
                wrong.append(f"{name_of(path)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_constraints_cover_what_is_asked_for_and_name_no_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    asked = {_plain(re.split(r"[<>=!~\[; ]", line)[0]) for line in [*project["dependencies"], *extras]}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line) for line in lines)
    assert asked <= {_plain(line.partition("==")[0]) for line in lines}


def test_no_word_of_one_machine_is_in_the_repository() -> None:
    wrong = [
        f"{name_of(path)} holds {word!r}"
        for path in tracked()
        for word in FORBIDDEN
        if word in path.read_text(errors="replace")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_unfinished() -> None:
    wrong = [
        f"{name_of(path)}:{number} {line.strip()}"
        for path in modules(*PACKAGES)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_called_after_nothing() -> None:
    """A file is named by its subject; ``utils`` is none."""
    names = {"utils", "util", "misc", "helpers", "common"}
    wrong = [
        name_of(path)
        for path in tracked()
        if path.stem.strip("_") in names or names & set(path.relative_to(ROOT).parts)
    ]
    assert not wrong


def test_files_stay_in_one_head() -> None:
    """400 lines is a good size to start asking; this is where the answer is no."""
    long = {name_of(path): n for path in modules(*PACKAGES) if (n := len(path.read_text().splitlines())) > 500}
    assert not long


@pytest.mark.parametrize("path", tracked("*.md"), ids=name_of)
def test_links_of_markdown_pages_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    anchors = {name: _anchors(name) for name in [path, *path.parent.rglob("*.md")]}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{name_of(path)} links to {target}"
        if anchor and page.suffix == ".md":
            assert anchor in anchors.get(page, _anchors(page)), f"{name_of(path)} links to {target}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PRESETS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=name_of)
def test_every_preset_opens_with_what_it_is_and_its_command(path: Path) -> None:
    what, command = [line for line in path.read_text().splitlines() if line != "# @package _global_"][:2]
    assert what.startswith("# ")
    assert len(what.split()) > 2
    assert re.match(r"# (\S+=\S+ )*(fsdp-launch|torchrun .* -m launcher)\b", command), command


def test_there_are_presets() -> None:
    assert len(PRESETS) > 30
