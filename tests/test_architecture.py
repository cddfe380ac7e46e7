"""The house: imports point one way, start-up is light, the public names are these."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import rankxform
from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from tests import reference

PACKAGE = Path(rankxform.__file__).parent
# From the cellar up: a package imports from those before it, and from itself.
PACKAGES = (
    "errors", "values", "results", "statements", "process", "options", "geometry", "layout", "formats",
    "transport", "display", "operations", "planning", "storage", "derivation", "checkpoints", "engine",
    "publish", "source", "keywords", "request", "target", "verbs", "inspection", "api", "mindspore", "cli", "__init__",
    "__main__",
)  # fmt: skip
# What a package does not import although it is below.
APART = {
    "transport": ("geometry", "layout", "formats"),
    "derivation": ("transport", "operations", "planning"),
    "inspection": ("verbs",),
    "cli": ("api", "mindspore"),  # beside the API, never through it
    "mindspore": ("inspection",),
}


@cache
def nodes(path):
    """Return all nodes of a file's syntax tree, the module first."""
    return [*ast.walk(ast.parse(path.read_text()))]


@pytest.fixture(scope="module", autouse=True)
def trees_are_forgotten():
    """Later tests fork this process, and would copy them each time."""
    yield
    nodes.cache_clear()


def imports(path):
    """Yield the first two parts of every module that a file imports."""
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split(".")[:2])
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            for alias in node.names:
                yield (*module, alias.name)[:2]


def files():
    return sorted(PACKAGE.rglob("*.py"))


def package_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = package_of(path)
    assert mine in PACKAGES, f"{mine} has no place in the house yet"
    below = set(PACKAGES[: PACKAGES.index(mine) + 1]) - set(APART.get(mine, ()))
    if mine in ("api", "cli"):
        below.add("__init__")  # for its version
    for module in imports(path):
        other = module[1] if len(module) > 1 else "__init__"
        if module[0] == "rankxform" and other in PACKAGES:
            assert other in below, f"{path} imports {other}"


NAMINGS = {("formats/map_table.py", "huggingface"), ("operations/rename.py", "hyperparallel")}
MINDSPORES_FORMS = {("mindspore/files.py", "unified")}


def test_no_module_but_the_forms_knows_a_forms_name():
    """What differs between forms is an attribute of `Form`; "ranks" is a word, too."""
    names = {*FORMS} - {DEFAULT_FORM}
    strings = {
        (str(path.relative_to(PACKAGE)), node.value)
        for path in files()
        if path.parent.name != "checkpoints"
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert strings == NAMINGS | MINDSPORES_FORMS


def test_every_package_has_a_place():
    there = {package_of(path) for path in files()}
    assert there == set(PACKAGES)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("mpi4py", {"transport/launcher.py"}),
        (
            "numpy",
            {
                "transport/mpi.py",
                "mindspore/network.py",
                # copies without the interpreter's lock
                "storage/objects/places.py",
                "storage/objects/ranges.py",
                *(
                    f"engine/{n}.py"
                    for n in (
                        "cast",
                        "checksum",
                        "copier",
                        "in_memory",
                        "piece_schedule",
                        "scan",
                        "schedule",
                        "sinks",
                    )
                ),
            },
        ),
        ("mindspore", {"mindspore"}),
        (
            "os",
            {
                "api.py",
                "cli/launch.py",
                "cli/main.py",
                "cli/options.py",
                "cli/parser.py",
                "display",
                "cli/ranks.py",
                "cli/screen.py",
                "process.py",
                "transport",
                "storage",
                "engine",
                "publish",
                "mindspore",
            },
        ),
    ],
)
def test_few_places_know_the_outside(package, allowed):
    for path in files():
        name = str(path.relative_to(PACKAGE))
        if any(module[0] == package for module in imports(path)):
            assert name in allowed or name.split("/")[0] in allowed, name


def names_used(path, wanted):
    tree = nodes(path)
    return {node.id for node in tree if isinstance(node, ast.Name)} & wanted


