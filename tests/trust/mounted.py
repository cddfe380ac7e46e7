"""Conversions to a file system that fills up, or that the kernel makes read-only, at one of their calls.

``unshare -m python -m tests.trust.mounted KIND FOLDER AT...`` mounts it in FOLDER, converts once for each
call, and continues; it fails with what is wrong.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import rankxform
from rankxform.publish import journal
from tests.trust.test_kills import KilledPlace
from tests.trust.victim import CHANGING

SIZE = 8 << 20
READ_ONLY, FULL = "read-only", "full"
REASONS = {
    READ_ONLY: "Read-only file system",
    FULL: r"No space left on device|B are free; make room",
}


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


class Mounted:
    """A small file system, its trouble, and how that ends."""

    def __init__(self, kind, folder):
        self.kind, self.point, self.image = kind, folder / "m", folder / "image"
        self.point.mkdir(exist_ok=True)
        if kind == READ_ONLY:
            self.image.write_bytes(b"")
            os.truncate(self.image, SIZE)
            subprocess.run(["mkfs.ext4", "-q", "-F", self.image], check=True)
            mount("-o", "loop", self.image, self.point)
        else:
            mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", self.point)

    def begin_trouble(self):
        if self.kind == READ_ONLY:
            mount("-o", "remount,abort", self.point)
            return
        with open(self.point / "filler", "wb", buffering=0) as file:
            for nbytes in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(nbytes))
                except OSError:
                    continue

    def end_trouble(self):
        if self.kind == READ_ONLY:
            subprocess.run(["umount", self.point], check=True)
            subprocess.run(["e2fsck", "-p", self.image], capture_output=True, check=False)
            mount("-o", "loop", self.image, self.point)
        else:
            (self.point / "filler").unlink(missing_ok=True)

    def close(self):
        subprocess.run(["umount", self.point], check=True)


def run(place, dst, at, trouble):
    """Convert with `trouble` before call `at` that changes something; return how many there were."""
    number = [0]

    def counted(real):
        def call(*args, **options):
            number[0] += 1
            if number[0] == at:
                trouble()
            return real(*args, **options)

        return call

    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in CHANGING}):
        rankxform.transform(place.src, dst, **place.options, verify=True)
    return number[0]


def main(kind, folder, *calls):
    folder = Path(folder)
    journal.JOURNAL_SECONDS = 0
    place = KilledPlace(folder, "none", "ckpt")
    rankxform.transform(place.src, folder / "verified", **place.options, verify=True)
    refused = 0
    mounted = Mounted(kind, folder)
    total = run(place, mounted.point / "counted", 0, None)
    mounted.close()
    for share in calls:
        mounted = Mounted(kind, folder)
        dst, at = mounted.point / "dst", 1 + int(total * int(share) / 100)
        try:
            run(place, dst, at, mounted.begin_trouble)
        except rankxform.RankxformError as error:
            refused += 1
            assert isinstance(error, rankxform.StorageError), error
            assert re.search(REASONS[kind], str(error)) and str(mounted.point) in str(error), error
        place.check_unfinished(dst)
        mounted.end_trouble()
        place.check_unfinished(dst)
        run(place, dst, 0, None)
        place.check_finished(dst)
        mounted.close()
    print(f"{refused} of {len(calls)} runs failed, of {total} calls")
    return 0 if refused * 3 > len(calls) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
