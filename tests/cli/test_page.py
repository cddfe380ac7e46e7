"""Where a page is written."""

from __future__ import annotations

from pathlib import Path

from tests.results.test_html import command, place

__all__ = ["place"]


def test_where_no_page_can_be_is_said_first(place):
    flags = place.strategies
    other = place.tmp / "other.html"
    other.write_text("not a page")
    for page, why in (
        (place.tmp, "ends in .html"),
        (Path(place.src) / "rank_0" / "checkpoint_0.ckpt", "ends in .html"),
        (place.tmp / "none" / "page.html", "in a folder that is there"),
        (Path(place.src) / "page.html", "lies in SRC"),
        (other, "is there already, and is no page"),
    ):
        code, output = command("transform", place.src, place.dst, *flags, "--report", page)
        assert code == 2 and why in output
        assert not place.dst.exists()
        code, output = command("inspect", place.src, "--page", page)
        assert code == 2 and why in output and "--page" in output
    assert other.read_text() == "not a page"
    page = Path("/proc/page.html")  # nothing can be made there: the work is done and told before
    for verb in ("transform", "verify"):
        code, output = command(verb, place.src, place.dst, *flags, "--report", page, processes=2)
        assert code == 0 and "warning: no page was written" in output
        assert "\ndone " in output or "\nsame " in output
    code, output = command("verify", place.dst, "--report", place.tmp / "page.html")
    assert code == 2 and "verify SRC DST" in output