def test_there_is_one_way_in():
    found = {}
    for path in files():
        for name in names_used(path, {"PosixStore", "store_at", "Indexer"}):
            found.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    assert found["PosixStore"] == {"storage/store.py"}
    # index, samples: one file, whose name is known; model_files: config.json; companions: what lies where a destination is to be written;
    # hints: which folders below a place are checkpoints, for a message; user_files, own_companions: small files of a model, or of the user; inspection: whether it is one file
    # digests: whole files, and the document of their digests; folder_records, checks, written, existing, folder, verify_folder: a manifest, and whether files that it lists are there
    assert found["store_at"] == {"source/place.py", "source/hints.py", "publish/files.py", "publish/digests.py",
                                 "storage/source_reader.py", "storage/user_files.py", "target/model_files.py", "inspection.py",
                                 "target/own_companions.py", "publish/folder_records.py", "source/checks.py", "source/written.py",
                                 "target/existing.py", "target/folder.py", "verbs/verify_folder.py",
                                 "storage/identity.py", "target/manifest.py", "verbs/follow.py"}  # fmt: skip
    # a destination by its manifest, and shapes for a strategy: no tensor is read
    indexers = {"source/copies.py", "source/written.py", "verbs/strategies.py"}
    assert found["Indexer"] - {"storage/source_reader.py"} == indexers


def test_findings_are_raised_in_one_place():
    raisers = {
        (path.name, function.name)
        for path in files()
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "fault"
        if isinstance(node.ctx, ast.Store)
    }
    assert raisers == {("statements.py", "require"), ("errors.py", "peer_error")}


def test_forms_see_names_and_no_paths():
    for path in (PACKAGE / "checkpoints").glob("*.py"):
        assert not {module[0] for module in imports(path)} & {"os", "pathlib", "glob"}, path


def test_methods_of_values_are_not_compiled_at_each_start():
    taken = {
        str(path.relative_to(PACKAGE))
        for path in files()
        if ("dataclasses", "dataclass") in imports(path)
    }
    # boxes are made by the million, and the standard library's are made faster
    assert taken == {"geometry/box.py", "values.py"}


def test_start_up_imports_little():
    program = (
        "import sys, rankxform.cli.main; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {
        "mpi4py",
        "mindspore",
        "safetensors",
        "google",
        "pytest",
        "importlib_metadata",
    }


def test_the_public_names():
    assert set(rankxform.__all__) == {
        "check", "contents", "derive", "follow", "inspect", "load", "merge", "plan", "plan_reshard", "ranks", "reshard", "transform",
        "verify",
        "Check", "Contents", "Costs", "Derived", "Finding", "Followed", "Inspection", "Parallel", "Parameters", "Plan", "Report", "ShardingRow",
        "Strategy", "Verdict", "Where",
        "CheckpointError", "DerivationError", "DifferenceError", "PeerError", "RankxformError", "RankxformWarning",
        "RequestError", "StoppedError", "StorageError", "StrategyError", "UsageError",
    }  # fmt: skip
    assert all(getattr(rankxform, name).__doc__ for name in rankxform.__all__)


READERS = ("checkpoints", "source", "storage", "target", "verbs")
"""Rooms in which statements on a checkpoint are read."""
WITHIN_ONE = {
    "checkpoints/megatron_names.py": "names of one table that are one tensor's",
    "checkpoints/megatron.py": "arguments and shapes of one job's files, which are one table",
    "checkpoints/verl.py": "the same",
    "checkpoints/meta.py": "the same",
    "checkpoints/placed.py": "checksums of one box in files of one job",
    "storage/objects/access.py": "a process and the one that it was forked of",
    "checkpoints/vllm.py": "names of one folder",
    "checkpoints/torch_dist_files.py": "layers of one model, before they are written",
    "checkpoints/torch_dist.py": "what a backend says of itself against what can be read",
    "checkpoints/folders.py": "an option against the folder that it was to choose; a name against its normal form",
    "verbs/evidence.py": "rows of one tensor, which are values",
    "target/existing.py": "a destination that was written against what it was to be",
    "source/checks.py": "a number of ranks; boxes are compared by facts after it",
    "storage/checkpoint2_metadata.py": "entries of one metadata.json",
    "storage/objects/places.py": "an object against what the same store said of it",
    "storage/identity.py": "mounts of one host",
    "storage/source_reader.py": "a sample against a later one of the same file",
    "target/inputs.py": "stages of one strategy",
    "target/objects.py": "an object against what was sent of it; an option against its default",
    "target/map_choices.py": "a tensor of another checkpoint, whose values are compared next",
    "target/manifest.py": "a file's bytes against those to be written",
}
"""Files that compare two values and refuse, and why these are no two statements of one fact."""


