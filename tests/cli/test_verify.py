"""The verb `verify`."""

from __future__ import annotations

from tests.cli.test_main import command, place

__all__ = ["place"]


def test_a_difference_comes_with_the_command_that_compares(place):
    command("transform", place.src, place.dst, *place.strategies, "--prefix", "net_")
    (place.dst / "rank_1" / "net_1.ckpt").write_bytes(b"")
    code, output = command("verify", place.src, place.dst, *place.strategies)
    assert code == 6 and "made with other options; compare it with: rankxform verify" in output
    assert "--prefix net_" in output
    code, output = command("verify", place.src, place.dst, *place.strategies, "--prefix", "net_")
    assert code == 6 and "made with other options" not in output
