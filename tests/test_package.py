"""The package: it builds, and works in an empty environment, with all its data and no source tree."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest
import yaml

import rankxform
from tests import reference

ROOT = Path(__file__).parent.parent
OF_A_BUILD = (
    "setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "rankxform", "packaging",
)  # fmt: skip
GENERATED = runpy.run_path(str(ROOT / "packaging" / "generate.py"))["FILES"]


DATE = {"SOURCE_DATE_EPOCH": "1700000000"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist, and the wheel that is built of it."""
    here = tmp_path_factory.mktemp("build")
    for name in OF_A_BUILD:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, here / name)
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", here / "dist", here]
    subprocess.run(line, check=True, capture_output=True, env={**os.environ, **DATE})
    return {path.suffix: path for path in (here / "dist").iterdir()}


def test_two_builds_are_equal(built, tmp_path):
    """Of other folders, at another time: by the archive of the first, and the time of its commit."""
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for path in source.rglob("*"):
        os.utime(path)
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source]
    subprocess.run(line, check=True, capture_output=True, env={**os.environ, **DATE})
    for path in (tmp_path / "dist").iterdir():
        assert path.read_bytes() == built[path.suffix].read_bytes(), path.name


def test_versions_agree():
    named = [
        line for line in (ROOT / "setup.cfg").read_text().splitlines() if line.startswith("version")
    ]
    assert named == [f"version = {rankxform.__version__}"]


def test_the_containerfile_copies_all_of_a_build():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == set(OF_A_BUILD)


def test_what_is_published_is_described_well(built):
    line = [sys.executable, "-m", "twine", "check", "--strict", *built.values()]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_up_to_date(name):
    found = (ROOT / "packaging" / name).read_text()
    assert found == GENERATED[name](), "run packaging/generate.py"


def test_completion(tmp_path):
    """Verbs, actions, options, values; files where there is nothing to say."""
    (tmp_path / "src").touch()
    program = (
        f"source {ROOT}/packaging/rankxform.bash\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rankxform 2> /dev/null; echo "${COMPREPLY[*]}"'
    )
    for words, found in (
        (["tra"], "transform"),
        (["transform", "--dst-fo"], "--dst-form"),
        (["transform", "--dst-form", "c"], "checkpoint2"),
        (["strategy", "sh"], "show"),
        (["strategy", "show", "--r"], "--raw"),
        (["plan", "sr"], "src"),
    ):
        line = ["bash", "-c", program, "bash", "rankxform", *words]
        done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout.strip() == found, words


def test_an_sdist_and_a_wheel_in_an_empty_environment(built, tmp_path):
    assert set(built) == {".gz", ".whl"}
    with tarfile.open(built[".gz"]) as archive:
        names = archive.getnames()
    assert any(name.endswith("results/page.js") for name in names)
    assert not any("tests/" in name for name in names)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    bin = tmp_path / "env" / "bin"
    subprocess.run([bin / "pip", "install", "-q", built[".whl"]], check=True)
    sharded = [{"w": ([2], [0, -1], 0, 0)}]
    strategy = reference.write_strategy(tmp_path / "a.ckpt", sharded)
    params = {"w": ((4, 4), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", sharded, params)

    def run(*words):
        line = [bin / "rankxform", *words]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"rankxform {rankxform.__version__}\n"
    assert (tmp_path / "env/share/man/man1/rankxform.1").is_file()
    assert "qwen3" in run("maps", "list")
    assert "llama" in run("strategy", "presets")
    run("transform", src, "dst", "--src-strategy", strategy, "--report", "page.html")
    assert reference.wrong_slices(tmp_path / "dst", None, params) == []
    assert "<style>" in (tmp_path / "page.html").read_text()


def requirements():
    """What setup.cfg asks for at run time: minimal versions by name; None: any version."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [
        *config["options"]["install_requires"].split("\n"),
        f"python{config['options']['python_requires']}",
    ]
    found = {}
    for line in lines:
        if match := re.match(r"(\w+)(?:>=([\d.]+))?", line):
            found[match[1]] = match[2]
    return found


def test_the_conda_recipe_asks_for_the_same():
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == rankxform.__version__
    run = (line.partition(" >=") for line in recipe["requirements"]["run"])
    assert {name: version or None for name, _, version in run} == requirements()


def test_the_conda_recipe_is_one(tmp_path):
    """As the tool that builds it reads and renders it."""
    rattler_build = pytest.importorskip("rattler_build")
    path = ROOT / "packaging" / "conda" / "recipe.yaml"
    (rendered,) = rattler_build.Stage0Recipe.from_file(path).render(rattler_build.VariantConfig())
    recipe = rendered.recipe() if callable(rendered.recipe) else rendered.recipe
    assert (recipe.package.name, recipe.package.version) == ("rankxform", rankxform.__version__)
    wrong = tmp_path / "recipe.yaml"
    wrong.write_text(path.read_text().replace("noarch:", "noarc:"))
    with pytest.raises(Exception, match="noarc"):
        rattler_build.Stage0Recipe.from_file(wrong)


def test_the_spack_recipe_asks_for_the_same():
    """The recipe is run with directives that note what they are given."""
    noted = []
    package = types.SimpleNamespace(PythonPackage=object)
    for directive in ("version", "depends_on"):
        note = lambda *words, of=directive, **more: noted.append((of, words, more))  # noqa: E731
        setattr(package, directive, note)
    for directive in ("license", "variant"):
        setattr(package, directive, lambda *words, **more: None)
    text = (ROOT / "packaging" / "spack" / "package.py").read_text()
    exec(text.replace("from spack.package import *", ""), vars(package))
    assert ("version", (rankxform.__version__,), {}) in noted
    when = {words[0]: more["when"] for _, words, more in noted if "when" in more}
    assert when == {"py-tomli": "^python@:3.10", "py-pyyaml": "+yaml"}
    names = [words[0].partition("@") for of, words, _ in noted if of == "depends_on"]
    found = {
        name.removeprefix("py-"): version.rstrip(":") or None
        for name, _, version in names
        if name not in ("py-setuptools", "py-pyyaml")
    }
    assert found == {name.replace("_", "-"): least for name, least in requirements().items()}


def test_the_module_file(tmp_path):
    modulecmd = next(Path("/usr").glob("lib*/**/modulecmd.tcl"), None)
    if modulecmd is None:
        pytest.skip("Environment Modules are not installed")
    text = (ROOT / "packaging" / "modules" / "rankxform").read_text()
    root = f"/opt/rankxform/{rankxform.__version__}"
    assert f"set root {root}\n" in text
    (tmp_path / "rankxform").mkdir()
    (tmp_path / "rankxform" / "1").write_text(text)
    line = [modulecmd, "python", "load", "rankxform"]
    environment = {**os.environ, "MODULEPATH": str(tmp_path)}
    environment = {k: v for k, v in environment.items() if k not in ("MANPATH", "XDG_DATA_DIRS")}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    assert f"os.environ['PATH'] = '{root}/bin:" in done.stdout
    assert f"os.environ['MANPATH'] = '{root}/share/man:'" in done.stdout, "the system's stay"
    assert (
        f"os.environ['XDG_DATA_DIRS'] = '{root}/share:/usr/local/share:/usr/share'" in done.stdout
    )