def _is_fixed(node):
    """Tell whether a side of a comparison is in the code, and not read from somewhere."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("len", "type")
    return isinstance(node, (ast.Constant, ast.Tuple)) or ast.unparse(node).isupper()


def refusing_comparisons(path):
    """Yield comparisons of two values that were read, on which something is raised or yielded."""
    for node in nodes(path):
        refusals = (ast.Raise, ast.Yield)
        if not isinstance(node, ast.If):
            continue
        if not any(isinstance(one, refusals) for part in node.body for one in ast.walk(part)):
            continue
        for one in ast.walk(node.test):
            is_equality = isinstance(one, ast.Compare) and isinstance(
                one.ops[0], (ast.Eq, ast.NotEq)
            )
            if is_equality and not any(map(_is_fixed, (one.left, *one.comparators))):
                yield ast.unparse(one)


def test_statements_are_compared_in_one_place():
    found = {
        str(path.relative_to(PACKAGE)): [*refusing_comparisons(path)]
        for path in files()
        if package_of(path) in READERS
    }
    comparing = {path for path, some in found.items() if some}
    more = comparing - {*WITHIN_ONE}
    assert not more, (
        f"make facts of it, see rankxform/statements.py: {more} {[found[p] for p in more]}"
    )
    assert {*WITHIN_ONE} <= comparing, "these compare nothing any more"


def functions():
    """Yield (file, function) of the package."""
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def test_functions_stay_short():
    for path, node in functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        assert lines <= 70, f"{path}: {node.name} has {lines} lines"


MINDSPORES_OWN = {
    "load_distributed_checkpoint",
    "load_segmented_checkpoints",
    "unified_safetensors",
}


def test_functions_take_few_parameters():
    for path, node in functions():
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = [one for one in every if one.arg not in ("self", "cls")]
        if node.name not in MINDSPORES_OWN:
            assert len(own) <= 7, f"{path}: {node.name} takes {len(own)}"


RETIRED = {
    "Cheaper", "Given", "IoPolicy", "Layouts", "Places", "Role", "Root", "Shards", "Standing", "USUAL",
    "Wish", "as_first", "build_catalog", "check_beside", "check_stated", "cut_rows", "explained",
    "finals", "held_alike", "infer", "loose", "made_with", "question", "said",
    "as_exchange", "strangers", "visibility", "Visibility", "weighed",
}  # fmt: skip
"""Names that said nothing, or two things; what they became is in the history."""


VAGUE = {
    "one", "found", "some", "known", "held", "every", "there", "told", "asked", "what", "made", "given",
    "wanted", "rest", "own", "at", "alike", "more", "stated", "gone",
}  # fmt: skip
"""Words that say nothing of what is bound."""

NEARLY_VAGUE = {
    "other", "others", "seen", "kept", "left", "lost", "mine", "chosen", "needed", "by", "of", "why", "before", "behind",
    "beside", "noted", "meant", "taken", "looked", "whole", "same", "each", "thing", "things",
}  # fmt: skip

MOST_FACTS = 28
PUBLIC_NAMES = {("errors.py", "what"), ("api.py", "wanted")}
"""Vague names that programs use: the text of a message, and the ranks that `ranks` is asked for."""


def bindings(path):
    """Yield every parameter, and every name that is stored, each time."""
    for node in nodes(path):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_names_say_what_they_hold():
    vague = {(path.name, name) for path in files() for name in bindings(path) if name in VAGUE}
    assert vague <= PUBLIC_NAMES


def test_few_values_are_called_facts():
    """An entry of a manifest, a file's size and times, fields of JSON have names of their own."""
    names = [name for path in files() for name in bindings(path)]
    assert names.count("facts") <= MOST_FACTS


def test_few_names_are_nearly_empty():
    """`other`, `seen`, `left` and the like are right beside a noun, and vague alone."""
    names = [name for path in files() for name in bindings(path)]
    assert 100 * sum(name in NEARLY_VAGUE for name in names) / len(names) <= 0.5


def test_fields_have_comments_and_no_paragraphs():
    described = []
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                fields = {
                    f.target.id
                    for f in node.body
                    if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
                }
                items = re.findall(r"(?:^|[.;,]\s+)([a-z_]\w*): \S", ast.get_docstring(node) or "")
                described += [node.name] * (len(fields & {*items}) >= 3)
    assert not described


MOST_FIGURES = {
    "transform": {"without_rules": 785, "moves": 450, "upper_moves": 84, "types": 81},
    "verify DST": {"moves": 73},
    "text": {"functions_per_1000_lines": 57.4, "says_nothing": 0},
}  # fmt: skip
"""What a reader pays (tests/reader.py). A figure may fall; a commit that adds an ability raises none."""
MOST_OF_1000 = {"nested": 34, "unlike_fields": 3.6, "short_with_one_caller": 54.6}
"""Of a thousand functions: a package that grows may have more of them, and no larger part."""
LEAST_MIRRORED = 123
"""Modules with a test module of their name at their place; may rise."""

