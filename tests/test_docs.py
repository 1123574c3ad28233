"""docs/ and README.md against the code.  `python -m tests.test_docs` (make docs) remakes the generated tables."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from megarl.platform.kernels import Kernels
from megarl.platform.patches import all_patches
from megarl.recipe import Recipe, Section, _fields

ROOT = Path(__file__).parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")])
MACHINES = {
    "CPU": Kernels("cpu", "torch", "torch"),
    "GPU": Kernels("cuda", "torch", "torch"),
    "GPU, TE and FA4": Kernels("cuda", "transformer_engine", "flash-attn-4"),
}


# Generated tables


def recipe_tables() -> str:
    """One table for the top level and one for each section."""
    described = dict(_fields(Recipe))
    parts = []
    for name, section in _sections(Recipe, ""):
        parts += [f"### `{name}`", "", described[name].description, ""] if name else []
        parts += _table(["key", "default", "accepted", "meaning"], _rows(section)) + [""]
    return "\n".join(parts)


def _sections(section: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    yield name, section
    for key, inner in _inner(section).items():
        yield from _sections(inner, f"{name}.{key}" if name else key)


def _inner(section: type[Section]) -> dict[str, type[Section]]:
    found = {}
    for key, field in section.model_fields.items():
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, Section):
                found[key] = option
    return found


def _rows(section: type[Section]) -> Iterator[list[str]]:
    schema = section.model_json_schema()["properties"]
    for key, field in section.model_fields.items():
        if key in _inner(section):
            continue
        default = "required" if field.is_required() else f"`{_plain(field.default)}`"
        if len(default) > 30:
            default = "see meaning"
        yield [f"`{key}`", default, _accepted(schema[key]), field.description.replace("\n", " ")]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _accepted(schema: dict) -> str:
    if "anyOf" in schema:
        return " or ".join(_accepted(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "array":
        return f"list of {_accepted(schema['items'])}"
    name = {"null": "`null`", "boolean": "`true`, `false`", "object": "mapping"}.get(kind, kind)
    bounds = {
        "minimum": " ≥ {:g}",
        "exclusiveMinimum": " > {:g}",
        "maximum": ", ≤ {:g}",
        "exclusiveMaximum": ", < {:g}",
        "multipleOf": ", multiple of {:g}",
        "minLength": ", not empty",
    }
    return name + "".join(text.format(schema[bound]) for bound, text in bounds.items() if bound in schema)


def patch_table() -> str:
    """Every patch, what it mends, and on which machines it is applied."""
    rows = [
        [f"`{p.name}`", p.reason, f"`{p.place}`", p.package, *("x" if p.when(k) else "" for k in MACHINES.values())]
        for p in all_patches()
    ]
    return "\n".join(_table(["patch", "reason", "place", "written for", *MACHINES], rows))


def _table(heads: list[str], rows) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


GENERATED = {"docs/recipes.md": recipe_tables, "docs/design.md": patch_table}
BLOCK = re.compile(r"(?<=<!-- generated: make docs -->\n\n).*(?=\n\n<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_those_of_the_code(name):
    (found,) = BLOCK.findall((ROOT / name).read_text())
    assert found == GENERATED[name]().strip(), "run make docs"


# What the text names


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_names_and_links_exist(doc):
    text = BLOCK.sub("", doc.read_text())
    for path, name in re.findall(r"`(megarl/[\w/.-]+)(?::([\w.]+))?`", text):
        assert (ROOT / path).exists(), path
        assert not name or name in _definitions(ROOT / path), f"{path} has no {name}"
    for link in re.findall(r"\]\(([^)#]*)(?:#[\w-]+)?\)", text):
        assert "://" in link or (doc.parent / link).exists(), link
    for target in re.findall(r"(?:^ +|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"


def _definitions(file: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`, and constants."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            inner = (child for child in node.body if isinstance(child, ast.FunctionDef))
            names |= {f"{node.name}.{function.name}" for function in inner}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_every_metric_is_explained():
    kinds = "reward|rollout|prompts|policy|optimizer|mismatch|time|throughput|media|sync|eval"
    code = "\n".join(file.read_text() for file in (ROOT / "megarl").rglob("*.py"))
    logged = set(re.findall(rf'"((?:{kinds})/[a-z0-9_]+)"', code))
    explained = set(re.findall(rf"`((?:{kinds})/[a-z0-9_]+)`", (ROOT / "docs" / "run-folder.md").read_text()))
    assert logged - explained == set()


def test_every_room_is_described():
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = {entry.name for entry in (ROOT / "megarl").iterdir()} - {"__init__.py", "__pycache__"}
    assert [room for room in sorted(rooms) if not re.search(rf"^\|.* ?`megarl/{room}`.*\|$", text, re.MULTILINE)] == []


def test_rooms_do_not_import_what_stands_above_them():
    above = {f"megarl.{file.stem}" for file in (ROOT / "megarl").glob("*.py")} - {"megarl.__init__", "megarl.errors"}
    rooms = {file.parent for file in (ROOT / "megarl").glob("*/__init__.py")}
    rooms -= {file.parent for file in (ROOT / "megarl").glob("*/__main__.py")}  # commands stand above them too
    assert len(rooms) > 5
    for file in (file for room in rooms for file in room.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not above & set(names), f"{file.relative_to(ROOT)} imports {above & set(names)}"


if __name__ == "__main__":
    for name, generate in GENERATED.items():
        text, table = (ROOT / name).read_text(), generate().strip()
        (ROOT / name).write_text(BLOCK.sub(lambda _, table=table: table, text))
