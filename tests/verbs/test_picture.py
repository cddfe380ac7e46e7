"""What the page of a conversion draws."""

from __future__ import annotations

import json
import re

from tests.place import Place
from tests.results.test_html import MODELS, cells, command, facts_in, place, shapes_of

__all__ = ["place"]


def test_a_thousand_ranks_by_stage(tmp_path):
    folder = MODELS / "deepseek_v3"
    src, dst = folder / "full671b_1024p_dp16mp4pp16ep8", folder / "dst_512p_dp16mp4pp8ep32"
    page, flags = tmp_path / "page.html", ["--src-strategy", src, "--dst-strategy", dst]
    words = ["plan", "--shapes", shapes_of(src, tmp_path / "shapes.json"), *flags]
    code, output = command(*words, "--json", "--report", page)
    plan, facts = json.loads(output), facts_in(page)
    assert code == 0 and page.stat().st_size < 2 << 20
    by_stage = cells(facts["flow"])
    assert {row for row, _ in by_stage} == set(map(str, range(8)))
    assert sum(by_stage.values()) == plan["bytes_written"]
    first = sum(sum(one["bytes_from"].values()) for one in plan["shards"] if one["rank"] < 64)
    assert sum(n for (row, _), n in by_stage.items() if row == "0") == first
    assert [len(side["stages"]) for side in facts["layers"]] == [16, 8]
    titles = [(one["title"], one["change"]) for one in facts["kinds"]["drawn"]]
    assert len(set(titles)) == len(titles), "a kind of several stages is drawn once"
    code, output = command(*words)
    assert code == 0 and re.search(r"^ +0 +64 +\S+ GB +\S+ GB +0, 1$", output, re.M), output
    code, output = command(*words, "-v")
    assert code == 0 and re.search(r"^ *511 ", output, re.M)
    code, output = command(*words, "--simulate", 512, "--nodes", 64, "--report", page)
    facts = facts_in(page)
    assert code == 0 and "by the cost model" in facts["head"]["told"]
    between = facts["results"]["simulation"]["between_nodes"]
    assert sum(cells(facts["nodes"]).values()) == sum(one["nbytes"] for one in between) > 0


def test_a_page_of_some_ranks_and_of_few_layers_a_stage(place, tmp_path):
    page = place.tmp / "page.html"
    code, output = command("plan", place.src, *place.strategies, "--ranks", 0, "--report", page)
    assert code == 0, output
    kinds = {kind["title"]: kind for kind in facts_in(page)["kinds"]["drawn"]}
    held = {side["name"]: side["holds"] for side in kinds["layers.*.wq (2)"]["sides"]}
    assert held["after"] == "1 slice", held
    names = [f"layers.{i}.w" for i in range(6)]
    params = dict.fromkeys(names, ((8, 6), "Float32"))
    src = [{name: ([2], [0, -1], 0, 0)} for name in names]
    dst = [{name: ([2], [-1, 0], 0, 0)} for name in names]
    stages = Place(tmp_path / "stages", src, dst, params)
    code, output = command("plan", stages.src, *stages.strategies, "--report", page)
    assert code == 0, output
    assert len(facts_in(page)["kinds"]["drawn"]) == 1


def test_a_page_of_a_tensor_without_elements(tmp_path):
    params = {"empty": ((0, 4), "Float32"), "w": ((8, 4), "Float32")}
    layouts = [dict.fromkeys(params, ([1], [-1, -1], 0, 0))]
    place = Place(tmp_path, layouts, layouts, params)
    page = tmp_path / "page.html"
    code, output = command("transform", place.src, place.dst, *place.strategies, "--report", page)
    assert code == 0, output
    code, output = command(
        "transform", place.src, tmp_path / "dcp", "--src-strategy", place.a, "--dst-form", "dcp"
    )
    assert code == 0, output
    words = ["--dst-strategy", place.b, "--report", page]
    code, output = command("transform", tmp_path / "dcp", tmp_path / "again", *words)
    assert code == 0 and facts_in(page)["head"]["state"] == "right", output