OF_NO_PACKAGE = {"trust", "mpi", "conformance", "oracle", "frameworks", "hosts"}
"""Folders of tests whose subject is no one module."""
OF_NO_MODULE = {
    "cli/test_cases.py", "cli/test_defaults.py", "cli/test_json.py",
    "cli/test_seams.py", "storage/objects/test_destination.py", "test_architecture.py", "test_cases.py", "test_docs.py",
    "test_examples.py", "test_hybrid.py", "test_launch_scripts.py", "test_mindspore_errors.py",
    "test_package.py", "test_reshard.py",
}  # fmt: skip
"""Test modules in the place of a package whose subject is no one module of it."""


def test_tests_stand_where_their_modules_do():
    tests = Path(__file__).parent
    paths = [path.relative_to(tests) for path in tests.rglob("test_*.py")]
    orphans = {
        str(path)
        for path in paths
        if path.parts[0] not in OF_NO_PACKAGE
        and not (PACKAGE / path.parent / path.name.removeprefix("test_")).is_file()
    }
    assert orphans == OF_NO_MODULE


def test_nothing_is_defined_for_nobody():
    """Functions and classes are used in the package, if only by a registry's text; those of the API
    and those that Python or a library calls are used elsewhere."""
    defined, used = {}, {*rankxform.__all__, "_repr_html_"}
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not node.name.startswith("__") and not node.decorator_list:
                    defined[node.name] = f"{path.name}:{node.lineno}"
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.add(getattr(node, "id", None) or node.attr)
            elif isinstance(node, ast.alias):
                used.add(node.name.rpartition(".")[2])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.update(re.findall(r"\w+", node.value) if len(node.value) < 80 else ())
    assert {name: at for name, at in defined.items() if name not in used} == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="comprehensions are entered otherwise")
def test_a_reader_pays_no_more_than_before():
    """A warm process of its own: what other tests left in caches would change what is entered."""
    line = [sys.executable, "-m", "tests.reader", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    figures = json.loads(done.stdout)
    higher = {
        (call, name, figures[call][name], most)
        for call, laws in MOST_FIGURES.items()
        for name, most in laws.items()
        if figures[call][name] > most
    }
    text = figures["text"]
    rates = {name: 1000 * text[name] / text["functions"] for name in MOST_OF_1000}
    higher |= {(name, round(rate, 1)) for name, rate in rates.items() if rate > MOST_OF_1000[name]}
    assert not higher, "(now, at most); `python -m tests.reader --path --names` lists them"
    assert figures["text"]["mirrored"] >= LEAST_MIRRORED


def test_a_conversion_imports_what_it_uses(tmp_path):
    """A plain one of rank folders: no other form, no map, no derivation, and no other verb."""
    stages = [{"w": ([2], [0, -1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", stages, {"w": ((4, 4), "Float32")})
    a = reference.write_strategy(tmp_path / "a.ckpt", stages)
    command = [sys.executable, "-X", "importtime", "-m", "rankxform", "transform", src,
               tmp_path / "dst", "--src-strategy", a]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    loaded = {*re.findall(r"rankxform(?:\.[\w.]+)?$", done.stderr, re.MULTILINE)}
    assert 90 < len(loaded) <= 103, len(loaded)


def test_options_are_declared_without_numpy():
    """What says what it takes, and its version, starts in a third of the time."""
    code = "import sys, rankxform.request, rankxform.cli.parser; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_command_imports_argparse():
    assert not [path for path in files() if ("argparse",) in imports(path)]


def test_a_class_has_a_name_of_its_own():
    names = [
        node.name for path in files() for node in nodes(path) if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}


def identifiers(path):
    for node in nodes(path):
        for field in ("id", "attr", "name", "arg"):
            if isinstance(getattr(node, field, None), str):
                yield getattr(node, field)


def test_no_name_is_a_retired_one():
    for path in files():
        assert not RETIRED & {*identifiers(path)}, path


def imported_at_start(path):
    """Yield the modules that a module imports when it is imported itself."""
    here = path.relative_to(PACKAGE.parent).with_suffix("").parts
    later = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
    later += [n for n in nodes(path) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]  # fmt: skip
    skipped = {id(inner) for node in later for inner in ast.walk(node)}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            base = here[: -node.level] if node.level else ()
            module = (*base, *(node.module or "").split(".")) if node.module else base
            yield ".".join(module)
            yield from (".".join((*module, alias.name)) for alias in node.names)


def test_modules_import_each_other_in_no_circle():
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files()}  # fmt: skip
    waiting = {name: {*imported_at_start(path)} & {*paths} - {name} for name, path in paths.items()}
    while free := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting, "each of these imports another, or is imported by such"


CHANGING = ("add", "append", "extend", "insert", "pop", "remove", "setdefault", "update")


def changed_names(function):
    """Yield the names of what a function assigns items of, or calls to be changed."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGING and isinstance(node.func.value, ast.Name):
                yield node.func.value.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield from (one.id for one in [node.value] if isinstance(one, ast.Name))


def names_bound(body):
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (one.id for one in targets if isinstance(one, ast.Name))


def test_functions_change_nothing_that_modules_keep():
    """Registries are filled when modules are imported, or from outside, and by no function.

    Which locks a process holds is a fact of the process.
    """
    for path in files():
        kept = {*names_bound(nodes(path)[0].body)} - {"_held", "_ROOTS"}
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                own = {*names_bound(ast.walk(node)), *(one.arg for one in node.args.args)}
                changed = ({*changed_names(node)} - own) & kept
                assert not changed, f"{path}: {node.name} changes {changed}"


TOLD = {
    "UsageError", "CheckpointError", "RequestError", "StrategyError", "StorageError",
    "DifferenceError", "FormatError", "Parts",
}  # fmt: skip
REMEDIES = frozenset((
    "leave", "name", "choose", "remove", "copy", "give", "save", "say", "move", "bring", "make", "run",
    "look", "take", "load", "put", "change", "merge", "wait", "install", "raise", "add", "use",
    "compare", "convert", "start", "translate", "let",
))  # fmt: skip
"""Words with which what can be tried begins."""
MOST_WORDS = 100


def is_remedy(text):
    """Tell whether a text begins as what can be tried does."""
    return text.split(" ")[0].lower() in REMEDIES


def fixed_words(node):
    """The words of a text that are always the same, "*" for others; None of what is no text."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "*" for v in node.values)
    return None


def errors_told():
    """Yield (place, what is said first, what can be tried) of every error that is made."""
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TOLD and node.args:
                what = fixed_words(node.args[0])
                if what is not None:
                    tries = [fixed_words(one) for one in node.args[1:]]
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", what, tries


def test_an_error_says_what_was_found_and_then_what_can_be_tried():
    told = [*errors_told()]
    assert len(told) > 400
    long = [(at, what) for at, what, _ in told if len(what.replace("*", "")) > MOST_WORDS]
    assert not long, "one line of 100 characters; more goes to details"
    several = [(at, what) for at, what, _ in told if re.search(r"[a-z)*][.] [A-Z]|[^.][.]$", what)]
    assert not several, "one sentence, and no full stop"
    mixed = [(at, what) for at, what, _ in told if any(map(is_remedy, what.split("; ")))]
    assert not mixed, "what can be tried is an argument of its own"
    ended = [
        (at, one) for at, _, tries in told for one in tries if re.search("[^.][.]$", one or "")
    ]
    assert not ended


@pytest.mark.parametrize(
    "path", sorted((PACKAGE.parent / "benchmarks").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_benchmarks_can_be_imported(path):
    """Nothing else runs them all."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rankxform."):
            module = import_module(node.module)
            assert all(
                hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}")
                for name in node.names
            )


def test_who_writes_is_decided_in_one_place():
    """By `assignment_of`; what it consists of is nobody else's."""
    deciding = {"_assign", "_share_among_nodes", "_whole_files", "_split_files", "_by_parameter"}
    for path in [*files(), *sorted(Path(__file__).parent.rglob("*.py"))]:
        if path != PACKAGE / "planning" / "assign.py" and path != Path(__file__):
            names = {n.name for node in ast.walk(ast.parse(path.read_text()))
                     if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("assign")
                     for n in node.names}  # fmt: skip
            assert not names & deciding, path


SHOWING = {"sections", "in_short", "as_dict", "rows", "_repr_html_"}


def test_results_read_nothing_when_they_are_shown():
    for path in files():
        for cls in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
            for method in (n for n in cls.body if isinstance(n, ast.FunctionDef)):
                if method.name in SHOWING:
                    called = {getattr(n.func, "id", getattr(n.func, "attr", "")) for n in
                              ast.walk(method) if isinstance(n, ast.Call)}  # fmt: skip
                    reading = {name for name in called if re.match("open$|open_|load_|read_", name)}
                    assert not reading, f"{path}: {cls.name}.{method.name}"
